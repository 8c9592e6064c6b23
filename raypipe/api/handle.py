"""RunHandle: a run that goes on while you do something else, here or in another process.

handle = trainer.start(num_steps=500)       handle = raypipe.attach("lm")
print(handle.status())
handle.plot()                               a picture in a notebook
handle.watch()                              in place, until the run ends
handle.stop()                               after the step that is running, with a checkpoint
result = handle.wait()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from raypipe.api.notebook import LiveView, run_html
from raypipe.api.records import Records, table_of_all
from raypipe.api.result import Result, losses_of, result_of
from raypipe.engine.metrics import part_before
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, ConfigError, StageError
from raypipe.ir.kept_records import KeptRecords
from raypipe.ir.pictures.chart import Line, chart_svg
from raypipe.ir.timeline import Timeline
from raypipe.runtime.run.journal import KEPT_RECORDS, News
from raypipe.runtime.run.status import RunStatus
from raypipe.runtime.run.threads import running_here

__all__ = ["Picture", "RunHandle", "attach"]

POLL_S = 0.5


class Picture:
    """An SVG that a notebook shows; ``save`` writes it to a file."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Write the picture; any browser opens it."""
        Path(path).write_text(self.svg)


class RunConnection(Protocol):
    """How a handle reaches its run: over Ray, or within this process."""

    def news(self, since: int, wait_s: float) -> News: ...

    def part_before(self, step: int) -> bytes | None: ...

    def stop(self, reason: str) -> None: ...

    def checkpoint(self) -> None: ...

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None: ...

    def predicted(self) -> Timeline | None: ...

    def close(self) -> None: ...


