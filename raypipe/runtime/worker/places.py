"""Names and placement groups of a run's stage actors: requests, finds and removes one placement group per actor.

    raypipe/<run>                    the driver
    raypipe/<run>/stage-actor-<n>    stage actor n
    raypipe/<run>/<n>                its placement group

Stage actors and their placement groups are detached, so that they outlive a driver that is killed, and the next driver
finds them by name. The driver ends the actors that it started; if no driver is left, each ends itself when its lease
expires.
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

NAMESPACE = "raypipe"
PREFIX = "raypipe/"
PLACE_TIMEOUT_S = 30.0
"""Default timeout in seconds of a wait for a placement group; the run's other workers are idle meanwhile."""
END_TIMEOUT_S, END_POLL_S = 5.0, 0.05

AWAY = (RayError, ConnectionError, RuntimeError)
"""Exceptions that Ray raises while its head is unreachable."""

_ACTOR = "stage-actor-"


class Owner(NamedTuple):
    """Process that owns stage actors and that they obey, as a rule a driver.

    Attributes:
        name: name of the driver's actor, with which the names of its stage actors begin; "" if the owner is no driver.
        term: number that grows with each driver of the run; stages obey the driver of the highest term only.
    """

    name: str = ""
    term: int = 0


def request_places(owner: str, numbers: Sequence[int], needs: Mapping[str, float]) -> dict[int, PlacementGroup]:
    """Request one placement group for each worker, so that each can move without the others.

    Ray creates a group when the cluster has room. Until then its autoscaler counts the group as demand, and
    `ray status` shows it as pending.

    Args:
        owner: the driver's name; "" makes groups without a name, which end with this process.
        numbers: the workers' numbers; unique for an owner.
        needs: resources of one worker.

    Returns:
        The groups, by worker number.
    """
    lifetime = "detached" if owner else None
    return {
        number: placement_group(
            [dict(needs)], strategy="PACK", name=f"{owner}/{number}" if owner else "", lifetime=lifetime
        )
        for number in numbers
    }


def created(places: Mapping[int, PlacementGroup]) -> dict[int, PlacementGroup]:
    """Return the placement groups that Ray has created, by number; pending groups are left out."""
    return {number: group for number, group in places.items() if placement_group_table(group).get("state") == "CREATED"}


def room(needs: Mapping[str, float]) -> str:
    """Describe the cluster's total and free amount of each resource in ``needs``, for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in needs)


def in_words(needs: Mapping[str, float]) -> str:
    """Describe the resources of one worker, for messages."""
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def release(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        with contextlib.suppress(RayError):
            remove_placement_group(group)


def actor_name(owner: str, number: int) -> str:
    """Return Ray's name of a driver's stage actor; its placement group is ``<owner>/<number>``."""
    return f"{owner}/{_ACTOR}{number}"


def is_driver(name: str) -> bool:
    """Return True if this is the name of a driver, not of a stage actor."""
    return name.startswith(PREFIX) and f"/{_ACTOR}" not in name


def living(owner: str) -> dict[int, tuple[Any, PlacementGroup]]:
    """Return {number: (stage actor, placement group)} of each living stage actor of the driver with this name."""
    places, actors = _places(owner), {}
    for number in _named(owner):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            actor = ray.get_actor(actor_name(owner, number), namespace=NAMESPACE)
            if number in places:
                actors[number] = actor, places[number]
    return actors


def first_unused(owner: str) -> int:
    """Return a number above all numbers of this driver's stage actors and placement groups, even of ending ones."""
    return 1 + max((*_named(owner), *_places(owner)), default=-1) if owner else 0


def _named(owner: str) -> list[int]:
    """List the numbers of the stage actors of this driver, including some that may be ending."""
    prefix = actor_name(owner, 0)[:-1]
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))


def release_orphans(owner: str) -> None:
    """End all stage actors of a dead driver, within END_TIMEOUT_S, and remove all its placement groups."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    with contextlib.suppress(RayError):
        while (left := living(owner)) and time.monotonic() < deadline_s:  # a driver may be killed while it starts one
            for actor, _ in left.values():
                ray.kill(actor, no_restart=True)
            time.sleep(END_POLL_S)
        release(list(_places(owner).values()))


def release_ended(owner: str) -> None:
    """Remove a driver's placement groups without a living stage actor; do nothing if the driver is alive."""
    with contextlib.suppress(RayError):
        try:
            ray.get_actor(owner, namespace=NAMESPACE)
        except ValueError:
            release_unused(owner)


def release_abandoned() -> None:
    """Remove the placement groups of all dead drivers on the cluster, except groups with a living stage actor.

    A group that stays would keep its share of a node for ever, and the autoscaler would keep the node.
    """
    with contextlib.suppress(RayError):
        table = placement_group_table().values()
        names = {row["name"].rpartition("/")[0] for row in table if row["state"] != "REMOVED"}
        for owner in sorted(name for name in names if is_driver(name)):
            release_ended(owner)


def release_unused(owner: str) -> None:
    """Remove a driver's placement groups without a living stage actor, including pending groups."""
    here = living(owner)
    release([place for number, place in _places(owner).items() if number not in here])


def owner_of(actor: str | None) -> str:
    """Return the name of the driver of a stage actor, given Ray's name of the actor; "" if ``actor`` is None."""
    return (actor or "").partition(f"/{_ACTOR}")[0]


def _places(owner: str) -> dict[int, PlacementGroup]:
    """Return a driver's placement groups, by number."""
    groups = {}
    for group in placement_group_table().values():
        parent, _, number = group["name"].rpartition("/")
        if parent == owner and number.isdigit() and group["state"] != "REMOVED":
            groups[int(number)] = PlacementGroup(PlacementGroupID.from_hex(group["placement_group_id"]))
    return groups
