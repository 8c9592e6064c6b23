"""The same plan in threads of one process, without Ray: the reference of every test, the debugger's friend.

Each stage runs in a thread of its own over in-memory channels that go through the real frames. Intra-op
threads are held at one per stage while it runs, as in an actor (the executor sees to its own thread), for
sums over many threads round differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from raypipe.engine.checkpoint import save_shard
from raypipe.engine.data import Source
from raypipe.engine.executor import Executor
from raypipe.engine.memory_channel import InMemoryChannel
from raypipe.engine.stage import StageProgram, message_capacity, neighbours
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings, StageState, owned_tensors
from raypipe.errors import StageError
from raypipe.ir.plan import Segment
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.timeline import Span

__all__ = ["LocalFleet"]


class LocalFleet:
    """All stages of a pipeline as threads; the same face as runtime.fleet.Fleet.

    Args:
        tensors: initial parameters and buffers by canonical name; they are copied.
        persistent: names that belong to a checkpoint.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        tensors: Mapping[str, torch.Tensor],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        sources: Mapping[str, Source],
        settings: Settings,
        persistent: frozenset[str] = frozenset(),
    ) -> None:
        self.programs = programs
        self._persistent = persistent
        self._spans: list[Span] = []
        channels: list[dict[int, InMemoryChannel]] = [{} for _ in programs]
        for one in range(len(programs)):
            for other in neighbours(programs, one):
                if one < other:
                    capacity = message_capacity(programs, one, other)
                    a, b = InMemoryChannel.pair(f"stage {one} <-> stage {other}", 0, capacity)
                    channels[one][other], channels[other][one] = a, b
        self.executors = []
        for index, program in enumerate(programs):
            own = {name: tensors[name].detach().clone() for name in (*program.parameters, *program.buffers)}
            state = StageState(program, own, make_optimizer, make_scheduler)
            self.executors.append(Executor(programs, index, state, channels[index], sources, settings))

    def run(
        self, segments: Iterator[tuple[Segment, bool]], schedules: Callable[[int], Schedule], *, training: bool
    ) -> Iterator[list[list[StepReport]]]:
        """Carry out segments one by one; yields the reports of each, by stage.

        Args:
            segments: with whether to keep the spans of each.
            schedules: number of micro-batches -> lowered schedule.

        Raises:
            StageError, LinkError: the first failure; the other stages are released at once.
        """
        for segment, keep_spans in segments:
            reports = self._run_segment(segment, schedules(segment.schedule_id), training, keep_spans)
            if keep_spans:
                self._spans = [span for stage in reports for report in stage for span in report.spans]
            yield reports

    def spans(self) -> list[Span]:
        """Spans of the last segment run with keep_spans, of all stages."""
        return self._spans

    def save(self, folder: str) -> list[dict[str, Any]]:
        """Write every stage's shard; the manifest's entries."""
        entries = []
        for executor in self.executors:
            program, state = executor.program, executor.state
            entries.append(save_shard(Path(folder), program.index, owned_tensors(program, state, self._persistent)))
        return entries

    def stop(self) -> None:
        """Close the channels; safe to call twice."""
        for executor in self.executors:
            for channel in executor.channels.values():
                channel.close()

    def _run_segment(
        self, segment: Segment, schedule: Schedule, training: bool, keep_spans: bool
    ) -> list[list[StepReport]]:
        outcomes: Queue[tuple[int, list[StepReport] | BaseException]] = Queue()

        def work(index: int) -> None:
            try:
                row = schedule.row(index, segment.repeats)
                reports = self.executors[index].run(segment, row, training=training, keep_spans=keep_spans)
                outcomes.put((index, reports))
            except BaseException as error:  # noqa: BLE001  (handed to the caller's thread, not swallowed)
                outcomes.put((index, error))

        with one_thread():
            threads = [
                threading.Thread(target=work, args=(index,), name=f"raypipe stage {index}", daemon=True)
                for index in range(len(self.programs))
            ]
            for thread in threads:
                thread.start()
            found: dict[int, list[StepReport]] = {}
            failure: BaseException | None = None
            for _ in threads:
                index, outcome = self._next(outcomes)
                if isinstance(outcome, BaseException):
                    if failure is None or (not isinstance(failure, StageError) and isinstance(outcome, StageError)):
                        failure = outcome
                    for executor in self.executors:
                        executor.abort(f"stage {index} failed")
                else:
                    found[index] = outcome
            for thread in threads:
                thread.join()
        if failure is not None:
            raise failure
        return [found[index] for index in range(len(threads))]

    @staticmethod
    def _next(
        outcomes: Queue[tuple[int, list[StepReport] | BaseException]],
    ) -> tuple[int, list[StepReport] | BaseException]:
        while True:  # in short waits, so that Ctrl-C gets through
            try:
                return outcomes.get(timeout=0.5)
            except Empty:
                continue


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread inside, the caller's number again outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
