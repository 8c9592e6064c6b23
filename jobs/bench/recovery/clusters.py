"""Parts that need several nodes: raylets of our own on this machine, one worker on each.

node      the raylet of a stage's node is killed, and with it all that runs there
resize    2 -> 3 -> 1 -> 4 -> 2 stages while the run trains
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray

import raypipe
from jobs.bench.recovery.faults import Outcome, Trial, until_new_step
from jobs.bench.recovery.nets import BYTES_PER_PARAMETER, WAIT_S, bits_equal, events, trainer, until, width_of
from jobs.lib.machine import ROOT
from jobs.lib.processes import in_child
from tests import processes
from tests.runtime.raylets import TOKEN, Home, private_cluster

__all__ = ["HEALTH", "TRANSITIONS", "Move", "node_outcome", "resized"]

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Health checks that docs/cluster.md recommends for the head; Ray's own are 5000, 3000, 10000 and 5."""
STORE_BYTES = 1_000_000_000
"""Bytes of a node's object store, as a node with 3.3 GB of memory has by default: state that moves passes through it,
and nothing of it is to be spilled."""
TRANSITIONS = ((2, 3), (3, 1), (1, 4), (4, 2))
BLOCKS = 12
LIMIT_S = 1200.0


@contextlib.contextmanager
def nodes(count: int, environment: Mapping[str, str]) -> Iterator[Home]:
    """Start ``count`` nodes of one processor each, of which the first is the head; this process is connected to it."""
    with private_cluster() as home:
        for _ in range(count):
            home.start(environment=environment, store_bytes=STORE_BYTES)
        ray.init(address=home.address, _node_ip_address=home.head, log_to_driver=False)
        try:
            yield home
        finally:
            ray.shutdown()


def _in_child(work: Callable[..., None], *arguments: Any) -> Any:
    """Run ``work`` in a process that has the clusters' token before it loads Ray."""
    given = {"PYTHONPATH": str(ROOT), **TOKEN}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        return in_child(work, *arguments, limit_s=LIMIT_S)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def node_outcome(size_mb: int, count: int) -> Outcome:
    """Kill the raylet of a node that a stage is on, and start another node, again and again."""
    trials, *rest = _in_child(_node_outcome, size_mb, count)
    return Outcome([Trial(*trial) for trial in trials], *rest)


def resized(block_mb: float, rounds: int) -> tuple[list[Move], Outcome]:
    """Run all transitions, ``rounds`` times, on four nodes whose workers stay warm."""
    moves, outcome = _in_child(_resized, block_mb, rounds)
    return [Move(tuple(stages), *rest) for stages, *rest in moves], Outcome(*outcome)


def _node_outcome(size_mb: int, count: int, file: str) -> None:
    found: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, nodes(4, HEALTH) as home:
        folder = Path(name)
        run = folder / "disturbed"
        handle = trainer(folder, "disturbed", size_mb, 3).start(1_000_000)
        try:
            for number in range(count):
                started = handle.status().step
                until(lambda: handle.status().step >= started + 8, "some steps were done")  # noqa: B023
                until(lambda: len(events(run, "spare")) > number, "the spare was ready")  # noqa: B023
                status = handle.status()
                raylet = raylet_of(home, [stage["process"] for stage in status.stages])
                begin_s = time.monotonic()
                os.kill(raylet, signal.SIGKILL)
                found.append(until_new_step(handle, run, number, begin_s, status.step_s))
                print(f"  {found[-1].seconds:.2f} s, noticed after {found[-1].noticed_s:.2f} s", flush=True)
                home.start(environment=HEALTH, store_bytes=STORE_BYTES)
            Path(file).write_text(json.dumps(ended(handle, folder, found, size_mb, 2)))
        finally:
            handle.close()


def raylet_of(home: Home, stages: list[int]) -> int:
    """Find the raylet process, other than the head's, that is the parent of a stage.

    Raises:
        RuntimeError: all stages are on the head.
    """
    for started in home.started[1:]:
        below = processes.descendants(started.pid)
        for raylet in (pid for pid, command in below.items() if "raylet/raylet" in command.partition(" ")[0]):
            if set(stages) & set(processes.descendants(raylet)):
                return raylet
    raise RuntimeError(f"no node but the head has one of the stages {stages}")


