"""The live line of a run: step, loss, learning rate, samples/s, tokens/s, idle time, goodput, bytes sent, time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from raypipe.ir.report import StepRecord
from raypipe.runtime.run.journal import News

__all__ = ["ProfilingBar", "ProgressLine", "RunProgress", "heard", "telling"]


class ProgressLine:
    """Rewrites one line on a terminal; elsewhere prints a line every few seconds.

    Args:
        num_steps: of the run.
        every_s: seconds between lines where the output is no terminal.
    """

    def __init__(self, num_steps: int, stream: TextIO | None = None, every_s: float = 5.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._num_steps = num_steps
        self._live = self._stream.isatty()
        self._every_s = 0.1 if self._live else every_s
        self._shown_s = -1e9
        self._smooth_s = 0.0

    def update(self, record: StepRecord) -> None:
        """Show a step; most calls only remember it."""
        # An average that follows the last ten steps or so: one slow step does not move the estimate.
        self._smooth_s = record.seconds if not self._smooth_s else 0.9 * self._smooth_s + 0.1 * record.seconds
        now_s = time.monotonic()
        last = record.step + 1 == self._num_steps
        if now_s - self._shown_s < self._every_s and not last and not record.evaluation:
            return
        self._shown_s = now_s
        text = self.text(record)
        self._stream.write(f"\r{text}\x1b[K" if self._live else f"{text}\n")
        if last and self._live:
            self._stream.write("\n")
        self._stream.flush()

    def text(self, record: StepRecord) -> str:
        """The line for one record."""
        left_s = (self._num_steps - record.step - 1) * self._smooth_s
        minutes, seconds = divmod(round(left_s), 60)
        rate = f"lr {record.lr:.3g}  " if record.lr else ""
        tokens = f"{record.tokens / self._smooth_s:.0f} tokens/s  " if record.tokens else ""
        goodput = f"goodput {record.goodput:.0%}  " if record.goodput else ""
        return (
            f"step {record.step + 1}/{self._num_steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
            f"{rate}{record.samples / self._smooth_s:.0f} samples/s  {tokens}idle {record.bubble_fraction:.0%}  "
            f"{goodput}"
            f"sent {record.link_bytes_per_s / 1e6:.1f} MB/s  "
            f"{record.schedule + '  ' if record.schedule else ''}left {minutes}:{seconds:02d}"
            + "".join(f"  {name} {value:.4f}" for name, value in record.evaluation)
        )


class RunProgress:
    """Feeds the line from a run's news: notes and the run's folder first, then what it waits for and resumed from, then
    every new step, at the end the folder again.

    Args:
        notes: of the plan.
        late_s: seconds of a start after which it says what it waits for.
    """

    def __init__(self, notes: Sequence[str], stream: TextIO | None = None, late_s: float = 3.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._line: ProgressLine | None = None
        self._late_s = time.monotonic() + late_s
        self._said = ""
        self._placed = False
        for note in notes:
            self._stream.write(f"note: {note}\n")

    def __call__(self, news: News) -> None:
        if not self._placed and news.status.path:
            self._placed = True
            self._say(f"{news.status.name}: its folder is {news.status.path}")
        self._show(news)
        if news.ended:
            found = news.status
            self._say(f"{found.name}: {found.state}, step {found.step}/{found.num_steps}; its folder is {found.path}")

    def _say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _show(self, news: News) -> None:
        self._say_message(news)
        if not news.records:
            return
        if self._line is None:
            self._line = ProgressLine(news.status.num_steps, self._stream)
            if news.status.first_step:
                found = news.status  # its newest checkpoint may be a later one by now
                self._stream.write(f"{found.name} goes on after step {found.first_step}, {found.source}\n")
        for record in news.records:
            if record.step >= news.status.first_step:
                self._line.update(record)

    def _say_message(self, news: News) -> None:
        """What a start waits for, once it takes a while, and what happens to a run, at once."""
        state, message = news.status.state, news.status.message
        if message == self._said or (state == "starting" and time.monotonic() < self._late_s):
            return
        if state == "starting" or (state == "running" and message):
            self._said = message
            self._say(f"{news.status.name}: {message}")


_heard: ContextVar[bool] = ContextVar("heard", default=True)


@contextmanager
def heard(progress: bool) -> Iterator[None]:
    """Whether anybody wants to know what is done inside."""
    token = _heard.set(progress)
    try:
        yield
    finally:
        _heard.reset(token)


@contextmanager
def telling(text: str) -> Iterator[None]:
    """Whoever waits for what is done inside is told what it is."""
    bar = ProfilingBar()
    bar.say(text)
    try:
        yield
    finally:
        bar.close()


class ProfilingBar:
    """What is done before a run can start: at once on a terminal, in a line that is gone when it is closed; elsewhere
    in a line every few seconds, of work that takes longer than that.

    Called with (done, total), it shows how many operations have been profiled.

    Args:
        every_s: seconds between lines where the output is no terminal.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float = 3.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty() and _heard.get()
        self._text, self._shown = "", ""
        self._closed = threading.Event()
        if _heard.get() and not self._live:  # what takes long may call nobody meanwhile
            threading.Thread(target=self._print_now_and_then, args=(every_s,), daemon=True).start()

    def __call__(self, done: int, total: int) -> None:
        self.say(f"profiling {done} of {total} operations")

    def say(self, text: str) -> None:
        """Show this in place of what was there."""
        self._text = text
        if self._live:
            self._stream.write(f"\r{text}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        self._closed.set()
        self.say("")

    def _print_now_and_then(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            text = self._text
            if text and text != self._shown:
                self._shown = text
                self._stream.write(f"{text}\n")
                self._stream.flush()
