"""One candidate of bench/links through PipelineTrainer.fit, inside the first namespace.

python jobs/bench/links/ours.py '{"steps": 40, "pipeline": {...}}'

It prints its steps, and at last seconds, schedules and peaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray
from ray.train import RunConfig, ScalingConfig

import raypipe
from jobs.bench.links import gpt
from jobs.lib.turns import gated


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Train, print every step, and return seconds, losses and schedules by step, stage times, peak memory and events.

    Args:
        options: "steps" and "pipeline" (fields of PipelineConfig); optionally "name", "gate", "half_s" and "cpu".
    """
    head = os.environ["RAY_HEAD"]
    ray.init(address=head, _node_ip_address=head.partition(":")[0], log_to_driver=False)
    data: Any = gpt.samples(options["steps"])
    name = options.get("name", "run")
    if "gate" in options:
        data = gated(data, Path(options["gate"]), gpt.MICROBATCHES * gpt.MICROBATCH_SIZE, options["steps"])
    with tempfile.TemporaryDirectory(prefix="bench-links-") as folder:
        trainer = raypipe.PipelineTrainer(
            gpt.chain(options.get("half_s", ())),
            loss_fn=gpt.loss_fn,
            optimizer=gpt.optimizer_of,
            train_data=data,
            pipeline=raypipe.PipelineConfig(
                minibatch_size=gpt.MICROBATCHES * gpt.MICROBATCH_SIZE,
                **{
                    "num_stages": 2,
                    "partitioner": ("5",),
                    "num_microbatches": gpt.MICROBATCHES,
                    **options["pipeline"],
                },
            ),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": options.get("cpu", 1)}),
            run_config=RunConfig(name=name, storage_path=folder),
        )
        handle = trainer.start(num_steps=options["steps"])
        peaks: dict[int, int] = {}
        watch = threading.Thread(target=_watch, args=(handle, peaks), daemon=True)
        watch.start()
        handle.wait(on_news=lambda news: print(f"step {news.status.step}", flush=True))
        run = Path(folder) / name
        rows = pq.read_table(run / "metrics.parquet").to_pylist()
        spans = pq.read_table(run / "timeline" / "spans.parquet").to_pylist()
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    took: dict[str, list[float]] = {}
    traced = 0
    for span in spans:
        name = span["action"].rstrip("0123456789")
        if span["source"] == "measured" and name[1:] in ("F", "B", "I", "W", "STEP"):
            traced = int(span["action"][len(name) :]) // gpt.MICROBATCHES
            took.setdefault(name, []).append(span["end_s"] - span["start_s"])
    return {
        "seconds": [row["seconds"] for row in rows],
        "schedules": [row["schedule"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "busy_s": [row["seconds"] * (1 - row["bubble_fraction"]) for row in rows],
        "stage_s": took,
        "traced": traced,
        "peak_bytes": list(peaks.values()),
        "events": [event for event in events if event["decision"] not in ("keep", "start", "finish")],
    }


def _watch(handle: Any, peaks: dict[int, int]) -> None:
    """Read the peak resident memory of each stage's process while it lives."""
    while True:
        for stage in handle.status().stages:
            with contextlib.suppress(OSError, IndexError):  # the process has ended, or is about to
                peaks[stage["process"]] = gpt.peak_bytes(stage["process"])
        time.sleep(0.5)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