class RunHandle:
    """A run that was started with ``trainer.start`` or found with ``raypipe.attach``.

    It keeps the records of the last steps. Those before are read from the run's folder when they are asked for, by the
    process that runs it: this one need not reach the folder.

    Args:
        connection: to the run.
        ended: called once when the run is over or the handle is closed.
    """

    def __init__(self, name: str, connection: RunConnection, ended: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._connection = connection
        self._ended: Callable[[], None] | None = ended
        self._records = KeptRecords(most=KEPT_RECORDS)
        self._told = 0  # records that were ever told
        self._news: News | None = None
        self._fetching = threading.RLock()

    @property
    def path(self) -> str:
        """The run's folder."""
        return self.status().path

    def status(self) -> RunStatus:
        """Where the run stands now; prints as one line."""
        return self._fetch(0.0).status

    def metrics(self) -> Any:
        """A pandas DataFrame with one row per step so far."""
        return self._table().to_pandas()

    def timeline(self) -> Timeline | None:
        """The predicted timeline of one step; the measured one lies in the run's folder at the end."""
        return self._connection.predicted()

    def plot(self) -> Picture:
        """Loss over steps as a picture."""
        return Picture(chart_svg([Line("loss", losses_of(self._table()))], f"{self.name}: loss", "step", "loss"))

    def watch(self, every_s: float = 1.0) -> None:
        """Show the run in place until it ends; interrupting the cell ends the view, and the run goes on.

        Outside of a notebook it prints a line where something is new.

        Args:
            every_s: seconds between two looks.
        """
        view = LiveView()
        try:
            while True:
                news = self._fetch(every_s)
                view.show(self._repr_html_(), str(news.status))
                if news.ended:
                    return
                time.sleep(every_s)
        except KeyboardInterrupt:
            return

    def _repr_html_(self) -> str:
        status = self._fetch(0.0).status
        steps, losses = (self._records.column(name) for name in ("step", "loss"))
        # Another thread may be adding the last one.
        return run_html(status, [(step + 1.0, loss) for step, loss in zip(steps, losses, strict=False)])

    def checkpoint(self, timeout_s: float = 600.0) -> str:
        """Save a checkpoint after one of the next steps and wait until it is complete; its folder.

        Raises:
            CheckpointError: the run ended before, or it could not be written, or not in time.
        """
        news = self._fetch(0.0)
        before = news.status
        if news.ended:
            raise CheckpointError(f"Run {self.name!r} is over. Its newest checkpoint is {before.checkpoint or 'none'}.")
        self._connection.checkpoint()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            news = self._fetch(POLL_S)
            if news.status.checkpoint != before.checkpoint:
                return news.status.checkpoint
            if news.status.checkpoint_error not in ("", before.checkpoint_error):
                raise CheckpointError(news.status.checkpoint_error)
            if news.ended:
                break
        raise CheckpointError(
            f"Run {self.name!r} is {self._fetch(0.0).status.state} and wrote no new checkpoint within {timeout_s:g} s; "
            "events.jsonl in its folder says why."
        )

    def resize(
        self, num_stages: int, timeout_s: float = 600.0, *, num_replicas: int | Sequence[int] | None = None
    ) -> None:
        """Give the run another number of stages, or of their replicas, between two steps; returns when it has it.

        No bit of the result changes, but with the asynchronous schedules ("pipedream", "2bw"): they run empty for it,
        and how old weights are may follow from the number of stages. Layers whose stage changes move to its worker; new
        workers are started where the plan needs them, others end.

        Args:
            num_replicas: workers per stage, one number for all or one for each, at most as many as the run has lanes
                (num_lanes); None for as many as it was configured with.

        Raises:
            ConfigError: no number of stages, or of replicas.
            PlanError: there is no such plan, or no place for it; the run goes on as it was.
        """
        if not _is_count(num_stages):
            raise ConfigError(f"num_stages={num_stages!r} is not possible: give an integer of at least 1.")
        counts = [] if num_replicas is None else [num_replicas] if isinstance(num_replicas, int) else [*num_replicas]
        if not all(map(_is_count, counts)) or len(counts) not in {0, 1, num_stages}:
            raise ConfigError(
                f"num_replicas={num_replicas!r} with num_stages={num_stages} is not possible: give an integer of at "
                "least 1, or one for each stage."
            )
        replicas = num_replicas if num_replicas is None or isinstance(num_replicas, int) else tuple(num_replicas)
        self._connection.resize(num_stages, timeout_s, replicas)

    def stop(self, reason: str = "stop() was called") -> None:
        """Ask the run to end after the step that is running, with a checkpoint; ``wait`` tells when it has."""
        if not self._fetch(0.0).ended:
            self.request_stop(reason)

    def request_stop(self, reason: str) -> None:
        """``stop`` without a look at the run first: safe while another thread waits for it."""
        self._connection.stop(reason)

    @property
    def last_status(self) -> RunStatus | None:
        """What was last heard of the run, without asking."""
        return self._news.status if self._news else None

    def wait(self, timeout_s: float | None = None, on_news: Callable[[News], None] = lambda news: None) -> Result:
        """Wait for the end of the run.

        Args:
            timeout_s: None waits for ever.
            on_news: called with what is new, a few times per second.

        Raises:
            TimeoutError: the run goes on.
            RaypipeError: the root cause of its failure.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not (news := self._fetch(POLL_S)).ended:
                on_news(news)
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError(f"Run {self.name!r} goes on: {news.status}")
            on_news(news)
            records = Records(self._table()) if news.outcome is not None else None
        except TimeoutError:
            raise
        except BaseException:
            self.close()
            raise
        self.close()
        if news.outcome is None or records is None:
            raise news.error or StageError(f"Run {self.name!r} ended without a word.")
        return result_of(news.status, news.outcome, records)

    def close(self) -> None:
        """Let go of the run; the process that started it (not detached) ends it."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._connection.close()
            ended()

    def _fetch(self, wait_s: float) -> News:
        """What is new since the last call; the last word once the run is over."""
        with self._fetching:
            if self._news is not None and self._news.ended:
                return self._news._replace(records=[])
            news = self._news = self._connection.news(self._told, wait_s)
            if news.end - len(news.records) > self._told:
                self._records.clear()  # some were told and forgotten before this handle asked: they are in the folder
            steps = self._records.column("step")
            for record in news.records:
                while steps and steps[-1] >= record.step:
                    self._records.pop()  # the run went back
                self._records.append(record)
            self._told = news.end
            return news

    def _table(self) -> pa.Table:
        """One row per step so far."""
        with self._fetching:
            self._fetch(0.0)
            return table_of_all(self._records, self._part_before)

    def _part_before(self, step: int) -> bytes | None:
        try:
            return self._connection.part_before(step)
        except StageError:  # whoever started the run has let go of it; perhaps its folder can be read from here
            return part_before(Place.of(self._news.status.path), step) if self._news else None


def attach(name: str) -> RunHandle:
    """A handle to a run that threads of this process train, else to one that is on the cluster.

    For a notebook that comes later, another process, or a cell whose handle was lost.

    Raises:
        ConfigError: there is no such run; says which there are.
    """
    if (here := running_here(name)) is not None:
        return RunHandle(name, here)

    from raypipe.runtime.driver.client import find_run

    return RunHandle(name, find_run(name))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
