"""What runs hold of a cluster, by its own account."""

from __future__ import annotations

from typing import NamedTuple

import ray

__all__ = ["NOTHING", "Held", "ours"]


class Held(NamedTuple):
    """Names of drivers, ids of placement groups, and CPUs in use."""

    drivers: frozenset[str]
    groups: frozenset[str]
    cpus: float

    def beyond(self, before: Held) -> Held:
        """What is held now and was not before; a run that was about to end then may have ended since."""
        return Held(self.drivers - before.drivers, self.groups - before.groups, max(0.0, self.cpus - before.cpus))


NOTHING = Held(frozenset(), frozenset(), 0.0)


def ours() -> Held:
    """What all runs together hold now."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    groups = ray.util.placement_group_table().items()
    return Held(
        frozenset(actor["name"] for actor in actors if actor["name"].startswith("raypipe/")),
        frozenset(group for group, row in groups if row["state"] != "REMOVED"),
        ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0),
    )
