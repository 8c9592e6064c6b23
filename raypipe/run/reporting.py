"""Reporting of a run: writes events to events.jsonl, raises alerts in its status, and calls the user's callbacks.

loop  --step, event, evaluated--> queue --> thread --> callback 1, callback 2 ...     in the order of their list
                                               |
                                    an exception: an alert for this callback and method

The loop never waits for a callback. Neither an exception in a callback nor a failed write ends the run: both raise an
alert.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from raypipe.callbacks.base import METHODS, Event, RunEnd, RunStart
from raypipe.engine.io.run_files import RunFolder
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord
from raypipe.run.spec import RunSpec, Watcher
from raypipe.user_lines import quoted, short

MOST_WAITING = 10_000
"""Maximum number of queued calls; calls for further steps are dropped, lest a hung callback fill the memory."""
END_S = 60.0
"""Maximum seconds to wait for the queued calls of callbacks when the run is over."""
PATIENCE_S = 1.0
FAILURES = ("failure", "recovery", "regroup", "give up")
_TOO_LONG = re.compile(r"(parameter|buffer) '|.*, sample \d|parameters of group|.* after \d+ steps?$")
"""Labels of settings.json that are not passed to ``on_start``: they describe model and data tensor by tensor."""


class Reporter:
    """Publisher of one submission's events.

    Args:
        watcher: object that shows alerts, such as the alert of a failed write or a failed callback.

    Attributes:
        folder: the run's folder.
        callbacks: thread that calls the user's callbacks.
    """

    def __init__(self, spec: RunSpec, watcher: Watcher) -> None:
        self.folder, self.watcher = RunFolder(spec.place), watcher
        self.callbacks = CallbackThread(spec.callbacks, self.complain, lambda message: watcher.update(message=message))
        self._failed = 0  # writes in a row

    def try_to(self, write: Callable[[], None]) -> bool:
        """Call ``write``; turn a CheckpointError into an alert, because a failed write must not end the run.

        Returns:
            True if the write succeeded.
        """
        try:
            write()
        except CheckpointError as error:
            self._failed += 1
            self.watcher.alert("file not written", str(error), in_a_row=self._failed)
            return False
        self._failed = 0
        return True

    def log(self, decision: str, reason: str, **numbers: Any) -> None:
        """Append a line to events.jsonl: the kind of event ``decision``, a sentence ``reason``, and further fields."""
        self.try_to(lambda: self.folder.event(decision, reason, **numbers))

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        """Append a line to events.jsonl, and queue a call of the callbacks with this event."""
        self.log(decision, reason, **numbers)
        self.callbacks.event(decision, reason, numbers)

    def complain(self, kind: str, message: str, step: int, in_a_row: int = 0) -> None:
        """Raise an alert and write it to events.jsonl; for the arguments see ``Journal.alert``.

        If ``in_a_row`` is not 0, only the first alert of its kind is written.
        """
        if not in_a_row or kind not in {alert.kind for alert in self.watcher.alerts}:
            self.log("warning", message, step=step)
        self.watcher.alert(kind, message, step, in_a_row)


class CallbackThread:
    """Queue of calls to the callbacks of one submission, and a thread that makes them, if there are callbacks.

    Args:
        complain: called with (kind, message, steps done, failures in a row) if a callback raises, is too slow, or
            changes requires_grad.
        waiting: called with a message when ``end`` has to wait for callbacks.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        complain: Callable[[str, str, int, int], None],
        waiting: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._complain, self._waiting = complain, waiting
        self._queue: deque[tuple[str, int, tuple[Any, ...], int | None]] = deque()
        self._changed = threading.Condition()
        self._in_a_row: Counter[tuple[int, str]] = Counter()  # failures of a callback's method
        self._modules = [_modules_of(callback) for callback in self._callbacks]
        self._path = ""
        self._dropped = 0
        self._begun = self._closed = False
        self._thread = threading.Thread(target=self._work, name="raypipe callbacks", daemon=True)

    def start(self, run: RunStart) -> None:
        """Start the thread and queue the calls of ``on_start``; events before this call are ignored."""
        if self._callbacks and not self._begun:
            self._begun, self._path = True, run.path
            self._thread.start()
            self._put("on_start", run.step, run)

    def step(self, record: StepRecord) -> None:
        self._put("on_step", record.step + 1, record, may_drop=True)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put("on_eval", step, step, metrics)

    def text(self, step: int, number: int, tokens: Any) -> None:
        """Queue a call of ``on_text`` of one callback."""
        self._put("on_text", step, step, tokens, only=number)

    def checkpoint(self, step: int, path: str) -> None:
        self._put("on_checkpoint", step, step, path)

    def event(self, decision: str, reason: str, numbers: Mapping[str, Any]) -> None:
        """Queue a call of ``on_recovery`` if ``decision`` is one of FAILURES, else of ``on_decision``."""
        event = Event(int(numbers.get("step", 0)), str(decision), reason, numbers)
        self._put("on_recovery" if decision in FAILURES else "on_decision", event.step, event)

    def end(self, how: RunEnd | None) -> None:
        """Wait about END_S seconds at most for the queued calls and ``on_end(how)``; later events are ignored.

        Calls that remain then are dropped, with an alert. A callback that hangs ends with the process.

        Args:
            how: argument of ``on_end``; None does not call it.
        """
        if not self._begun:
            return
        if how is not None:
            self._put("on_end", how.step, how)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._waiting(f"waiting for callbacks, {END_S:.0f} s at most")
            self._thread.join(END_S)
        if self._thread.is_alive():
            why = f"Callbacks did not end within {END_S:.0f} s; {len(self._queue)} calls were given up."
            self._complain("callbacks given up", why, 0 if how is None else how.step, 0)
            self._queue.clear()

    def _put(self, method: str, step: int, *arguments: Any, may_drop: bool = False, only: int | None = None) -> None:
        if not self._begun:
            return
        with self._changed:
            if self._closed:
                return
            if may_drop and len(self._queue) >= MOST_WAITING:
                self._dropped += 1
                dropped = self._dropped
            else:
                dropped = 0
                self._queue.append((method, step, arguments, only))
                self._changed.notify()
        if dropped:
            why = f"Callbacks are {MOST_WAITING} calls behind; they miss some steps."
            self._complain("callbacks behind", why, step, dropped)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                method, step, arguments, only = self._queue.popleft()
            for number, callback in enumerate(self._callbacks):
                if only not in (None, number):
                    continue
                # Neither an exception of the callback nor one of the complaint ends this thread.
                with suppress(BaseException):
                    self._call(number, callback, method, step, arguments)

    def _call(self, number: int, callback: Any, method: str, step: int, arguments: tuple[Any, ...]) -> None:
        called = getattr(callback, method, None)
        if called is None:
            return
        before = _trainable(self._modules[number])
        try:
            called(*arguments)
            self._in_a_row[number, method] = 0
            after = _trainable(self._modules[number])
            if changed := [name for name in before if after.get(name, before[name]) != before[name]]:
                why = (
                    f"The callback {name_of(callback)} changed requires_grad of {changed[0]!r} in {method}, which has "
                    "no effect: stages have parameters of their own, and a run trains the same ones from its first "
                    "step to its last. Begin another run with the weights of this one: PipelineTrainer(..., "
                    f'init_from="{self._path}", run_config=RunConfig(name=...)).'
                )
                self._complain(f"callback {name_of(callback)} unfreezes", why, step, 1)
        except BaseException as error:  # noqa: BLE001  (user code)
            self._in_a_row[number, method] += 1
            name = name_of(callback)
            why = f"The callback {name} failed in {method}{quoted(error)}: {short(error)} Training goes on."
            self._complain(f"callback {name}.{method}", why, step, self._in_a_row[number, method])


