"""What runs hold of a cluster, by its own account; and the end of what a test left there, by name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray import PlacementGroupID
from ray._private import state, worker
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypipe.runtime.worker.places import NAMESPACE, PREFIX, is_driver
from tests.waiting import wait_until

__all__ = ["AFTER_FAILURE_S", "NOTHING", "PATIENCE_S", "Held", "Living", "leave_nothing", "living", "ours"]

PATIENCE_S = 60.0
AFTER_FAILURE_S = 2.0
"""For what a failed test left: its traceback still holds the run's handle, so that the run does not end by itself."""
END_S = 30.0
LOG_LINES = 12


class Held(NamedTuple):
    """Names of drivers and of their stage actors, ids of placement groups, and CPUs in use."""

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
        frozenset(actor["name"] for actor in actors if actor["name"].startswith(PREFIX)),
        frozenset(group for group, row in groups if row["state"] != "REMOVED"),
        round(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0), 4),  # as fine as Ray counts
    )


class Living(NamedTuple):
    """An actor that has not ended.

    Attributes:
        name: that Ray knows it by; "" for one that has none.
        kind: its class.
        state: in Ray's words.
        process: 0 where it has none yet.
    """

    name: str
    kind: str
    state: str
    process: int


def living() -> dict[str, Living]:
    """All actors that have not ended, named or not, by Ray's id."""
    return {
        key: Living(row["Name"], row["ActorClassName"], row["State"], row["Pid"])
        for key, row in state.actors().items()
        if row["State"] != "DEAD"
    }


def leave_nothing(before: Held, actors: Collection[str], patience_s: float = PATIENCE_S) -> None:
    """Wait until the node holds no more than before; what is left in the end is named, ended, and fails the test.

    Args:
        before: the test.
        actors: that lived before it, by Ray's ids.
        patience_s: for runs that end by themselves.
    """
    deadline_s = time.monotonic() + patience_s
    while (more := ours().beyond(before)) != NOTHING:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    else:
        return
    found = {key: actor for key, actor in living().items() if key not in actors}
    said = _in_words(more, found, patience_s)
    _end(before, actors)
    pytest.fail(said, pytrace=False)


def _in_words(more: Held, found: dict[str, Living], patience_s: float) -> str:
    """What is left, and what its processes wrote last."""
    lines = [f"This test left on the shared node what did not end within {patience_s:g} s, and is ended now:"]
    lines += [f"  name {name}" for name in sorted(more.drivers)]
    table: dict[str, Any] = placement_group_table()
    for group in sorted(more.groups):
        row = table.get(group, {})
        lines.append(f"  placement group {row.get('name') or group}: {row.get('state')}, {row.get('bundles')}")
    lines.append(f"  {more.cpus:g} CPUs")
    for actor in found.values():
        lines.append(f"  actor {actor.name or '(no name)'} of {actor.kind}: {actor.state}, process {actor.process}")
        lines += [f"    | {line}" for line in _wrote_last(actor.process)]
    return "\n".join(lines)


def _wrote_last(process: int) -> list[str]:
    """The last lines of a worker's log."""
    if not process:
        return []
    logs = Path(worker._global_node.get_session_dir_path()) / "logs"
    lines: list[str] = []
    for log in sorted(logs.glob(f"worker-*-{process}.*")):
        lines += log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return lines


def _end(before: Held, actors: Collection[str]) -> None:
    """End exactly what was not there before: drivers first, because they replace the stages that they lose."""

    def ended() -> bool:
        more = ours().beyond(before)
        for name in sorted(more.drivers, key=lambda name: not is_driver(name)):
            with contextlib.suppress(ValueError, RayError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        for key, actor in living().items():
            if key not in actors and not actor.name and actor.process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(actor.process, signal.SIGKILL)
        for group in more.groups:
            with contextlib.suppress(RayError):
                remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))
        return ours().beyond(before) == NOTHING

    wait_until(ended, END_S)