def ended(handle: raypipe.RunHandle, folder: Path, found: list[Trial], size_mb: float, blocks: int) -> Outcome:
    """Stop the run and compare it with one that was left alone."""
    handle.stop()
    result = handle.wait(timeout_s=WAIT_S)
    steps = handle.status().step
    lost = len(set(range(steps)) - set(result.metrics_dataframe["step"]))
    twin = trainer(folder, "undisturbed", size_mb, 2, blocks=blocks).fit(steps, local=True, progress=False)
    return Outcome(found, lost, bits_equal(str(result.checkpoint), str(twin.checkpoint)))


class Move(NamedTuple):
    """One change of the number of stages.

    Attributes:
        seconds: from the end of the last step before to the end of the first one after, less one undisturbed step.
        asked_s: seconds that the call of ``resize`` took.
        moved_bytes: bytes of state that moved between workers.
        expected_bytes: bytes of state of the layers whose worker changed.
        event: line of events.jsonl.
    """

    stages: tuple[int, int]
    seconds: float
    asked_s: float
    moved_bytes: int
    expected_bytes: int
    event: dict[str, Any]


def _resized(block_mb: float, rounds: int, file: str) -> None:
    found: list[Move] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, nodes(4, {}):
        folder = Path(name)
        run = folder / "disturbed"
        handle = trainer(folder, "disturbed", block_mb, 4, blocks=BLOCKS).start(1_000_000)
        try:
            until(lambda: bool(events(run, "spare")), "the spares were ready")
            for before, after in itertools.chain.from_iterable(itertools.repeat(TRANSITIONS, rounds)):
                found.append(change(handle, run, before, after, block_mb))
                print(f"  {before} -> {after}: {found[-1].seconds:.2f} s, {found[-1].moved_bytes / 1e6:.1f} MB of "
                      f"{found[-1].expected_bytes / 1e6:.1f}", flush=True)  # fmt: skip
            Path(file).write_text(json.dumps((found, ended(handle, folder, [], block_mb, BLOCKS))))
        finally:
            handle.close()


def change(handle: raypipe.RunHandle, run: Path, before: int, after: int, block_mb: float) -> Move:
    """Measure one transition while the run trains."""
    started = handle.status().step
    until(lambda: handle.status().step >= started + 8, "some steps were done")
    step_s, held, known = handle.status().step_s, blocks_by_process(handle, run, block_mb), len(events(run, "resize"))
    begin_s = time.monotonic()
    handle.resize(after)
    asked_s = time.monotonic() - begin_s
    until(lambda: len(events(run, "resize")) > known, "the change was recorded")
    event = events(run, "resize")[-1]
    until(lambda: handle.status().step > event["step"], "the first new step was done")
    seconds = event["seconds"] + time.time() - event["time"] - step_s
    now = blocks_by_process(handle, run, block_mb)
    changed = sum(len(blocks - held.get(process, set())) for process, blocks in now.items())
    return Move((before, after), seconds, asked_s, event["moved_bytes"], changed * block_bytes(block_mb), event)


def block_bytes(block_mb: float) -> int:
    """Compute the state bytes of one block, whose layer has a bias too."""
    width = width_of(block_mb)
    return BYTES_PER_PARAMETER * (width * width + width)


def blocks_by_process(handle: raypipe.RunHandle, run: Path, block_mb: float) -> dict[int, set[int]]:
    """Map each stage's process to the blocks that it holds in the present plan, in pipeline order."""
    stages = json.loads((run / "plan.json").read_text())["partition"]["stages"]
    of_one = block_bytes(block_mb) * 4 // BYTES_PER_PARAMETER
    counts = [round(stage["param_bytes"] / of_one) for stage in stages]
    bounds = [0, *itertools.accumulate(counts)]
    told = handle.status().stages
    return {told[at]["process"]: set(range(*pair)) for at, pair in enumerate(itertools.pairwise(bounds))}
