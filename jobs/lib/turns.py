"""Runs that live at the same time and take turns of a few steps, so that slow minutes of a machine affect all of them.

    gate of a   4        8                 12          a run begins step n once its gate is above n
    a           0 1 2 3  .........  4 5 6 7  ......    its samples come no sooner
    b                    0 1 2 3             4 5 6 7

Samples come in order, so that the number of a sample gives its step: the gate works too if a stage loads the data
again, because layers moved or the run rolled back.

The first step of a turn contains the wait for the gate. The last one has no next step to overlap with, as steps of some
schedules have. Neither is counted.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

__all__ = ["Gated", "gated", "in_turns", "open_gate"]

POLL_S = 0.05
HANDOVER_S = 0.2
"""Pause between two turns, for the driver's work after a step."""
LIMIT_S = 120.0
"""Seconds for one turn, or the start of a run."""
RUN_LIMIT_S = 3600.0


class Gated(Dataset[Any]):
    """Dataset that stops a run at its gate: reading a sample of a step that the gate does not allow yet waits.

    Samples must be read in order. Only unpickled copies, which stages get, wait: the process that starts the run reads
    samples of any step.

    Args:
        samples: data, repeated from the first sample if it ends before the run.
        gate: file with the number of steps that are allowed.
        per_step: number of samples of a mini-batch.
        steps: number of steps of the run.
    """

    def __init__(self, samples: Any, gate: str, per_step: int, steps: int) -> None:
        self.samples, self.gate, self.per_step, self.steps = samples, gate, per_step, steps
        self.waits = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waits": True}

    def __len__(self) -> int:
        return self.per_step * self.steps

    def __getitem__(self, index: int) -> Any:
        while self.waits and _allowed(self.gate) <= index // self.per_step:
            time.sleep(POLL_S)
        return self.samples[index % len(self.samples)]


def gated(samples: Any, gate: Path, per_step: int, steps: int) -> DataLoader[Any]:
    """Make training data that stops a run at its gate; arguments as in ``Gated``."""
    return DataLoader(Gated(samples, str(gate), per_step, steps), batch_size=per_step, shuffle=False)


def open_gate(gate: Path, steps: int) -> None:
    """Write the gate file: allow a run this total number of steps."""
    new = gate.with_suffix(".new")
    new.write_text(str(steps))
    new.replace(gate)


def _allowed(gate: str) -> int:
    return int(Path(gate).read_text())


def blocks(seconds: Sequence[float], begin: int, turns: int, steps: int) -> list[list[float]]:
    """Split the seconds of steps by turn, without the first and the last step of each."""
    return [list(seconds[at + 1 : at + steps - 1]) for at in range(begin, begin + turns * steps, steps)]


class _Run:
    """Run and its progress; a thread reads its output."""

    def __init__(self, lab: Any, script: str, gate: Path, options: dict[str, Any]) -> None:
        self.gate, self.done = gate, 0
        self.answer: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._ended, self._news = False, threading.Condition()
        self._lab, self._name = lab, options["name"]
        self._process = lab.start(0, script, json.dumps({**options, "gate": str(gate)}))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go_to(self, steps: int) -> None:
        """Allow the run this total number of steps, and wait until they are done.

        Raises:
            RuntimeError: the run failed, ended too soon or took longer than LIMIT_S.
        """
        open_gate(self.gate, steps)
        with self._news:
            self._news.wait_for(lambda: self.done >= steps or self._ended, LIMIT_S)
        if self.done < steps:
            raise RuntimeError(f"{self._name} stands at step {self.done} of {steps}") from self._error
        time.sleep(HANDOVER_S)

    def end(self) -> dict[str, Any]:
        """Wait for the last answer of the run.

        Raises:
            RuntimeError: the run failed after its last step.
        """
        self._thread.join(LIMIT_S)
        if self.answer is None:
            raise RuntimeError(f"{self._name} did not end") from self._error
        return self.answer

    def _read(self) -> None:
        try:
            self.answer = self._lab.answer(self._process, RUN_LIMIT_S, self._line)
        except BaseException as error:  # noqa: BLE001  (told to the thread that waits)
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _line(self, line: str) -> None:
        if line.startswith("step"):
            with self._news:
                self.done = int(line.split()[1])
                self._news.notify_all()


def in_turns(
    lab: Any, script: str, pipelines: Mapping[str, dict[str, Any]], turns: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Train several pipelines at the same time, which take turns of a few steps.

    Args:
        lab: hosts of ``shaped.rig``, with one processor each.
        script: script below jobs that trains one pipeline. Its argument is JSON with name, steps, pipeline, cpu and
            gate. It prints "step N" after N steps, and at the end its result as JSON, with the "seconds" of each step.
        pipelines: name of a run -> fields of its PipelineConfig.
        turns: number of turns of each run.
        steps: number of steps of a turn; the first and the last one are not counted.

    Returns:
        Result of the script by name of the run, with "turns": seconds of the counted steps by turn.
    """
    total = turns * steps
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="turns-")))
        runs: dict[str, _Run] = {}
        for place, (name, pipeline) in enumerate(pipelines.items()):
            gate = folder / f"{place}.gate"
            open_gate(gate, steps)
            # More than half of the rest of its host, so that the two stages are placed on two hosts.
            options = {"name": f"run{place}", "steps": total, "pipeline": pipeline, "cpu": round(0.52 * 0.48**place, 4)}
            runs[name] = _Run(lab, script, gate, options)
            runs[name].go_to(steps)
        for turn in range(1, turns):
            for name in list(runs)[:: -1 if turn % 2 else 1]:
                runs[name].go_to((turn + 1) * steps)
        found: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            answer = run.end()
            found[name] = {**answer, "turns": blocks(answer["seconds"], 0, turns, steps)}
    return found
