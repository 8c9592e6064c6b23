"""Faults of one process of a run that trains: it is killed, or stopped for good."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import raypipe
from jobs.bench.recovery.nets import WAIT_S, bits_equal, events, trainer, until

__all__ = ["Outcome", "Trial", "measured", "measured_early", "until_new_step"]

STEPS_BETWEEN = 8
"""Steps from a recovery to the next fault, at least."""
MOST_FURTHER_S, SEED = 10.0, 11
"""Most seconds of a random delay before a fault, which varies the age of the newest copy between trials; its seed."""


class Trial(NamedTuple):
    """One fault.

    Attributes:
        seconds: from the fault to the end of the first new step, less one undisturbed step.
        noticed_s: from the fault to the line of events.jsonl about the failure.
        step_s: seconds of an undisturbed step.
        redone: steps that all stages replayed.
        event: event of the recovery.
    """

    seconds: float
    noticed_s: float
    step_s: float
    redone: int
    event: dict[str, Any]


class Outcome(NamedTuple):
    """A run with its faults.

    Attributes:
        lost: steps that its records lack.
        equal: True if its parameters equal those of an undisturbed run, to the bit.
    """

    trials: list[Trial]
    lost: int
    equal: bool


def until_new_step(handle: raypipe.RunHandle, folder: Path, before: int, begin_s: float, step_s: float) -> Trial:
    """Wait until the run has recovered once more than ``before`` times and done a new step.

    Args:
        begin_s: time of the fault, by the monotonic clock.
    """
    until(lambda: len(events(folder, "failure")) > before, "the failure was noticed")
    noticed_s = time.monotonic() - begin_s
    until(lambda: len(events(folder, "recovery")) > before, "the run had recovered")
    event = events(folder, "recovery")[-1]
    until(lambda: handle.status().step > event["step"], "the first new step was done")
    seconds = time.monotonic() - begin_s - step_s
    return Trial(seconds, noticed_s, step_s, event["redone_steps"], event)


def copied_step(folder: Path) -> int:
    """Return the newest step of which every stage has an in-memory copy; -1 before the first."""
    path = folder / "copies.json"
    copies = json.loads(path.read_text()) if path.exists() else []
    return max((copy["position"]["step"] for copy in copies), default=-1)


def trials(
    handle: raypipe.RunHandle, folder: Path, count: int, fault: signal.Signals, *, warm: bool
) -> Iterator[Trial]:
    """Send the signal to stages in turns; each trial waits until the run trains again, and the spare is back."""
    drawn = random.Random(SEED)
    for number in range(count):
        started = handle.status().step
        recovered = [event["step"] for event in events(folder, "recovery")]
        # A run without progress between failures would be given up.
        until(lambda: copied_step(folder) > max(recovered, default=-1), "there was a copy of a later step")  # noqa: B023
        until(lambda: handle.status().step >= started + STEPS_BETWEEN, "some steps were done")  # noqa: B023
        if warm:
            until(lambda: len(events(folder, "spare")) > number, "the spare was ready")  # noqa: B023
        time.sleep(drawn.uniform(0.0, MOST_FURTHER_S))
        status = handle.status()
        begin_s = time.monotonic()
        os.kill(status.stages[number % 2]["process"], fault)
        yield until_new_step(handle, folder, number, begin_s, status.step_s)


def measured(size_mb: int, count: int, fault: signal.Signals = signal.SIGKILL, *, warm: bool) -> Outcome:
    """Run trials on one run on this machine.

    Args:
        size_mb: state of each of two stages.
        warm: a spare worker waits, with torch and the optimizer imported.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        handle = trainer(folder, "disturbed", size_mb, 3 if warm else 2).start(1_000_000)
        found = []
        try:
            for trial in trials(handle, folder / "disturbed", count, fault, warm=warm):
                found.append(trial)
                print(f"  {trial.seconds:.2f} s, noticed after {trial.noticed_s:.2f} s, {trial.redone} steps of "
                      f"{trial.step_s:.3f} s again", flush=True)  # fmt: skip
            handle.stop()
            result = handle.wait(timeout_s=WAIT_S)
            steps = handle.status().step
        finally:
            handle.close()
        recorded = set(result.metrics_dataframe["step"])
        twin = trainer(folder, "undisturbed", size_mb, 2).fit(steps, local=True, progress=False)
        return Outcome(
            found, len(set(range(steps)) - recorded), bits_equal(str(result.checkpoint), str(twin.checkpoint))
        )


def measured_early(size_mb: int, count: int, at_step: int, *, warm: bool) -> Outcome:
    """Run trials on a new run each, of which a stage is killed as soon as this step is done.

    Args:
        size_mb: state of each of two stages.
        warm: the run has a spare worker, whose process is starting when the fault comes; else it has none.
    """
    found, lost, equal = list[Trial](), 0, True
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="recovery-") as name:
            folder = Path(name)
            handle = trainer(folder, "disturbed", size_mb, 3 if warm else 2).start(1_000_000)
            try:
                until(lambda: handle.status().step >= at_step, "the step was done")  # noqa: B023
                status, begin_s = handle.status(), time.monotonic()
                os.kill(status.stages[number % 2]["process"], signal.SIGKILL)
                trial = until_new_step(handle, folder / "disturbed", 0, begin_s, status.step_s)
                handle.stop()
                result, steps = handle.wait(timeout_s=WAIT_S), handle.status().step
            finally:
                handle.close()
            laps = ", ".join(f"{name[:-2]} {value:.2f}" for name, value in trial.event.items() if name.endswith("_s"))
            print(f"  {trial.seconds:.2f} s after step {status.step}: noticed {trial.noticed_s:.2f}, {laps}; "
                  f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
            found.append(trial)
            lost += len(set(range(steps)) - set(result.metrics_dataframe["step"]))
            twin = trainer(folder, "undisturbed", size_mb, 2).fit(steps, local=True, progress=False)
            equal &= bits_equal(str(result.checkpoint), str(twin.checkpoint))
    return Outcome(found, lost, equal)
