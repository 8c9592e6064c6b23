"""The folder of a run that nobody had to train: a real plan with its predicted timeline, and made-up numbers.

Step 60 failed and was recovered from, step 120 brought another k, one loss is not finite.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from raypipe.engine.io.run_files import MetricsWriter, RunFolder
from raypipe.engine.io.storage import Place
from raypipe.ir.report import StepRecord
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.search import decide, plan_of, timeline_of
from tests.planner.search.test_choose import MIB, REQUEST, chain

__all__ = ["HOSTILE", "make_run"]

HOSTILE = "<script>alert('x')</script>&\"'"
"""Text that a folder may hold and a page must not run."""
BEGAN_S = 1_790_000_000.0


def make_run(folder: Path, steps: int = 200, stages: int = 3) -> Place:
    """Write it."""
    place = Place.of(folder)
    run = RunFolder(place)
    request = dataclasses.replace(
        REQUEST, num_stages=stages, minibatch_size=32, num_microbatches=8, schedule="1f1b", memory_limit_bytes=60 * MIB
    )
    plan = plan_of(decide(request, chain(4 * stages)))
    run.write_plan(plan.to_json())
    run.write_config(f"model: {HOSTILE}\n")
    predicted = timeline_of(plan)
    slower = tuple(Span(s.worker, s.action.shifted(800), 1.3 * s.start_s, 1.3 * s.end_s) for s in predicted.spans)
    run.write_timelines([predicted, Timeline(slower, "measured", name=folder.name)])
    metrics = MetricsWriter(place)
    for step in range(steps):
        metrics.append(_record(step))
    metrics.write()
    lines = [{"time": BEGAN_S + 0.03 * at, "step": at, **event} for at, event in _events(steps)]
    place.write_bytes("events.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return place


def _record(step: int) -> StepRecord:
    loss = math.nan if step == 90 else 4.0 * math.exp(-step / 80) + 0.05 * math.sin(step)
    seconds = 0.03 if step < 100 or step > 120 else 0.055
    schedule = "1f1b" if step < 120 else "kfkb k=2"
    evaluation = (("eval_loss", 4.2 * math.exp(-step / 90)), ("eval_accuracy", step / 250)) if step % 50 == 49 else ()
    norm = 1.0 + 0.2 * math.cos(step)
    return StepRecord(
        step, 32, loss, norm, seconds, 0.2, 4e6 / seconds, 3, schedule, lr=1e-3, tokens=32 * 128, goodput=0.9,
        evaluation=evaluation,
    )  # fmt: skip


def _events(steps: int) -> list[tuple[int, dict[str, object]]]:
    link_s = [0.002, 0.001, 0.0004, 0.0003]
    slow_s = [0.02, *link_s[1:]]
    return [
        (0, {"decision": "start", "reason": "fit was called", "num_steps": steps}),
        (60, {"decision": "failure", "reason": f"stage 1 was killed {HOSTILE}", "seconds": 0.2, "failures": 1}),
        (58, {"decision": "recovery", "reason": "from copies in memory", "seconds": 0.81, "redone_steps": 2,
              "restore_s": 0.3, "configure_s": 0.5, "moved_bytes": 3 * MIB, "replaced": ["worker 1"]}),
        (80, {"decision": "recovery", "reason": "from copies in memory", "seconds": 0.4, "redone_steps": 5,
              "replaced": ["Stage 1"]}),
        (90, {"decision": "regroup", "reason": "the run goes on with 1-1 workers", "seconds": 0.09, "completed": 1}),
        (94, {"decision": "join", "reason": "replicas are there again", "seconds": 0.05, "replicas": [2, 1]}),
        (100, {"decision": "keep", "reason": "1f1b stays.", "link_s": link_s}),
        (120, {"decision": "switch", "reason": "Link 0 changed: kfkb k=2 would take 31 ms.", "link_s": slow_s}),
        (steps, {"decision": "checkpoint", "reason": f"{steps} steps", "seconds": 0.01}),
        (steps, {"decision": "finish", "reason": "all steps done", "checkpoint": "checkpoints/step_0000200"}),
    ]  # fmt: skip
