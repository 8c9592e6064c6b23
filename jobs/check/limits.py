"""A memory limit while the controller turns: what a stage holds at its fullest stays below it.

    python jobs/check/limits.py        a small GPT on two stages; limits of what 1F1B, slack 2 and slack 3 need

Messages are held for longer than a micro-batch takes, by their bytes, so that the controller wants all the slack that
it can get, and codecs where it gets too little. Every limit is a process of its own, whose allocator hands freed memory
back at once; bytes are those of plans.py without the pages of libraries' code. The most of all steps counts,
those in which the schedule was turned among them. The exit status is 1 where a stage held more than its limit, or under
the tightest one the controller did not say that memory was what stopped it, or did not compress instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import raypipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.bench.links import gpt
from jobs.check.plans import TIGHT
from jobs.check.stage_watch import Watch, read_lines, stage_key
from jobs.lib import common
from jobs.lib.common import machine_line
from jobs.lib.held_links import Hold, moving

HELD_S = 0.120
STEPS, WARM = 24, 2
LIMIT_S = 400.0
MARGIN = 1.02
"""Of the limit over the plan's bytes: one more micro-batch is more than that."""
MOST_CODE = 4 << 20
ALLOWS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "slack 2": {"schedule": "slack", "slack": 2},
    "slack 3": {"schedule": "slack", "slack": 3},
}
LAYOUT: dict[str, str] = {"most held / limit": r"held_of_limit_(\w+)"}
TARGETS: dict[str, str] = {r"held_of_limit_\w+": "<= 1"}


@dataclass
class Watched:
    """Makes AdamW, watches its stage's memory, and holds that stage's messages."""

    hold: Hold
    watch: Watch

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        self.hold(named)
        return self.watch(named)


def trainer_of(folder: Path, **pipeline: Any) -> raypipe.PipelineTrainer:
    """Eight blocks in two halves, M = 8."""
    full_bytes = 4 * gpt.MICROBATCH_SIZE * gpt.CONTEXT * gpt.WIDTH
    hold = Hold(moving(((0, 0),), HELD_S), gpt.MICROBATCHES, full_bytes)
    return raypipe.PipelineTrainer(
        gpt.chain(),
        loss_fn=gpt.loss_fn,
        optimizer=Watched(hold, Watch(torch.optim.AdamW, {"lr": 1e-4}, folder, "bytes")),
        train_data=gpt.samples(STEPS),
        pipeline=raypipe.PipelineConfig(
            num_stages=2,
            minibatch_size=gpt.MICROBATCHES * gpt.MICROBATCH_SIZE,
            num_microbatches=gpt.MICROBATCHES,
            partitioner=("5",),
            transport="tcp",
            retune_interval_steps=5,
            **pipeline,
        ),
        scaling_config=SimpleNamespace(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )


def run(allows: str) -> dict[str, Any]:
    """One run under the limit that this schedule needs: bytes, schedules and reasons."""
    with tempfile.TemporaryDirectory(prefix="check-limits-") as name:
        folder = Path(name)
        os.environ["RAYPIPE_CACHE_DIR"] = str(folder / "profiles")
        # Asking for memory has the model profiled, which is what the limit must be in terms of.
        plain = trainer_of(folder, memory_limit_bytes=1 << 40, **ALLOWS[allows]).plan()
        assert plain.prediction is not None
        limit = round(MARGIN * max(stage.memory_bytes for stage in plain.prediction.stages))
        trainer = trainer_of(folder, memory_limit_bytes=limit, codec_forward="auto", codec_backward="auto")
        job = trainer._prepared()
        result = trainer.fit(num_steps=STEPS, progress=False)
        lines = read_lines(folder)
        events = [json.loads(line) for line in (Path(result.path) / "events.jsonl").read_text().splitlines()]
        schedules = [record.schedule for record in result.records]
    most = []
    for program in job.programs:
        own = lines[stage_key(name for name in program.parameters if name in program.trainable)]
        buffers = sum(job.tensors[name].nbytes for name in program.buffers)
        most.append(
            max(
                line["held_bytes"] + buffers + line["end"]["VmHWM"] - before["end"]["VmRSS"] - _code(before, line)
                for before, line in pairwise(own[WARM - 1 :])
            )
        )
    reasons = [event["reason"] for event in events if "memory does not allow" in event["reason"]]
    return {
        "limit": limit,
        "most": most,
        "schedules": [schedule for schedule, _ in groupby(schedules)],
        "in_flight": max(record.peak_in_flight for record in result.records),
        "reason": reasons[-1] if reasons else "",
    }


def _code(before: dict[str, Any], line: dict[str, Any]) -> int:
    """Bytes of libraries' own pages that came in during a step: the first codec brings 1 MiB of numpy's.

    Raises:
        RuntimeError: there are more than libraries explain.
    """
    came = int(line["end"]["RssFile"]) - int(before["end"]["RssFile"])
    if came > MOST_CODE:
        raise RuntimeError(f"{came} bytes of files came in during a step: that is no library's code")
    return max(0, came)


def main() -> int:
    """1 when a limit did not hold."""
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print(json.dumps(run(sys.argv[2])))
        return 0
    asked = common.arguments(__doc__)
    rows, raw, good = [], {}, True
    for allows in list(ALLOWS)[: 1 if asked.quick else None]:
        command = [sys.executable, __file__, "--one", allows]
        done = subprocess.run(
            command, env={**os.environ, **TIGHT}, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True
        )
        found = raw[allows] = json.loads(done.stdout.splitlines()[-1])
        good = good and max(found["most"]) <= found["limit"]
        if allows == "1f1b":
            good = good and bool(found["reason"]) and "int8" in found["schedules"][-1]
        most = " / ".join(f"{value / 2**20:.1f}" for value in found["most"])
        rows.append([allows, found["limit"] / 2**20, most, found["in_flight"], ", ".join(found["schedules"][-2:])])
        print(f"{allows}: {found['reason']} {machine_line()}", flush=True)
    columns = ("limit of", "MiB", "most held by stage", "in flight", "schedules, the last two")
    print("\n" + common.table(f"memory under a limit; {machine_line()}", columns, rows))
    figures = {f"held_of_limit_{allows.replace(' ', '_')}": max(f["most"]) / f["limit"] for allows, f in raw.items()}
    common.finish("check_limits", figures, raw, asked)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
