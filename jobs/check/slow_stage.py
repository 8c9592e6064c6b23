"""One of four stages becomes 1.5 times slower for good: what a step takes until its layers move, and after that.

python jobs/check/slow_stage.py [--steps 80] [--layers 24] [--milliseconds 8]

Stages sleep where an accelerator would compute. Two runs over Ray, one after the other, both with 1F1B:

    again    stage 2 becomes slow at a quarter of the steps, and the stages may be cut again
    fresh    stage 2 is slow from the beginning, and the stages are cut for that when they start

``again`` must end with the bits of a run in threads that nobody disturbed. Prints medians and ratios of seconds per
step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from ray.train import FailureConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import machine_line
from jobs.lib.slow_layers import slow_down, trainer_of_layers
from raypipe import load_state_dict
from raypipe.ir.cluster import Cluster, Device
from raypipe.ir.graph import ModelGraph, Node
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import prefix_sum

STAGES, SLOW_STAGE, SLOWER = 4, 2, 1.5
PIPELINE: dict[str, Any] = {
    "num_stages": STAGES, "minibatch_size": 16, "num_microbatches": 8, "schedule": "1f1b", "partitioner": "prefix_sum",
}  # fmt: skip
WARM_STEPS = 5
WITHIN_STEPS = 20
WAIT_S = 600.0


class Ran(NamedTuple):
    """Seconds by step, the first slow step, lines of events.jsonl, and the parameters at the end."""

    seconds: list[float]
    slow_from: int
    events: list[dict[str, Any]]
    state: dict[str, torch.Tensor]


def run(folder: Path, name: str, asked: argparse.Namespace, slow_at: int | None, **pipeline: Any) -> Ran:
    """Train; from step ``slow_at`` on, None for never, stage 2 is slow."""
    slow = folder / f"slow-{name}"
    slow.mkdir()
    trainer = trainer_of_layers(
        asked.layers, asked.milliseconds / 1e3, slow, folder, name, FailureConfig(max_failures=-1),
        **{**PIPELINE, **pipeline},
    )  # fmt: skip
    handle = trainer.start(asked.steps)
    slow_from, deadline_s = asked.steps, time.monotonic() + WAIT_S
    while slow_at is not None and time.monotonic() < deadline_s:
        status = handle.status()
        if status.step >= slow_at and len(status.stages) == STAGES:
            slow_down(slow, status.stages[SLOW_STAGE]["process"], SLOWER)
            slow_from = handle.status().step + 1  # the step under way is slow in part
            break
        time.sleep(0.01)
    result = handle.wait(timeout_s=WAIT_S)
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    return Ran([record.seconds for record in result.records], slow_from, events, load_state_dict(result.checkpoint))


def fresh_cuts(layers: int) -> tuple[str, ...]:
    """First layers of the stages, cut for what the workers are: equal, and one of them slower."""
    graph = ModelGraph(tuple(Node(str(at), "", (), 0, 0, 1.0, 1.0, 1.0) for at in range(layers)))
    devices = (Device(speed=1 / SLOWER if stage == SLOW_STAGE else 1.0) for stage in range(STAGES))
    cuts = prefix_sum(graph, Cluster(tuple(devices)), Limits(num_stages=STAGES, in_order=True)).cuts
    return tuple(str(cut) for cut in cuts)


def alone(folder: Path, asked: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Parameters of a run in threads, none of which sleeps."""
    failures = FailureConfig(max_failures=0)
    trainer = trainer_of_layers(asked.layers, 0.0, folder, folder, "alone", failures, **PIPELINE)
    return load_state_dict(trainer.fit(asked.steps, local=True, progress=False).checkpoint)


def main() -> int:
    """Both, and the one in threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--milliseconds", type=float, default=8.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-stage-") as made:
        folder = Path(made)
        again = run(folder, "again", asked, asked.steps // 4)
        moves = [event for event in again.events if event["decision"] == "replan"]
        if not moves:
            print("the stages were not cut again", [event["decision"] for event in again.events])
            return 1
        fresh = run(folder, "fresh", asked, 0, partitioner=fresh_cuts(asked.layers))
        wanted = alone(folder, asked)
    even_s = median(again.seconds[WARM_STEPS : again.slow_from - 1])
    slow_s = median(again.seconds[again.slow_from : moves[0]["step"]])
    again_s = median(again.seconds[again.slow_from + WITHIN_STEPS :])
    fresh_s = median(fresh.seconds[fresh.slow_from + WARM_STEPS :])
    print(machine_line())
    for move in moves:
        print(json.dumps(move))
    print(f"slow from step {again.slow_from}, moved after {[move['step'] - again.slow_from for move in moves]} steps")
    print(f"cut {moves[-1]['cuts']}, fresh {fresh_cuts(asked.layers)}")
    print(f"even {even_s * 1e3:.0f} ms, slow {slow_s * 1e3:.0f}, again {again_s * 1e3:.0f}, fresh {fresh_s * 1e3:.0f}")
    print(
        f"slow / even {slow_s / even_s:.3f}, again / slow {again_s / slow_s:.3f}, "
        f"again / fresh {again_s / fresh_s:.3f} (at most 1.05)"
    )
    differing = [name for name, tensor in wanted.items() if not torch.equal(tensor, again.state[name])]
    print(f"parameters that differ from the undisturbed run's: {len(differing)} of {len(wanted)}")
    figures = {
        "even_s": even_s, "slow_s": slow_s, "again_s": again_s, "fresh_s": fresh_s,
        "again_over_fresh": again_s / fresh_s, "different": differing,
    }  # fmt: skip
    print(json.dumps({"check": "slow_stage", "figures": figures}))
    return 0 if not differing and again_s / fresh_s <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
