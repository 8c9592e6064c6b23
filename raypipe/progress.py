"""Progress on the terminal: before a run starts, and while it trains.

The live line of a run shows step, loss, learning rate, samples/s, tokens/s, idle time, goodput, bytes sent, time left.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from raypipe.ir.report import StepRecord
from raypipe.run.journal import News
from raypipe.run.status import steps_done

AGAIN_S = 60.0
"""Minimum seconds between two lines about alerts of one kind."""
LINE_EVERY_S = 5.0
"""Minimum seconds between two lines of steps if the output is no terminal."""


def say(stream: TextIO | None, text: str) -> None:
    """Write text for the user; a failed write is ignored, because it must not end a run.

    After a broken pipe or a closed terminal the stream is redirected to os.devnull, so that neither later writes nor
    the flush at Python's exit fail.

    Args:
        stream: sys.stdout or sys.stderr. If Python was started with it closed, it is None, and nothing is written.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    except ValueError:  # it was closed
        pass


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


class RunProgress:
    """Display of a run's progress: on a terminal one line that is rewritten, elsewhere a new line every few seconds.

    The object is called with each News of the run. It prints the run's folder at first and at the end. In between it
    prints what the start waits for, from where the run resumes, new steps and alerts.

    Args:
        notes: notes of the plan, printed at once.
        stream: output; None for standard error.
        late_s: seconds after which a start that is still waiting prints what it waits for.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        notes: Sequence[str],
        stream: TextIO | None = None,
        late_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock, self._late_s = clock, clock() + late_s
        self._live, self._begun, self._placed = False, False, False  # live: a line on a terminal is rewritten
        self._shown_s, self._smooth_s = -math.inf, 0.0  # time of the last step that was shown; seconds of a step
        self._alerts: dict[str, tuple[int, float]] = {}  # by kind: how many of them were shown, and when
        self._message = ""
        for note in notes:
            say(self._stream, f"note: {note}\n")

    def __call__(self, news: News) -> None:
        status = news.status
        if not self._placed and status.path:
            self._placed = True
            self._print(f"{status.name}: its folder is {status.path}")
        self._print_message(news)
        if news.records and not self._begun:
            self._begun, self._live = True, _is_terminal(self._stream)
            if status.first_step:  # the newest checkpoint may be a later one by now
                self._print(f"{status.name} goes on after step {status.first_step}, {status.source}")
        for record in news.records:
            if record.step >= status.first_step:
                self._step(record, status.num_steps)
        self._print_alerts(news)
        if news.ended:
            done = steps_done(status.step, status.num_steps)
            self._print(f"{status.name}: {', '.join(filter(None, (status.state, done)))}; its folder is {status.path}")

    def _print(self, text: str) -> None:
        above = "\r\x1b[K" if self._live else ""  # in place of the live line
        say(self._stream, f"{above}{text}\n")

    def _step(self, record: StepRecord, num_steps: int) -> None:
        """Show a step, unless another step was shown less than LINE_EVERY_S ago (0.1 s on a terminal).

        The last step, and a step with an evaluation, are always shown.
        """
        # An average that follows the last ten steps or so: one slow step does not move the estimate.
        self._smooth_s = record.seconds if not self._smooth_s else 0.9 * self._smooth_s + 0.1 * record.seconds
        now_s, last = time.monotonic(), record.step + 1 == num_steps
        if now_s - self._shown_s < (0.1 if self._live else LINE_EVERY_S) and not last and not record.evaluation:
            return
        self._shown_s = now_s
        text, end = self._line(record, num_steps), "\n" if last else ""
        say(self._stream, f"\r{text}\x1b[K{end}" if self._live else f"{text}\n")

    def _line(self, record: StepRecord, num_steps: int) -> str:
        minutes, seconds = divmod(round((num_steps - record.step - 1) * self._smooth_s), 60)
        rate = f"lr {record.lr:.3g}  " if record.lr else ""
        tokens = f"{record.tokens / self._smooth_s:.0f} tokens/s  " if record.tokens else ""
        goodput = f"goodput {record.goodput:.0%}  " if record.goodput else ""
        return (
            f"step {record.step + 1}/{num_steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
            f"{rate}{record.samples / self._smooth_s:.0f} samples/s  {tokens}idle {record.bubble_fraction:.0%}  "
            f"{goodput}sent {record.link_bytes_per_s / 1e6:.1f} MB/s  "
            f"{record.schedule + '  ' if record.schedule else ''}left {minutes}:{seconds:02d}"
            + "".join(f"  {name} {value:.4f}" for name, value in record.evaluation)
        )

    def _print_message(self, news: News) -> None:
        """Show what a run waits for: at once while it trains, only after ``late_s`` seconds while it starts."""
        state, message = news.status.state, news.status.message
        if message == self._message or (state == "starting" and self._clock() < self._late_s):
            return
        if message and state in ("starting", "running", "finished"):
            self._message = message
            self._print(f"{news.status.name}: {message}")

    def _print_alerts(self, news: News) -> None:
        """Show the first alert of a kind at once, and later ones at most once a minute, with their count.

        Alerts that were not shown yet are shown at the end of the run.
        """
        now_s = self._clock()
        for alert in news.status.alerts:
            shown, shown_s = self._alerts.get(alert.kind, (0, -math.inf))
            if alert.count > shown and (news.ended or now_s - shown_s >= AGAIN_S):
                self._alerts[alert.kind] = alert.count, now_s
                self._print(f"{news.status.name}: {alert.since(shown)}")


_shown: ContextVar[bool] = ContextVar("shown", default=True)


@contextmanager
def progress_shown(progress: bool) -> Iterator[None]:
    """Switch the output of ``shown_while`` and ProfilingBar on or off while the context lasts.

    Args:
        progress: False to show nothing.
    """
    token = _shown.set(progress)
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def shown_while(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` in a ProfilingBar while the context lasts; yields a function that replaces the text."""
    bar = ProfilingBar()
    bar.say(text)
    try:
        yield bar.say
    finally:
        bar.close()


class ProfilingBar:
    """Display of the work before a run starts, such as profiling: one line of text that changes.

    On a terminal the line is rewritten, and disappears at the end. Elsewhere the current text is printed every few
    seconds if it has changed, so that short work prints nothing. Called with (done, total), it shows the number of
    profiled operations.

    Args:
        stream: output; None for standard error.
        every_s: seconds between lines if the output is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float = 3.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = _is_terminal(self._stream) and _shown.get()
        self._text, self._shown = "", ""
        self._closed = threading.Event()
        if _shown.get() and not self._live:  # a long operation may not report in between
            threading.Thread(target=self._print_now_and_then, args=(every_s,), daemon=True).start()

    def __call__(self, done: int, total: int) -> None:
        self.say(f"profiling {done} of {total} operations")

    def say(self, text: str) -> None:
        """Replace the text that is shown."""
        self._text = text
        if self._live:
            say(self._stream, f"\r{text}\x1b[K")

    def close(self) -> None:
        self._closed.set()
        self.say("")

    def _print_now_and_then(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            text = self._text
            if text and text != self._shown:
                self._shown = text
                say(self._stream, f"{text}\n")
