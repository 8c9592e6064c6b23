"""Runs of ours that live at the same time and take turns, a few steps each: a machine that slows down by a third for a
minute then does so for all of them.

    gate of a   4        8                 12          a run begins step n once its gate says more than n
    a           0 1 2 3  .........  4 5 6 7  ......    its samples come no sooner
    b                    0 1 2 3             4 5 6 7

Samples come in their order, so that the number of one says of which step it is: the gate holds a stage too that was
given the data anew, because layers moved or the run went back.

The first step of a turn contains the wait for it. The last one has none behind it that could begin meanwhile, as steps
of some schedules do. Neither is counted.
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

__all__ = ["Gated", "Held", "alternate", "blocks", "gated", "in_turns", "open_gate"]

POLL_S = 0.05
HANDOVER_S = 0.2
"""Between two turns, for what the driver still has to do behind a step."""
LIMIT_S = 120.0
"""For one turn, or the start of a run."""
RUN_LIMIT_S = 3600.0


class Gated(Dataset[Any]):
    """Samples of the first steps that a file allows; a stage that reads one of a later step waits. To be read in order.

    Stages get it pickled. The one that was made waits for nothing: who starts a run looks at samples of all steps.

    Args:
        samples: taken again from the first one on where they end before the run does.
        per_step: samples of a mini-batch.
        steps: of the run.
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
    """Training data of a run that goes no further than its gate says; arguments as in ``Gated``."""
    return DataLoader(Gated(samples, str(gate), per_step, steps), batch_size=per_step, shuffle=False)


def open_gate(gate: Path, steps: int) -> None:
    """Let a run do this many steps in all."""
    new = gate.with_suffix(".new")
    new.write_text(str(steps))
    new.replace(gate)


def _allowed(gate: str) -> int:
    return int(Path(gate).read_text())


class Held:
    """A run of this process that goes no further than its gate says, see ``Gated``.

    Args:
        handle: of the run.
    """

    def __init__(self, handle: Any, gate: Path) -> None:
        self.handle, self.gate = handle, gate

    def go_to(self, steps: int, limit_s: float = LIMIT_S) -> None:
        """Let it do so many steps in all, and wait until they are done.

        Raises:
            RuntimeError: it failed, ended too soon, takes too long, or did not stop there.
        """
        open_gate(self.gate, steps)
        deadline_s = time.monotonic() + limit_s
        while (status := self.handle.status()).step < steps:
            if status.state not in ("starting", "running") or time.monotonic() > deadline_s:
                raise RuntimeError(f"{status}, and not at step {steps}")
            time.sleep(POLL_S)
        time.sleep(HANDOVER_S)
        if (step := self.handle.status().step) > steps:
            raise RuntimeError(f"the run is at step {step}, and was to wait at {steps}: its gate did not hold it")


def alternate(runs: Mapping[str, Held], begins: Mapping[str, int], turns: int, steps: int) -> None:
    """Let runs that wait at their gates go on by turns, the other one first every second time.

    Args:
        begins: step that each of them waits before.
        turns: of each run.
        steps: of a turn.
    """
    for turn in range(turns):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            runs[name].go_to(begins[name] + (turn + 1) * steps)


def blocks(seconds: Sequence[float], begin: int, turns: int, steps: int) -> list[list[float]]:
    """Seconds of the counted steps of every turn: neither the first nor the last of it."""
    return [list(seconds[at + 1 : at + steps - 1]) for at in range(begin, begin + turns * steps, steps)]


class _Run:
    """A run and how far it is; a thread reads what it says."""

    def __init__(self, lab: Any, gate: Path, asked: dict[str, Any]) -> None:
        self.gate, self.done = gate, 0
        self.answer: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._ended, self._news = False, threading.Condition()
        self._lab, self._name = lab, asked["name"]
        self._process = lab.start(0, "bench/links/ours.py", json.dumps({**asked, "gate": str(gate)}))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go_to(self, steps: int) -> None:
        """Let it do so many steps in all, and wait until they are done.

        Raises:
            RuntimeError: the run failed, ended too soon or takes too long.
        """
        open_gate(self.gate, steps)
        with self._news:
            self._news.wait_for(lambda: self.done >= steps or self._ended, LIMIT_S)
        if self.done < steps:
            raise RuntimeError(f"{self._name} stands at step {self.done} of {steps}") from self._error
        time.sleep(HANDOVER_S)

    def end(self) -> dict[str, Any]:
        """What it told last.

        Raises:
            RuntimeError: it failed behind its last step.
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


def in_turns(lab: Any, pipelines: Mapping[str, dict[str, Any]], turns: int, steps: int) -> dict[str, dict[str, Any]]:
    """By name, what bench/links/ours.py tells of the run, and ``turns``: seconds of the counted steps of every turn.

    Args:
        lab: shaped.rig's, with one processor per host.
        pipelines: what each run is configured with.
        turns: of each run.
        steps: of a turn, the first and the last of which are not counted.
    """
    total = turns * steps
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="turns-")))
        runs: dict[str, _Run] = {}
        for place, (name, pipeline) in enumerate(pipelines.items()):
            gate = folder / f"{place}.gate"
            open_gate(gate, steps)
            # More than half of what its host has left, so that the two stages come to two hosts.
            asked = {"name": f"run{place}", "steps": total, "pipeline": pipeline, "cpu": round(0.52 * 0.48**place, 4)}
            runs[name] = _Run(lab, gate, asked)
            runs[name].go_to(steps)
        for turn in range(1, turns):
            for name in list(runs)[:: -1 if turn % 2 else 1]:
                runs[name].go_to((turn + 1) * steps)
        found: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            answer = run.end()
            found[name] = {**answer, "turns": blocks(answer["seconds"], 0, turns, steps)}
    return found
