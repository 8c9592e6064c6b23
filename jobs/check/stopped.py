"""Remains after `ray job stop` of a run with a gigabyte of state: SIGTERM, and SIGKILL three seconds later.

    python jobs/check/stopped.py [--megabytes 500]

A process trains two stages of so much state each on a cluster that stays, gets both signals as Ray's job manager sends
them, and is submitted again:

    at once     stages that still live wait for the next driver for driver_grace_s, and it takes them over
    later       the stages have ended: the next driver resumes from a checkpoint

In the end every step must be in the metrics once, and parameters those of a run in threads without a stop, to the
bit. Prints how long the process lived after SIGTERM, which checkpoint was whole then, and from which step the next one
went on; the last line is JSON. Exit status 1 where a step is missing or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray

from jobs.bench.recovery.nets import bits_equal, trainer, until
from jobs.lib.machine import ROOT, machine_line
from raypipe.engine.io.checkpoint import newest_step
from raypipe.engine.io.storage import Place
from tests.runtime.raylets import TOKEN, private_cluster

NAME, STEPS, STOP_AT, EVERY_STEPS = "stopped", 24, 8, 4
KILL_AFTER_S = 3.0
"""RAY_JOB_STOP_WAIT_TIME_S by default."""
GRACE_S, LATER_S = 15.0, 30.0
LIMIT_S = 600.0


def submit(address: str, folder: Path, megabytes: int) -> subprocess.Popen[bytes]:
    """Start the process of a job, in a session of its own."""
    command = [sys.executable, __file__, "--train", str(folder), "--megabytes", str(megabytes)]
    environment = {**os.environ, **TOKEN, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=sys.stderr)


def train(folder: Path, megabytes: int) -> None:
    """Train in this process."""
    ray.init(log_to_driver=False, logging_level="ERROR")
    made = trainer(folder, NAME, megabytes, 2, checkpoint_interval_steps=EVERY_STEPS, driver_grace_s=GRACE_S)
    made.fit(STEPS, progress=False)


def stop(job: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Stop a process as the job manager does; seconds that it lived, and how it ended."""
    begin_s = time.monotonic()
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
    code = job.wait(LIMIT_S)
    return time.monotonic() - begin_s, code


def steps_told(folder: Path) -> list[int]:
    """List the steps in the run's metrics."""
    path = folder / NAME / "metrics.parquet"
    return [row["step"] for row in pq.read_table(path).to_pylist()] if path.exists() else []


def checkpointed(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; -1 without one."""
    run = folder / NAME
    found = newest_step(Place.of(run)) if run.exists() else None
    return -1 if found is None else found


def stopped(folder: Path, megabytes: int, pause_s: float) -> dict[str, Any]:
    """Stop one job and submit it again."""
    with private_cluster() as home:
        home.start(cpus=3, store_bytes=2_000_000_000, environment=TOKEN)
        job = submit(home.address, folder, megabytes)
        until(lambda: checkpointed(folder) >= STOP_AT or job.poll() is not None, "there was a checkpoint", LIMIT_S)
        lived_s, code = stop(job)
        whole = checkpointed(folder)
        time.sleep(pause_s)
        later = checkpointed(folder)
        again = submit(home.address, folder, megabytes)
        assert again.wait(LIMIT_S) == 0, "the second submission failed"
    return {"lived_s": round(lived_s, 2), "code": code, "checkpoint": whole, "checkpoint_later": later}


def main() -> int:
    """Run both ways of stopping, and the run without a stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="of state, per stage")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.megabytes)
        return 0
    print(machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="stopped-") as name:
        whole = trainer(Path(name), "whole", options.megabytes, 2).fit(STEPS, local=True, progress=False)
        figures: dict[str, Any] = {}
        for way, pause_s in (("at_once", 0.0), ("later", LATER_S)):
            folder = Path(name) / way
            found = stopped(folder, options.megabytes, pause_s)
            lines = (folder / NAME / "events.jsonl").read_text().splitlines()
            found["told"] = [event["decision"] for event in map(json.loads, lines)]
            found["every_step_once"] = sorted(steps_told(folder)) == list(range(STEPS))
            found["equal"] = bits_equal(str(whole.checkpoint), str(folder / NAME))
            figures[way] = found
            print(f"{way}: {found}", flush=True)
    print(json.dumps(figures), flush=True)
    return int(not all(found["every_step_once"] and found["equal"] for found in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
