"""A run on a cluster of Ray's autoscaler that begins without nodes: it grows as they come, and works with what it gets.

    python jobs/check/autoscaler.py [--seconds 600]

    grows     no node -> it requests four, and waits -> two come: it trains -> four: it grows -> it is stopped
    stays     only two of the four that it requests come: it trains with two to its last step
    waits     one comes, of the two that it needs at least: its status names the missing one -> it is stopped
    fixed     a run of two workers, no range: it waits without a deadline, and trains when the two have come

Its nodes are processes of this machine (jobs/lib/autoscaled.py). After each run the demand on the
autoscaler must be empty, and it stops all nodes again. The parameters must equal those of a run in threads, to the bit.
Prints observations with their times; the last line is JSON. Exit status 1 if an observation is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from tests.runtime.raylets import PATIENCE, TOKEN

os.environ |= TOKEN | PATIENCE  # before Ray is imported, which looks once

import ray
import torch
from ray.train import FailureConfig, ScalingConfig

from jobs.lib.autoscaled import Autoscaled, autoscaled
from jobs.lib.machine import machine_line
from jobs.lib.slow_layers import trainer_of_layers
from raypipe import PipelineTrainer, RunHandle, load_state_dict
from tests import processes

LEAST, MOST = 2, 4
LAYERS, LAYER_S = 8, 0.001
ENDLESS, STEPS, MORE_STEPS = 1_000_000, 60, 20
RUN = "autoscaler"


class Watch:
    """Waits for things, and prints each with the seconds since the beginning.

    Args:
        patience_s: for one thing.
    """

    def __init__(self, cluster: Autoscaled, patience_s: float) -> None:
        self._cluster, self._patience_s, self._began_s = cluster, patience_s, time.monotonic()
        self.missing: list[str] = []

    def see(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until ``condition`` is true, and return its last value."""
        deadline_s = time.monotonic() + self._patience_s
        while not (found := condition()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if not found:
            self.missing.append(what)
        facts = f"{self._cluster.nodes()} nodes, further demand: {len(self._cluster.demand())}"
        print(f"{time.monotonic() - self._began_s:6.1f} s  {'' if found else 'MISSING: '}{what} ({facts})", flush=True)
        return found


def trainer(folder: Path, name: str, *, elastic: bool = True) -> PipelineTrainer:
    scaling = ScalingConfig(
        num_workers=(LEAST, MOST), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=0.0
    )
    if not elastic:
        scaling = ScalingConfig(num_workers=LEAST, resources_per_worker={"CPU": 1})
    return trainer_of_layers(
        LAYERS, LAYER_S, folder, folder, name, FailureConfig(max_failures=0), scaling=scaling,
        num_stages=MOST if elastic else LEAST, minibatch_size=16, num_microbatches=4, partitioner="parameters",
    )  # fmt: skip


def stages(handle: RunHandle) -> int:
    return len(handle.status().stages)


def steps_more(handle: RunHandle, watch: Watch, what: str) -> None:
    """Wait for further steps."""
    wanted = handle.status().step + MORE_STEPS
    watch.see(what, lambda: handle.status().step >= wanted)


def ended(handle: RunHandle, watch: Watch, patience_s: float) -> tuple[int, str]:
    """Wait for the end of a run, empty demand and the end of all nodes; return (steps, checkpoint)."""
    result = handle.wait(timeout_s=patience_s)
    steps = handle.status().step
    handle.close()
    watch.see("the demand is empty", lambda: not watch._cluster.demand())
    watch.see("no node is left", lambda: watch._cluster.nodes() == 0)
    return steps, result.checkpoint


def grows(folder: Path, cluster: Autoscaled, watch: Watch, patience_s: float) -> tuple[int, str]:
    handle = trainer(folder, "grows").start(ENDLESS)
    watch.see(f"{MOST} workers are demanded", lambda: len(cluster.demand()) == MOST)
    cluster.grant(LEAST)
    watch.see(f"it has {LEAST} stages", lambda: stages(handle) == LEAST)
    steps_more(handle, watch, f"it trains with {LEAST} stages")
    cluster.grant(MOST)
    watch.see(f"it has {MOST} stages", lambda: stages(handle) == MOST)
    steps_more(handle, watch, f"it trains with {MOST} stages")
    handle.stop()
    return ended(handle, watch, patience_s)


def stays(folder: Path, cluster: Autoscaled, watch: Watch, patience_s: float) -> tuple[int, str]:
    cluster.grant(LEAST)
    handle = trainer(folder, "stays").start(STEPS)
    watch.see(f"it has {LEAST} stages", lambda: stages(handle) == LEAST)
    return ended(handle, watch, patience_s)


def waits(folder: Path, cluster: Autoscaled, watch: Watch, patience_s: float) -> tuple[int, str]:
    cluster.grant(1)
    handle = trainer(folder, "waits").start(STEPS)
    line = f"for {LEAST} workers of 1 CPU each: 1 can be had, {MOST} are requested"
    if watch.see("its status has what it waits for", lambda: line in handle.status().message):
        print(f"          {handle.status().message}")
    handle.stop()
    return ended(handle, watch, patience_s)


def fixed(folder: Path, cluster: Autoscaled, watch: Watch, patience_s: float) -> tuple[int, str]:
    cluster.grant(0)
    handle = trainer(folder, "fixed", elastic=False).start(STEPS)
    watch.see("it waits for nodes of the autoscaler", lambda: "its autoscaler has to add" in handle.status().message)
    line = handle.status().message
    print(f"          {line}")
    watch.see("it waits without an end", lambda: "waiting since" in line and "gives up" not in line)
    cluster.grant(LEAST)
    return ended(handle, watch, patience_s)


def differing(folder: Path, name: str, steps: int, checkpoint: str) -> list[str]:
    """List parameters that differ from those of a run in threads on all workers."""
    alone = trainer_of_layers(
        LAYERS, 0.0, folder, folder, f"{name}-alone", FailureConfig(max_failures=0),
        num_stages=MOST, minibatch_size=16, num_microbatches=4, partitioner="parameters",
    ).fit(steps, local=True, progress=False)  # fmt: skip
    found, wanted = load_state_dict(checkpoint), load_state_dict(alone.checkpoint)
    return [key for key in wanted if not torch.equal(found[key], wanted[key])]


def main() -> int:
    """Run all parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="that each thing may take, on a busy machine")
    options = parser.parse_args()
    processes.adopt_orphans()
    different: dict[str, list[str]] = {}
    ran: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="autoscaler-") as made, autoscaled({"CPU": 1}, MOST) as cluster:
        ray.init(address=cluster.address, namespace="raypipe", log_to_driver=False, logging_level="ERROR")
        watch = Watch(cluster, options.seconds)
        watch.see("no node and no demand", lambda: cluster.nodes() == 0 and not cluster.demand())
        for play in (grows, stays, waits, fixed):
            name = play.__name__
            print(name)
            ran[name], checkpoint = play(Path(made), cluster, watch, options.seconds)
            different[name] = differing(Path(made), name, ran[name], checkpoint) if checkpoint else []
        ray.shutdown()
    good = (
        not watch.missing
        and not any(different.values())
        and (ran["stays"], ran["waits"], ran["fixed"]) == (STEPS, 0, STEPS)
    )
    print(machine_line())
    print(json.dumps({"check": RUN, "figures": {"missing": watch.missing, "steps": ran, "different": different}}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
