"""The trace of spot machines, played: raylets on this machine come and go, and two runs train on them in turn.

    machines    six of the trace make one here, so up to four; each a raylet with room for one worker, killed as it goes
    stages      24 layers sleep where an accelerator would compute, so that all of them share this machine's processors
    elastic     ScalingConfig(num_workers=(1, 4)), FailureConfig(max_failures=-1): goes on with what is left, and grows
    restarted   a run of as many workers as there are machines, started again from its newest checkpoint when one is
                lost, and, after it has saved one, when one has come

Nodes have the health checks that docs/cluster.md recommends. Both runs are submitted before the first machine is there,
play the same trace 100 times as quick as it was, and end with it. Goodput is steps done and kept at the end over those
of the same machines undisturbed, by the median step that each number of stages had in the elastic run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.runtime.raylets import PATIENCE, RAY, TOKEN, Home, private_cluster

os.environ |= TOKEN | PATIENCE  # before Ray is imported, which looks once

import pyarrow.parquet as pq
import ray
import torch
from ray.train import FailureConfig, ScalingConfig

from jobs.lib import common, spot
from jobs.lib.faults import events
from jobs.lib.hosts import HEALTH
from jobs.lib.slow_layers import trainer_of_layers
from jobs.lib.spot import Change
from raypipe import PipelineTrainer, RunHandle, load_state_dict
from raypipe.errors import RaypipeError
from tests import processes

__all__ = ["played"]

SPEED, MACHINES_EACH, MOST, LEAST = 100.0, 6, 4, 1
LAYERS, LAYER_S, MICROBATCHES = 24, 0.001, 4
ENDLESS, CHECKPOINT_STEPS, END_S, POLL_S = 1_000_000, 25, 300.0, 0.1


class Lived(NamedTuple):
    """What became of a run.

    Attributes:
        steps: done and kept.
        redone: steps that were done again.
        starts: how often it was started.
        checkpoint: its last one; "" where there is none.
    seen: (step, stages) at moments of the run; of the elastic one.
    """

    steps: int
    redone: int
    starts: int
    checkpoint: str = ""
    seen: tuple[tuple[int, int], ...] = ()

    def told(self) -> dict[str, int]:
        """What is worth keeping."""
        return {"steps": self.steps, "redone": self.redone, "starts": self.starts}


class Machines:
    """Raylets by the names of the trace's machines."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """As a machine boots: nobody waits for it."""
        command = [
            RAY, "start", "--block", f"--address={self._home.address}", f"--node-ip-address={self._home.head}",
            "--num-cpus=1", "--disable-usage-stats", "--object-store-memory=80000000",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        self._running[name] = process
        self._home.started.append(process)

    def lose(self, name: str) -> None:
        """Without a word."""
        process = self._running.pop(name)
        processes.end({process.pid: name, **processes.descendants(process.pid)})
        process.wait()

    def play(self, changes: list[Change], until_s: float, ended: threading.Event) -> None:
        """The trace, from now on."""
        begin_s = time.monotonic()
        for change in changes:
            if change.at_s >= until_s or ended.wait(max(0.0, begin_s + change.at_s - time.monotonic())):
                break
            for name in change.come:
                self.start(name)
            for name in change.go:
                self.lose(name)
        ended.wait(max(0.0, begin_s + until_s - time.monotonic()))
        ended.set()


def trainer(folder: Path, name: str, stages: int, layer_s: float, failures: int, scaling: Any) -> PipelineTrainer:
    return trainer_of_layers(
        LAYERS, layer_s, folder, folder, name, FailureConfig(max_failures=failures), scaling=scaling,
        num_stages=stages, minibatch_size=16, num_microbatches=MICROBATCHES, partitioner="parameters",
        checkpoint_interval_steps=CHECKPOINT_STEPS, retune_interval_steps=0,
    )  # fmt: skip


def elastic(folder: Path, ended: threading.Event) -> Lived:
    """One run, from the first machine to the last."""
    scaling = ScalingConfig(
        num_workers=(LEAST, MOST), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=0.0
    )
    handle = trainer(folder, "elastic", MOST, LAYER_S, -1, scaling).start(ENDLESS)
    seen: list[tuple[int, int]] = []
    while not ended.wait(POLL_S):
        status = handle.status()
        seen.append((status.step, len(status.stages) if status.state == "running" else 0))
    steps, checkpoint = _stopped(handle)
    redone = sum(event["redone_steps"] for event in events(folder / "elastic", "recovery"))
    return Lived(min(steps, seen[-1][0]), redone, 1, checkpoint, tuple(seen))


def restarted(folder: Path, ended: threading.Event) -> Lived:
    """A supervisor that starts the run again, with as many workers as there are machines."""
    starts = seen = redone = 0
    while not ended.is_set():
        count = min(MOST, _machines())
        if count < LEAST:
            ended.wait(POLL_S)
            continue
        scaling = ScalingConfig(num_workers=count, resources_per_worker={"CPU": 1})
        kept = _kept(folder / "restarted")
        with contextlib.suppress(RaypipeError, TimeoutError, ray.exceptions.RayError):  # a machine went: again
            handle = trainer(folder, "restarted", count, LAYER_S, 0, scaling).start(ENDLESS)
            starts, redone, seen = starts + 1, redone + max(0, seen - kept), kept
            try:
                while not ended.wait(POLL_S) and (status := handle.status()).state in ("starting", "running"):
                    seen = max(seen, status.step)
                    if status.state == "running" and count < min(MOST, _machines()):
                        break
            finally:
                seen = max(seen, _stopped(handle)[0])
    return Lived(_kept(folder / "restarted"), redone, starts)


def _kept(folder: Path) -> int:
    """Steps of a run's newest checkpoint."""
    manifests = (folder / "checkpoints").glob("step_*/manifest.json")
    return max((json.loads(manifest.read_text())["step"] for manifest in manifests), default=0)


def _stopped(handle: RunHandle) -> tuple[int, str]:
    """(steps, checkpoint) of a run that is ended and saved."""
    try:
        handle.stop()
        result = handle.wait(timeout_s=END_S)
        return handle.status().step, str(result.checkpoint)
    finally:
        handle.close()


def _machines() -> int:
    """Besides the head."""
    return sum(node["Alive"] for node in ray.nodes()) - 1


@contextlib.contextmanager
def _cluster() -> Iterator[Home]:
    with private_cluster() as home:
        home.start(cpus=0, environment=HEALTH)
        ray.init(address=home.address, namespace="raypipe", log_to_driver=False, logging_level="CRITICAL")
        try:
            yield home
        finally:
            ray.shutdown()


def one(folder: Path, run: Callable[[Path, threading.Event], Lived], changes: list[Change], until_s: float) -> Lived:
    """One run while the trace is played, on a cluster of its own."""
    with _cluster() as home:
        ended = threading.Event()
        player = threading.Thread(target=Machines(home).play, args=(changes, until_s, ended), daemon=True)
        player.start()
        try:
            lived = run(folder, ended)
        finally:
            ended.set()
            player.join()
    print(f"{run.__name__}: {lived.told()}; {common.machine_line()}", flush=True)
    return lived


def played(seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and what they are made of.

    Args:
        seconds: of the trace as it is played, from its first machine.

    Raises:
        RuntimeError: so short a trace, on this machine, saw no run train.
    """
    processes.adopt_orphans()
    changes = spot.changes_of(speed=SPEED, machines_each=MACHINES_EACH)
    first_s = changes[0].at_s
    changes = [change._replace(at_s=change.at_s - first_s) for change in changes]
    until_s = min(seconds, changes[-1].at_s)
    with tempfile.TemporaryDirectory(prefix="spot-") as made:
        folder = Path(made)
        runs = {run.__name__: one(folder, run, changes, until_s) for run in (elastic, restarted)}
        of_stages = spot.step_seconds(_seconds_of(folder / "elastic" / "metrics.parquet"), runs["elastic"].seen)
        last = runs["elastic"].checkpoint
        equal = bool(last) and _as_undisturbed(folder, last)
    if not of_stages:
        raise RuntimeError(f"Nothing was trained within {until_s:g} s: give more --seconds, or a machine that is idle.")
    best = spot.steps_of(changes, until_s, of_stages, MICROBATCHES, (LEAST, MOST))
    figures = {f"goodput_{name}_played": lived.steps / best for name, lived in runs.items()}
    figures |= {"equal_played": float(equal)}
    if runs["restarted"].steps:
        figures["ratio_played"] = runs["elastic"].steps / runs["restarted"].steps
    raw = {name: lived.told() for name, lived in runs.items()}
    return figures, {"runs": raw, "step_seconds": of_stages, "best": best, "seconds": until_s, "speed": SPEED}


def _seconds_of(metrics: Path) -> dict[int, float]:
    """By step; of a run that did none, nothing."""
    if not metrics.exists():
        return {}
    rows = pq.read_table(metrics, columns=["step", "seconds"]).to_pylist()
    return {row["step"]: row["seconds"] for row in rows}


def _as_undisturbed(folder: Path, checkpoint: str) -> bool:
    """Whether a checkpoint is that of a run in threads after as many steps, to the bit."""
    steps = json.loads((Path(checkpoint) / "manifest.json").read_text())["step"]
    alone = trainer(folder, "alone", MOST, 0.0, 0, ScalingConfig(num_workers=MOST))
    wanted = load_state_dict(alone.fit(steps, local=True, progress=False).checkpoint)
    found = load_state_dict(checkpoint)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)
