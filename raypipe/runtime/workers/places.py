"""Places of a run's stages: one placement group each, named ``raypipe/<run>/<stage>``.

Ray removes a group when both the actor that made it and that actor's job have ended. A driver that is killed while
its job, a notebook say, lives on would leave its groups behind; whoever notices its death removes them by name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raypipe.errors import PlanError

__all__ = ["PLACE_TIMEOUT_S", "Owner", "release", "release_orphans", "reserve"]

PLACE_TIMEOUT_S = 30.0


class Owner(NamedTuple):
    """The driver that orders stage actors.

    Attributes:
        name: by which their places can be found after its death; "" for a process that is no driver.
        term: generation of its lease on the run's folder: stages obey the newest driver only.
    """

    name: str = ""
    term: int = 0


def reserve(owner: str, numbers: Sequence[int], needs: Mapping[str, float]) -> list[PlacementGroup]:
    """A place for every worker, each on its own, so that one can move later without the others.

    Args:
        owner: the driver's name; "" leaves the groups without one.
        numbers: of the workers; no two places of an owner have the same.
        needs: resources of one worker.

    Raises:
        PlanError: one found none in time; says what the cluster has.
    """
    names = [f"{owner}/{number}" if owner else "" for number in numbers]
    groups = [placement_group([dict(needs)], strategy="PACK", name=name) for name in names]
    deadline_s = time.monotonic() + PLACE_TIMEOUT_S
    for got, group in enumerate(groups):
        if group.wait(max(deadline_s - time.monotonic(), 0.01)):
            continue
        total, free = ray.cluster_resources(), ray.available_resources()
        release(groups)
        has = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k} free" for k in needs)
        wanted = ", ".join(f"{v:g} {k}" for k, v in needs.items())
        raise PlanError(
            f"Worker {numbers[got]} found no place within {PLACE_TIMEOUT_S:g} s: each of the {len(numbers)} workers "
            f"needs {wanted}, {got} got it, and the cluster has {has}. Add nodes, lower num_stages (and num_workers "
            "with it), or ask for less in ScalingConfig(resources_per_worker=...)."
        )
    return groups


def release(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        with contextlib.suppress(RayError):
            remove_placement_group(group)


def release_orphans(owner: str) -> None:
    """Remove the places of a driver that is dead: exactly those named after it."""
    with contextlib.suppress(RayError):
        for group in placement_group_table().values():
            parent, _, worker = group["name"].rpartition("/")
            if parent == owner and worker.isdigit() and group["state"] != "REMOVED":
                release([PlacementGroup(PlacementGroupID.from_hex(group["placement_group_id"]))])
