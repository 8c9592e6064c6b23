"""Ctrl-C and SIGTERM stop a run after the step that is running, with a checkpoint. The second one does not wait."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from raypipe.handle import RunHandle

__all__ = ["GRACE_S", "stopping_on_signals"]

GRACE_S = 3.0
"""What ``ray job stop`` leaves between SIGTERM and SIGKILL by default."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stop:
    """Turns the first signal into a request, outside the signal handler's frame."""

    def __init__(self, handle: RunHandle) -> None:
        self.received: signal.Signals | None = None
        self._handle = handle

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if again:
            sys.stderr.write("\nending at once, without a checkpoint of the last steps\n")
            raise KeyboardInterrupt
        # A thread, because the handler may have interrupted a call into Ray that is not reentrant.
        threading.Thread(target=self._ask, args=(signal.Signals(number).name,), daemon=True).start()

    def _ask(self, name: str) -> None:
        with contextlib.suppress(Exception):  # whoever waits for the run learns what is wrong with it
            self._handle.request_stop(name)
        status = self._handle.last_status
        step_s = status.step_s if status else 0.0
        sys.stderr.write(f"\n{name}: stopping after the step that is running, with a checkpoint\n")
        if step_s > GRACE_S / 2:
            sys.stderr.write(
                f"A step takes {step_s:.1f} s, and `ray job stop` waits {GRACE_S:g} s before it kills: set "
                "RAY_JOB_STOP_WAIT_TIME_S on the head node, or expect to go on from the checkpoint before.\n"
            )


@contextlib.contextmanager
def stopping_on_signals(handle: RunHandle) -> Iterator[None]:
    """Inside, a signal asks the run to stop; at the end the process goes on to die of it, as its sender expects.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and the run has stopped.
        SystemExit: SIGTERM came (code 143), and the run has stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    stop = _Stop(handle)
    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.received is signal.SIGINT:
        raise KeyboardInterrupt
    if stop.received is signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
