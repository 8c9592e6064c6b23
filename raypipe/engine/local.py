"""Local runner: a pipeline in threads of one process, without Ray, for tests and debugging.

Each worker is a thread. Its in-memory channels encode messages as network links do. While stages run, torch has one
intra-op thread, as in an actor, because sums over several threads round differently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from raypipe.engine.decoding import DecodeProgram, StageDecoder, ThreadDecoding
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.device.thread_pool import ThreadPool
from raypipe.engine.executor import Executor
from raypipe.engine.io.checkpoint import FreshOptions, GivenTensors, StateSource, read_all
from raypipe.engine.io.checkpoint.snapshot import entries_of
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.placement import Placement, channels_between
from raypipe.engine.stage_runner import StageRunner
from raypipe.engine.torch_settings import one_thread
from raypipe.engine.worker_progress import all_hold
from raypipe.errors import CheckpointError, LinkError, StageError
from raypipe.ir.report import Reports, StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Span

SAVE_TIMEOUT_S = 3600.0

_Outcome = tuple[int, Reports | BaseException]
"""(Index of a worker, reports of its run or the exception that ended the run)."""


class LocalFleet:
    """All workers of a pipeline as threads of this process; same interface as runtime.fleet.fleet.Fleet.

    Args:
        run: settings and data, which every plan keeps.
        setup: stages of the plan, and their assignment to workers.
        initial: parameters and buffers by canonical name, which are copied; or sources of state, in which case each
            tensor is read from the first source that has its name.
        device_of: maps a worker's index to the device that it computes on.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        initial: Mapping[str, torch.Tensor] | Sequence[StateSource],
        device_of: Callable[[int], Device] = lambda _: CPU,
    ) -> None:
        programs = setup.programs
        self._halted = False
        self._spans: list[Span] = []
        placements = [setup.placement(worker) for worker in range(setup.num_workers)]
        channels = channels_between(placements, programs)
        self.executors = []
        sources = [GivenTensors(initial)] if isinstance(initial, Mapping) else initial
        for worker, placement in enumerate(placements):
            transfer = DeviceTransfer(device_of(worker))
            states = []
            for program in (programs[stage] for stage in placement.stages):
                own = read_all(sources, (*program.parameters, *program.buffers))
                own = transfer.named(own, TransferKind.PARAMETERS)
                states.append(StageState(program, own, run.make_optimizer, run.make_scheduler))
            mine = setup if placement.leads else _with_own_functions(setup, placement)
            self.executors.append(Executor(run, mine, worker, states, channels[worker], transfer.device))
        self._pool: ThreadPool[_Outcome] = ThreadPool("raypipe worker", len(self.executors))
        self._running: deque[tuple[Order, SimpleQueue[_Outcome]]] = deque()  # segments that have begun
        self._failed: set[int] = set()  # workers that run nothing until the next call of ``run``
        self._limit = ExitStack()  # one thread while segments run
        writing = self.executors if run.place is not None else []
        self._writers = [writer for executor in writing for writer in executor.shard_writers()]

    @property
    def _works(self) -> list[StageRunner]:
        """Runners of the stages' first replicas, in increasing order of the stages."""
        leading = (executor for executor in self.executors if executor.placement.leads)
        return sorted((work for executor in leading for work in executor.works.values()), key=lambda work: work.stage)

    @property
    def states(self) -> list[StageState]:
        """States of the stages' first replicas, in increasing order of the stages."""
        return [work.state for work in self._works]

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]:
        """Run segments until there are no more requests or ``halt`` is called.

        A segment begins when the one before has ended on all workers. Where an asynchronous schedule goes on without
        draining, it begins on each worker when that worker has ended the one before: two segments are in flight then.

        Args:
            orders: requests, each to run one segment.
            schedules: function from ``order.rows`` to the schedule with the actions of every worker.
            last: True if the segments are run even after ``halt``, to complete the micro-batches still in flight.

        Yields:
            The reports of each segment: one list per stage and replica, in this order, with one report per mini-batch.

        Raises:
            StageError, LinkError: the first failure of a worker; the other workers are aborted at once.
        """

        def begin() -> bool:
            if (self._halted and not last) or (order := next(orders, None)) is None:
                return False
            self._begin(order, schedules(order.rows))
            return True

        late: Reports | None = None  # reports of the segment before
        self._failed.clear()
        while self._running or begin():
            if len(self._running) == 1 and self._goes_on(self._running[0][0]):
                begin()
            before, late = late, None
            try:
                order, outcome = self._end()
            except Exception:  # Ctrl-C must end the run at once
                if before is not None:
                    yield before()
                raise
            if before is not None:
                yield before()
            late = outcome
            if any(executor.reports_late(order) for executor in self.executors):
                continue
            reports, late = late(), None
            if order.keep_spans:
                self._spans = [span for stage in reports for report in stage for span in report.spans]
            if order.save_to:
                self.save(order.save_to)
            yield reports
        if late is not None:
            yield late()

    def _goes_on(self, order: Order) -> bool:
        """Return True if workers begin the segment after ``order`` without waiting for each other."""
        segment = order.segment
        flows = order.training and segment.update_interval is not None and not segment.phase.ends_empty
        return flows and all(executor.device.immediate for executor in self.executors)

    def halt(self) -> None:
        """Let ``run`` end after the current segment. Later runs do nothing, unless ``last`` is True. Thread-safe."""
        self._halted = True

    def makers(self, reports: Sequence[StepReport]) -> tuple[dict[str, Any], ...]:
        """Return (), because all stages run in this process; Fleet returns facts about the process of each stage."""
        return ()

    def spans(self) -> list[Span]:
        """Return the timed actions (Span) of all stages in the last segment run with keep_spans=True; empty if none."""
        return self._spans

    def holds(self, step: int) -> bool:
        """Return True if, after a failed ``run``, all stages hold the state after exactly ``step`` optimizer steps."""
        return all_hold([executor.progress for executor in self.executors], step)

    def save(self, folder: str) -> None:
        """Start to write a snapshot of every stage to ``folder``, relative to the run's folder; ``entries`` waits."""
        for writer in self._writers:
            writer.begin(folder)

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until every stage has written its files of checkpoint ``folder``; return the entries of its manifest."""
        entries = entries_of(self._writers, folder, SAVE_TIMEOUT_S)
        saved = [entry for entry in entries if entry is not None]
        if len(saved) < len(entries):
            raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
        return saved

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Load checkpoint ``folder`` on every stage; optimizer options in ``fresh`` keep their present values."""
        for executor in self.executors:
            executor.restore(folder, fresh)

    def decoding(self, programs: Sequence[DecodeProgram], placement: Sequence[int]) -> ThreadDecoding:
        """Return a context manager of the stages as a pipeline that generates text, with their present weights.

        Args:
            programs: program of each stage.
            placement: worker of each stage.
        """
        holders = [self.executors[worker] for worker in placement]
        return ThreadDecoding(
            [
                StageDecoder(program, holder.works[stage].state, holder.transfer)
                for stage, (program, holder) in enumerate(zip(programs, holders, strict=True))
            ],
            placement,
        )

    def stop(self) -> None:
        """End the threads, wait for checkpoint files being written, and close data and channels; safe to call twice."""
        self._pool.close()
        self._limit.close()
        for writer in self._writers:
            writer.close()
        for executor in self.executors:
            for work in executor.works.values():
                work.feed.close()
            for channel in executor.channels.values():
                channel.close()

    def _begin(self, order: Order, schedule: Schedule) -> None:
        """Queue a segment on every worker."""
        failed = self._failed

        def carry_out(index: int) -> _Outcome:
            if index in failed:
                return index, LinkError("An earlier segment failed.")
            try:
                row, alone = schedule.row(index), schedule.wiring.alone(index)
                return index, self.executors[index].run(order, row, alone=alone)
            except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
                failed.add(index)
                return index, error

        if not self._running:
            self._limit.enter_context(one_thread())
        outcomes = self._pool.submit([partial(carry_out, index) for index in range(len(self.executors))])
        self._running.append((order, outcomes))

    def _end(self) -> tuple[Order, Reports]:
        """Wait for the oldest segment; return its order and what reads its reports, or raise its failure."""
        order, outcomes = self._running[0]
        by_worker, failure = self._gather(outcomes)
        self._running.popleft()
        if failure is not None:
            while self._running:
                self._gather(self._running.popleft()[1])
        if not self._running:
            self._limit.close()
        if failure is not None:
            raise failure

        def reports() -> list[list[StepReport]]:
            by_holder = {
                (stage, index): of_stage
                for index, executor in enumerate(self.executors)
                for stage, of_stage in zip(executor.works, by_worker[index](), strict=True)
            }
            return [by_holder[holder] for holder in sorted(by_holder)]

        return order, reports

    def _gather(self, outcomes: SimpleQueue[_Outcome]) -> tuple[dict[int, Reports], BaseException | None]:
        """Wait for the outcomes of all workers; after the first failure, abort all workers.

        Returns:
            (reports by worker, failure to raise). The failure is the first StageError, or else the first failure; None
            if no worker failed.
        """
        by_worker: dict[int, Reports] = {}
        failure: BaseException | None = None
        for _ in self.executors:
            index, outcome = _next(outcomes)
            if isinstance(outcome, BaseException):
                if failure is None or (not isinstance(failure, StageError) and isinstance(outcome, StageError)):
                    failure = outcome
                for executor in self.executors:
                    executor.abort(f"{executor.placement.name_of(index)} failed")
            else:
                by_worker[index] = outcome
        return by_worker, failure


def _next(outcomes: SimpleQueue[_Outcome]) -> _Outcome:
    while True:  # in short waits, so that Ctrl-C gets through
        try:
            return outcomes.get(timeout=0.5)
        except Empty:
            continue


def _with_own_functions(setup: GenerationSetup, placement: Placement) -> GenerationSetup:
    """Return the setup with copies of the functions of a replica's stages.

    A function binds parameters, so replicas in several threads cannot share it.
    """
    programs = [
        replace(program, train=copy(program.train), eval=copy(program.eval)) if stage in placement.stages else program
        for stage, program in enumerate(setup.programs)
    ]
    return replace(setup, programs=programs)
