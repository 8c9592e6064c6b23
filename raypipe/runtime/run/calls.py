"""Calls the callbacks of a run, in a thread beside its loop: the loop never waits for them, and they cannot end it.

loop  --step, event, evaluated--> queue --> thread --> callback 1, callback 2 ...     in the order of their list
                                               |
                                    what they raise: told once for each callback
"""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from raypipe.callbacks.base import Event, RunEnd, RunStart
from raypipe.engine.user_lines import quoted, short
from raypipe.ir.report import StepRecord
from raypipe.planner.control import ControllerDecision
from raypipe.runtime.run.spec import RunSpec

__all__ = ["Calls", "name_of", "start_of"]

MOST_WAITING = 10_000
"""Calls; steps beyond are not told, so that a callback that hangs does not fill the memory of the driver."""
END_S = 60.0
"""Seconds that callbacks have for what is left when the run is over."""
PATIENCE_S = 1.0
FAILURES = ("failure", "recovery", "regroup", "give up")
_TOO_LONG = re.compile(r"(parameter|buffer) '|.*, sample \d|parameters of group|.* after \d+ steps?$")
"""Labels of settings.json that say what the model and the data are, tensor by tensor."""


class Calls:
    """The callbacks of one submission. Without any, there is no thread and nothing happens.

    Args:
        complain: told of what they raise, a sentence each.
        waiting: told that the end waits for them.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        complain: Callable[[str], None],
        waiting: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._complain, self._tell_waiting = complain, waiting
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._some = threading.Condition()
        self._raised: Counter[int] = Counter()
        self._untold = 0
        self._begun = self._closed = False
        self._thread = threading.Thread(target=self._work, name="raypipe callbacks", daemon=True)

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._queue)

    def start(self, run: RunStart) -> None:
        """The run begins, once; what happened before is not told."""
        if self._callbacks and not self._begun:
            self._begun = True
            self._thread.start()
            self._put("on_start", run)

    def step(self, record: StepRecord) -> None:
        self._put("on_step", record, may_drop=True)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put("on_eval", step, metrics)

    def checkpoint(self, step: int, path: str) -> None:
        self._put("on_checkpoint", step, path)

    def decided(self, found: ControllerDecision) -> None:
        self.event(found.verdict, found.reason, {**found.numbers, "step": found.step})

    def event(self, decision: str, reason: str, numbers: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""
        told = Event(int(numbers.get("step", 0)), str(decision), reason, numbers)
        self._put("on_recovery" if decision in FAILURES else "on_decision", told)

    def end(self, how: RunEnd | None) -> None:
        """Nothing more is called after what waits and ``on_end``, for which there is a minute.

        Who hangs longer is left to end with the process.

        Args:
            how: the run ended; None calls no on_end.
        """
        if not self._begun:
            return
        if how is not None:
            self._put("on_end", how)
        with self._some:
            self._closed = True
            self._some.notify()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._tell_waiting(f"waiting for callbacks, {END_S:.0f} s at most")
            self._thread.join(END_S)
        if self._thread.is_alive():
            self._complain(f"Callbacks did not end within {END_S:.0f} s; {len(self._queue)} calls were given up.")
            self._queue.clear()

    def _put(self, method: str, *arguments: Any, may_drop: bool = False) -> None:
        if not self._begun:
            return
        with self._some:
            if self._closed:
                return
            if may_drop and len(self._queue) >= MOST_WAITING:
                self._untold += 1
                tell = self._untold == 1
            else:
                tell = False
                self._queue.append((method, arguments))
                self._some.notify()
        if tell:
            self._complain(f"Callbacks are {MOST_WAITING} calls behind; they are not told of some steps.")

    def _work(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                method, arguments = self._queue.popleft()
            for number, callback in enumerate(self._callbacks):
                # What the complaint raises ends this thread no more than what the callback raises.
                with suppress(BaseException):
                    self._call(number, callback, method, arguments)

    def _call(self, number: int, callback: Any, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            called = getattr(callback, method, None)
            if called is not None:
                called(*arguments)
        except BaseException as error:  # noqa: BLE001  (somebody else's code)
            self._raised[number] += 1
            if self._raised[number] == 1:
                where = quoted(error)
                self._complain(
                    f"The callback {name_of(callback)} failed in {method}{where}: {short(error)} Training goes on; "
                    "what else it raises is not told."
                )


def name_of(callback: Any) -> str:
    """What a person calls a callback."""
    try:
        return str(getattr(callback, "name", "") or type(callback).__qualname__)
    except Exception:  # noqa: BLE001  (its name is a property, say, that raises)
        return type(callback).__qualname__


def start_of(spec: RunSpec, step: int) -> RunStart:
    """What ``on_start`` is told."""
    known = {**spec.settings.fixed, **spec.settings.free}
    settings = {
        label: value
        for label, value in known.items()
        if isinstance(value, str | int | float | bool | None) and not _TOO_LONG.match(label)
    }
    return RunStart(spec.name, str(spec.place), step, spec.num_steps, settings, spec.config_yaml)
