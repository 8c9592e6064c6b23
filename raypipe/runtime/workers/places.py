"""Names and places of a run's stages: one placement group each.

    raypipe/<run>                    the driver
    raypipe/<run>/stage-actor-<n>    stage actor n
    raypipe/<run>/<n>                its placement group

Stage actors of a driver and their places belong to nobody (detached), so that they outlive a driver that is killed, and
the next one finds them by name. Who starts them ends them; where nobody is left to do so, each ends itself when its
lease runs out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raypipe.errors import PlanError

__all__ = [
    "AWAY",
    "NAMESPACE",
    "PLACE_TIMEOUT_S",
    "PREFIX",
    "Owner",
    "actor_name",
    "ask",
    "first_unused",
    "granted",
    "in_words",
    "is_driver",
    "living",
    "owner_of",
    "release",
    "release_abandoned",
    "release_ended",
    "release_orphans",
    "release_unused",
    "room",
    "wait_for",
]

NAMESPACE = "raypipe"
PREFIX = "raypipe/"
PLACE_TIMEOUT_S = 30.0
END_TIMEOUT_S, END_POLL_S = 5.0, 0.05

AWAY = (RayError, ConnectionError, RuntimeError)
"""What Ray raises where its head is not there for a while."""

_ACTOR = "stage-actor-"


class Owner(NamedTuple):
    """The driver that orders stage actors.

    Attributes:
        name: by which their places can be found after its death; "" for a process that is no driver.
        term: generation of its lease on the run's folder: stages obey the newest driver only.
    """

    name: str = ""
    term: int = 0


def ask(owner: str, numbers: Sequence[int], needs: Mapping[str, float]) -> dict[int, PlacementGroup]:
    """A place for every worker, each on its own, so that one can move later without the others; by number.

    They come when the cluster has room. Until then Ray's autoscaler counts them as demand, beside that of everybody
    else, and `ray status` shows them as pending placement groups.

    Args:
        owner: the driver's name; "" leaves the groups without one, and with this process.
        numbers: of the workers; no two places of an owner have the same.
        needs: resources of one worker.
    """
    lifetime = "detached" if owner else None
    return {
        number: placement_group(
            [dict(needs)], strategy="PACK", name=f"{owner}/{number}" if owner else "", lifetime=lifetime
        )
        for number in numbers
    }


def wait_for(places: Mapping[int, PlacementGroup], needs: Mapping[str, float], patience_s: float | None = None) -> None:
    """Return when there is room for all of them; they are given back if that is not so in time.

    Args:
        patience_s: how long; None for PLACE_TIMEOUT_S.

    Raises:
        PlanError: one found none; says what the cluster has.
    """
    patience_s = PLACE_TIMEOUT_S if patience_s is None else patience_s
    deadline_s = time.monotonic() + patience_s
    for got, (number, group) in enumerate(places.items()):
        if group.wait(max(deadline_s - time.monotonic(), 0.01)):
            continue
        has = room(needs)
        release(list(places.values()))
        raise PlanError(
            f"Worker {number} found no place within {patience_s:g} s: each of the {len(places)} workers "
            f"needs {in_words(needs)}, {got} got it, and the cluster has {has}. Add nodes, lower num_stages (and "
            "num_workers with it), or ask for less in ScalingConfig(resources_per_worker=...)."
        )


def granted(places: Mapping[int, PlacementGroup]) -> dict[int, PlacementGroup]:
    """Those of these places that are there now."""
    return {number: group for number, group in places.items() if placement_group_table(group).get("state") == "CREATED"}


def room(needs: Mapping[str, float]) -> str:
    """What the cluster has of these resources, for people."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in needs)


def in_words(needs: Mapping[str, float]) -> str:
    """What a worker needs, for people."""
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def release(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        with contextlib.suppress(RayError):
            remove_placement_group(group)


def actor_name(owner: str, number: int) -> str:
    """Under which Ray knows a stage actor of a driver; its place is ``<owner>/<number>``."""
    return f"{owner}/{_ACTOR}{number}"


def is_driver(name: str) -> bool:
    """Whether an actor of this name is a driver, and none of its stage actors."""
    return name.startswith(PREFIX) and f"/{_ACTOR}" not in name


def living(owner: str) -> dict[int, tuple[Any, PlacementGroup]]:
    """Stage actors of the driver of this name that live, and their places, by number."""
    places, found = _places(owner), {}
    for number in _named(owner):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            actor = ray.get_actor(actor_name(owner, number), namespace=NAMESPACE)
            if number in places:
                found[number] = actor, places[number]
    return found


def first_unused(owner: str) -> int:
    """The first number of which the driver of this name has no stage actor and no place, and none that is ending."""
    return 1 + max((*_named(owner), *_places(owner)), default=-1) if owner else 0


def _named(owner: str) -> list[int]:
    """Numbers of its stage actors, of which some may be ending."""
    prefix = actor_name(owner, 0)[:-1]
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))


def release_orphans(owner: str) -> None:
    """End the stage actors of a driver that is dead, and remove their places: exactly those named after it."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    with contextlib.suppress(RayError):
        while (left := living(owner)) and time.monotonic() < deadline_s:  # a driver may be killed while it starts one
            for actor, _ in left.values():
                ray.kill(actor, no_restart=True)
            time.sleep(END_POLL_S)
        release(list(_places(owner).values()))


def release_ended(owner: str) -> None:
    """Where a driver is gone, remove the places of its stage actors that are gone too."""
    with contextlib.suppress(RayError):
        try:
            ray.get_actor(owner, namespace=NAMESPACE)
        except ValueError:
            release_unused(owner)


def release_abandoned() -> None:
    """Remove what runs whose actors were all killed left on the cluster: nobody of theirs is there to do so.

    A place that stays keeps its share of a node for ever, and an autoscaler keeps a node for it.
    """
    with contextlib.suppress(RayError):
        table = placement_group_table().values()
        names = {row["name"].rpartition("/")[0] for row in table if row["state"] != "REMOVED"}
        for owner in sorted(name for name in names if is_driver(name)):
            release_ended(owner)


def release_unused(owner: str) -> None:
    """Remove the places of a driver in which no stage actor lives, those too that it waits for."""
    here = living(owner)
    release([place for number, place in _places(owner).items() if number not in here])


def owner_of(actor: str | None) -> str:
    """Name of the driver of a stage actor of this name; "" where it has none."""
    return (actor or "").partition(f"/{_ACTOR}")[0]


def _places(owner: str) -> dict[int, PlacementGroup]:
    """By number."""
    found = {}
    for group in placement_group_table().values():
        parent, _, number = group["name"].rpartition("/")
        if parent == owner and number.isdigit() and group["state"] != "REMOVED":
            found[int(number)] = PlacementGroup(PlacementGroupID.from_hex(group["placement_group_id"]))
    return found
