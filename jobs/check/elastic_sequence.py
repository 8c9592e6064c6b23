"""Ray's elastic sequence: a run whose nodes come and go, 0 -> 4 -> 12 -> 8 -> all lost -> 16, has a stage on each.

    python jobs/check/elastic_sequence.py                          ten minutes on a machine that does nothing else
    python jobs/check/elastic_sequence.py --nodes 1 3 2 0 4        a quarter of it

Nodes are raylets on this machine, each with room for one worker; those that go are killed. The run asks for as many
workers as the sequence has at most, needs its least number above 0, and waits where there is none. It must train at
every size, and end with the parameters of a run in threads that nobody disturbed, to the bit. The sequence is that of
Ray Train's own test (test_elastic_e2e.py). Prints every size when it is reached; the last line is JSON. Exit status 1
where something is not so.
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

from jobs.lib.faults import events
from jobs.lib.machine import machine_line
from jobs.lib.slow_layers import trainer_of_layers
from raypipe import PipelineTrainer, RunHandle, load_state_dict
from tests import processes
from tests.runtime.raylets import Home, private_cluster

NODES = (4, 12, 8, 0, 16)
LAYERS_PER_NODE, LAYER_S = 2, 0.001
ENDLESS, MORE_STEPS, CHECKPOINT_STEPS = 1_000_000, 10, 50
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "10"}
RUN = "sequence"


class Nodes:
    """Those of a private cluster besides its head."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pids: list[int] = []

    def become(self, count: int) -> None:
        """Start nodes, or kill the newest."""
        while len(self._pids) < count:
            self._home.start(cpus=1)
            self._pids.append(self._home.started[-1].pid)
        lost, self._pids = self._pids[count:], self._pids[:count]
        ends = {pid: command for node in lost for pid, command in [(node, ""), *processes.descendants(node).items()]}
        processes.end(ends)


def trainer(folder: Path, name: str, most: int, layer_s: float, **more: Any) -> PipelineTrainer:
    """Of ``most`` stages."""
    return trainer_of_layers(
        LAYERS_PER_NODE * most, layer_s, folder, folder, name, FailureConfig(max_failures=-1),
        num_stages=most, minibatch_size=16, num_microbatches=4, partitioner="parameters",
        checkpoint_interval_steps=CHECKPOINT_STEPS, **more,
    )  # fmt: skip


def wait(what: str, handle: RunHandle, condition: Callable[[], bool], patience_s: float) -> float:
    """Seconds until the condition held.

    Raises:
        TimeoutError: it did not, or the run failed before.
    """
    begin_s = time.monotonic()
    while not condition():
        status = handle.status()
        if time.monotonic() > begin_s + patience_s or status.state == "failed":
            raise TimeoutError(f"not reached: {what}; {status}")
        time.sleep(0.1)
    return time.monotonic() - begin_s


def played(folder: Path, home: Home, sequence: list[int], patience_s: float) -> tuple[list[int], int, str]:
    """(sizes that the run had, steps, checkpoint)."""
    most, least = max(sequence), min(count for count in sequence if count)
    scaling = ScalingConfig(
        num_workers=(least, most), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=0.0
    )
    nodes, sizes = Nodes(home), list[int]()
    handle = trainer(folder, RUN, most, LAYER_S, scaling=scaling).start(ENDLESS)
    try:
        for count in [0, *sequence]:
            begin_s = time.monotonic()
            nodes.become(count)
            took_s = time.monotonic() - begin_s
            if count:
                what = f"{count} stages"
                seconds = wait(what, handle, lambda: len(handle.status().stages) == count, patience_s)  # noqa: B023
                step = handle.status().step
                wait("more steps", handle, lambda: handle.status().step >= step + MORE_STEPS, patience_s)  # noqa: B023
                sizes.append(len(handle.status().stages))
            else:
                what = f"the wait for {least} workers"
                seconds = wait(what, handle, lambda: f"for {least} worker" in handle.status().message, patience_s)
                sizes.append(0)
            print(f"{count} nodes after {took_s:.1f} s, then {what} after {seconds:.1f} s, at step "
                  f"{handle.status().step}; {machine_line()}", flush=True)  # fmt: skip
        handle.stop()
        result = handle.wait(timeout_s=patience_s)
        return sizes, handle.status().step, result.checkpoint
    finally:
        handle.close()


def main() -> int:
    """The whole sequence, and its twin in threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="after none at the beginning")
    parser.add_argument("--seconds", type=float, default=600.0, help="that each change may take, on a busy machine")
    asked = parser.parse_args()
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="sequence-") as made, private_cluster() as home:
        folder = Path(made)
        home.start(cpus=0, environment=HEALTH)
        ray.init(address=home.address, namespace="raypipe", log_to_driver=False, logging_level="ERROR")
        sizes, steps, checkpoint = played(folder, home, asked.nodes, asked.seconds)
        left = [row["name"] for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
        ray.shutdown()
        recoveries = [event["reason"] for event in events(folder / RUN, "recovery")]
        alone = trainer(folder, "alone", max(asked.nodes), 0.0).fit(steps, local=True, progress=False)
        found, wanted = load_state_dict(checkpoint), load_state_dict(alone.checkpoint)
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    figures = {"sizes": sizes, "steps": steps, "different": different, "recoveries": recoveries, "left": left}
    print(json.dumps({"check": "elastic_sequence", "figures": figures}))
    return 0 if sizes == [0, *asked.nodes] and not different and not left else 1


if __name__ == "__main__":
    sys.exit(main())
