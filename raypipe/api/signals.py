"""Ctrl-C and SIGTERM stop a run after the step that is running, with a checkpoint. The second one does not wait."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from raypipe.api.handle import RunHandle

__all__ = ["GRACE_S", "Stop", "stopping_on_signals"]

GRACE_S = 3.0
"""What ``ray job stop`` leaves between SIGTERM and SIGKILL by default."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Turns the first signal into a request to the run, outside the signal handler's frame.

    Attributes:
        received: the first signal that came.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handle: RunHandle | None = None

    def install(self) -> None:
        """Take the signals; once more after ray.init, which takes SIGTERM for itself. In the main thread only."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self)

    def watch(self, handle: RunHandle) -> None:
        """From now on there is a run to stop; at once, if a signal came while it was being started."""
        self._handle = handle
        self.install()
        if self.received is not None:
            self._ask(self.received.name)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if again:
            sys.stderr.write("\nending at once, without a checkpoint of the last steps\n")
            raise KeyboardInterrupt
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
        sys.stderr.write(f"\n{name}: stopping after the step that is running, with a checkpoint\n")
        if step_s > GRACE_S / 2:
            sys.stderr.write(
                f"A step takes {step_s:.1f} s, and `ray job stop` waits {GRACE_S:g} s before it kills: set "
                "RAY_JOB_STOP_WAIT_TIME_S on the head node, or expect to go on from the checkpoint before.\n"
            )


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[Stop]:
    """Inside, a signal asks the run to stop; at the end the process goes on to die of it, as its sender expects.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and the run has stopped.
        SystemExit: SIGTERM came (code 143), and the run has stopped.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    stop.install()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.received is signal.SIGINT:
        raise KeyboardInterrupt
    if stop.received is signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