def _modules_of(callback: Any) -> list[nn.Module]:
    """List the nn.Module objects in a callback's attributes, and in the closures and globals of its methods."""
    held = list(getattr(callback, "__dict__", {}).values())
    for method in METHODS:
        if inspect.isfunction(called := getattr(type(callback), method, None)):
            seen = inspect.getclosurevars(called)
            held += [*seen.nonlocals.values(), *seen.globals.values()]
    return [thing for thing in held if isinstance(thing, nn.Module)]


def _trainable(modules: Sequence[nn.Module]) -> dict[str, bool]:
    """Return requires_grad of the parameters of these modules, by name within the module."""
    return {name: p.requires_grad for module in modules for name, p in module.named_parameters()}


def name_of(callback: Any) -> str:
    """Return a callback's name for messages."""
    try:
        return str(getattr(callback, "name", "") or type(callback).__qualname__)
    except Exception:  # noqa: BLE001  (its name may be a property that raises)
        return type(callback).__qualname__


def start_of(spec: RunSpec, step: int) -> RunStart:
    """Create the argument of ``on_start`` for a submission that begins after ``step`` steps."""
    known = {**spec.settings.fixed, **spec.settings.free}
    settings = {
        label: value
        for label, value in known.items()
        if isinstance(value, str | int | float | bool | None) and not _TOO_LONG.match(label)
    }
    return RunStart(spec.name, str(spec.place), step, spec.num_steps, settings, spec.config_yaml)
