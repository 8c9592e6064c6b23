"""RunHandle: access to a run that continues in the background, from this process or another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch

from raypipe.api.notebook import LiveView, run_html
from raypipe.api.result import Records, Result, losses_of, result_of, table_of_all
from raypipe.callbacks.base import Prompts
from raypipe.engine.io.run_files import part_before
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError, StageError
from raypipe.ir.report import KeptRecords
from raypipe.ir.timeline import Timeline
from raypipe.run.generate_loop import Generation
from raypipe.run.journal import KEPT_RECORDS, News
from raypipe.run.status import RunStatus
from raypipe.run.threads import running_here
from raypipe.viz.chart import Line, chart_svg

POLL_S = 0.5


class Picture:
    """SVG picture that a notebook displays; ``save`` writes it to a file."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Write the picture to an SVG file, which any browser can open."""
        Path(path).write_text(self.svg)


class RunConnection(Protocol):
    """Protocol of a handle's connection to its run: over Ray, or within this process."""

    def news(self, since: int, wait_s: float) -> News: ...

    def part_before(self, step: int) -> bytes | None: ...

    def stop(self, reason: str) -> None: ...

    def checkpoint(self) -> None: ...

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None: ...

    def generate(self, generation: Callable[[], Generation], timeout_s: float) -> torch.Tensor: ...

    def predicted(self) -> Timeline | None: ...

    def close(self) -> None: ...


