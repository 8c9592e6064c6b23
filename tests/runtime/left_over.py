"""What runs hold of a cluster, by its own account."""

from __future__ import annotations

from typing import NamedTuple

import ray

__all__ = ["Held", "ours"]


class Held(NamedTuple):
    """Names of drivers, ids of placement groups, and CPUs in use."""

    drivers: frozenset[str]
    groups: frozenset[str]
    cpus: float


def ours() -> Held:
    """What all runs together hold now."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    groups = ray.util.placement_group_table().items()
    return Held(
        frozenset(actor["name"] for actor in actors if actor["name"].startswith("raypipe/")),
        frozenset(group for group, row in groups if row["state"] != "REMOVED"),
        ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0),
    )
