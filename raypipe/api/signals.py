"""Signal handling: Ctrl-C, SIGTERM or SIGHUP stops a run after the current step, with a checkpoint.

A second Ctrl-C or SIGTERM ends the run at once. A second SIGHUP has no effect, because SIGHUP often arrives twice: from
the shell and the kernel when a terminal is closed, and from systemd after SIGTERM. SIGHUP is not handled if it is
ignored (nohup) or the user has a handler for it. SIGQUIT (Ctrl-\\) ends the process at once, so that the run can resume
from its last checkpoint; SIGTSTP (Ctrl-Z) and SIGCONT keep their meaning.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from raypipe.api.handle import RunHandle
from raypipe.progress import say

GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL of ``ray job stop`` by default."""

_IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals whose second arrival ends the run at once, because their sender does not want to wait."""


class Stop:
    """Signal handler that requests the end of a run at the first signal, and raises KeyboardInterrupt at the second.

    Attributes:
        received: first signal that was received, or the signal that ended the run at once; None before.
        signals: signals that it handles.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        ignored_or_own = signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        self.signals = _IMPATIENT if ignored_or_own else (*_IMPATIENT, signal.SIGHUP)
        self._handle: RunHandle | None = None
        self._impatient = 0  # signals that came, SIGHUP left out

    def install(self) -> None:
        """Install the handler; does nothing outside the main thread.

        Call it again after ray.init, which installs its own handler of SIGTERM.
        """
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                signal.signal(number, self)

    def watch(self, handle: RunHandle) -> None:
        """Set the run to stop; if a signal was received while the run was being started, request the run's end now."""
        self._handle = handle
        self.install()
        if self.received is not None:
            self._ask(self.received.name)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or signal.Signals(number)
        self._impatient += number in _IMPATIENT
        if number in _IMPATIENT and self._impatient > 1:
            self.received = signal.Signals(number)
            say(sys.stderr, "\nending at once, without a checkpoint of the last steps\n")
            raise KeyboardInterrupt
        if not first:
            return
        # A thread, because the handler may have interrupted a call into Ray that is not reentrant.
        threading.Thread(target=self._ask, args=(signal.Signals(number).name,), daemon=True).start()

    def _ask(self, name: str) -> None:
        handle = self._handle
        if handle is None:
            return  # still starting; ``watch`` asks
        with contextlib.suppress(Exception):  # whoever waits for the run learns what is wrong with it
            handle.request_stop(name)
        status = handle.last_status
        step_s = status.step_s if status else 0.0
        say(sys.stderr, f"\n{name}: stopping after the step that is running, with a checkpoint\n")
        if step_s > GRACE_S / 2:
            say(
                sys.stderr,
                f"A step takes {step_s:.1f} s, and `ray job stop` waits {GRACE_S:g} s before it kills: set "
                "RAY_JOB_STOP_WAIT_TIME_S on the head node, or expect to go on from the checkpoint before.\n",
            )


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[Stop]:
    """Stop a run on signals inside the context; at its end, raise the exception that the received signal requires.

    The context yields the handler, whose ``watch`` sets the run. Outside the main thread no signal is handled.

    Raises:
        KeyboardInterrupt: Ctrl-C was received, and the run has stopped.
        SystemExit: SIGTERM (code 143) or SIGHUP (code 129) was received, and the run has stopped.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in stop.signals}
    stop.install()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.received is signal.SIGINT:
        raise KeyboardInterrupt
    if stop.received is not None:
        raise SystemExit(128 + stop.received)