class RunHandle:
    """Handle of a run that was started with ``trainer.start`` or found with ``raypipe.attach``.

    The handle holds the records of the newest steps. Earlier records are fetched on access. The process that trains the
    run reads them from the run's folder, so that this process needs no access to the folder.

    Args:
        name: name of the run.
        connection: connection to the run.
        ended: called once, by ``close``; ``wait`` calls ``close`` at the end of the run.
        generation: checks prompts and returns what makes the generation of ``generate``; None without a model.
    """

    def __init__(
        self,
        name: str,
        connection: RunConnection,
        ended: Callable[[], None] = lambda: None,
        generation: Callable[[Prompts], Callable[[], Generation]] | None = None,
    ) -> None:
        self.name = name
        self._generation = generation
        self._connection = connection
        self._ended: Callable[[], None] | None = ended
        self._records = KeptRecords(most=KEPT_RECORDS)
        self._told = 0  # records that were ever told
        self._news: News | None = None
        self._fetching = threading.RLock()

    @property
    def path(self) -> str:
        """Path or address of the run's folder."""
        return self.status().path

    def status(self) -> RunStatus:
        """Return the current status of the run; ``print`` shows it as one line."""
        return self._fetch(0.0).status

    def metrics(self) -> Any:
        """Return a pandas DataFrame with one row per step so far; the column "step" counts from 0."""
        return self._table().to_pandas()

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of one step of the current plan; None if the plan has no predicted times.

        Times are missing if the plan was made without a profile, or if replicas were lost or have joined. The measured
        timeline is written to the run's folder at the end of the run.
        """
        return self._connection.predicted()

    def plot(self) -> Picture:
        """Draw the loss over steps."""
        return Picture(chart_svg([Line("loss", losses_of(self._table()))], f"{self.name}: loss", "step", "loss"))

    def watch(self, every_s: float = 1.0) -> None:
        """Show the status of the run until it ends: updated in place in a notebook, else a printed line at each change.

        Interrupting the cell (KeyboardInterrupt) ends the view; the run continues.

        Args:
            every_s: seconds between two updates.
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
        """Save a checkpoint after one of the next steps, wait until it is complete, and return its folder.

        Raises:
            CheckpointError: the run ended first, the checkpoint could not be written, or it was not complete within
                ``timeout_s`` seconds.
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
            "see events.jsonl in its folder for the reason."
        )

    def resize(
        self, num_stages: int, timeout_s: float = 600.0, *, num_replicas: int | Sequence[int] | None = None
    ) -> None:
        """Change the number of stages or of their replicas between two steps, and return when the change is done.

        With synchronous schedules no bit of the result changes. With asynchronous ones ("pipedream", "2bw") bits may
        change: the pipeline drains for the resize, and the age of weights may depend on the number of stages. Layers
        whose stage changes move to the worker of their new stage. Missing workers are started, surplus ones end.

        Args:
            num_stages: new number of stages.
            timeout_s: seconds to wait for the resize.
            num_replicas: workers per stage, one number for all stages or one number for each; at most num_lanes of the
                run (see PipelineConfig). None for the configured number of replicas.

        Raises:
            ConfigError: ``num_stages`` or ``num_replicas`` is not a possible number.
            PlanError: no such plan exists, no workers are available for it, or the resize took longer than
                ``timeout_s``. The run continues unchanged, unless the resize had begun by then.
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

    def generate(self, input_ids: Any, *, timeout_s: float = 600.0, **options: Any) -> torch.Tensor:
        """Continue sequences of token ids with the present weights, on the run's own stages between two steps.

        With synchronous schedules no bit of the training changes. With asynchronous ones bits may change, because the
        pipeline drains before the generation. If a worker is lost meanwhile, this raises an error, and the run
        recovers as usual.

        Args:
            timeout_s: seconds to wait for the tokens.
            input_ids, options: see ``Prompts`` in raypipe.callbacks, and ``PipelineTrainer.generate``.

        Returns:
            Token ids as of ``PipelineTrainer.generate``.

        Raises:
            ConfigError: an argument is not possible, or ``attach`` returned this handle.
            RaypipeError: the run is over, a stage failed, or ``timeout_s`` have passed.
        """
        if self._generation is None:
            raise ConfigError(
                f"This handle of run {self.name!r} is from raypipe.attach, and generating needs the model. Use the "
                "handle that start() returned, a callback with prompts, or PipelineTrainer.generate."
            )
        return self._connection.generate(self._generation(Prompts(input_ids, **options)), timeout_s)

    def stop(self, reason: str = "stop() was called") -> None:
        """Request the end of the run after the current step, with a checkpoint; ``wait`` returns once it has ended."""
        if not self._fetch(0.0).ended:
            self.request_stop(reason)

    def request_stop(self, reason: str) -> None:
        """Request the end of the run like ``stop``, but without fetching the status first.

        Unlike ``stop`` it may be called while another thread is in ``wait``.
        """
        self._connection.stop(reason)

    @property
    def last_status(self) -> RunStatus | None:
        """Status that was received last; None before the first. Reading it sends no request."""
        return self._news.status if self._news else None

    def wait(self, timeout_s: float | None = None, on_news: Callable[[News], None] = lambda news: None) -> Result:
        """Wait for the end of the run, close the handle and return the result.

        Args:
            timeout_s: seconds to wait; None for no limit.
            on_news: called with new records and status, a few times per second.

        Raises:
            TimeoutError: the run had not ended after ``timeout_s``; it continues, and the handle stays open.
            RaypipeError: the root cause of the run's failure.
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
            raise news.error or StageError(f"Run {self.name!r} ended without a result or an error.")
        return result_of(news.status, news.outcome, records)

    def close(self) -> None:
        """Disconnect from the run.

        This ends a run that was started by ``start`` without detached=True.
        """
        ended, self._ended = self._ended, None
        if ended is not None:
            self._connection.close()
            ended()

    def _fetch(self, wait_s: float) -> News:
        """Wait up to ``wait_s`` seconds for news; return the records since the last call, and the current status.

        After the end of the run, the final status is returned at once, without records.
        """
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
        """Return a table with one row per step so far, from the run's folder and this handle's records."""
        with self._fetching:
            self._fetch(0.0)
            return table_of_all(self._records, self._part_before)

    def _part_before(self, step: int) -> bytes | None:
        try:
            return self._connection.part_before(step)
        except StageError:  # whoever started the run has let go of it; perhaps its folder can be read from here
            return part_before(Place.of(self._news.status.path), step) if self._news else None


def attach(name: str) -> RunHandle:
    """Connect to a run that is training: in threads of this process, else on the Ray cluster.

    Use it in another process, in a later notebook, or if the handle of a run was lost.

    Args:
        name: name of the run, or the path or address of its folder, as in ``Result.path``.

    Raises:
        ConfigError: no such run was found; the message lists the runs that exist.
    """
    if "/" in name:
        name = Place.of(name).name
    if (here := running_here(name)) is not None:
        return RunHandle(name, here)

    from raypipe.runtime.driver.client import find_run

    return RunHandle(name, find_run(name))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
