"""Local runner: a pipeline in threads of one process, without Ray, for tests and debugging.

Each worker is a thread with in-memory channels that use the real frames. Intra-op threads are limited to one per stage
while it runs, as in an actor (the executor limits its own thread), because sums over many threads round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.device.thread_pool import ThreadPool
from raypipe.engine.executor import Executor
from raypipe.engine.io.checkpoint import FreshOptions, GivenTensors, StateSource, read_all
from raypipe.engine.io.checkpoint.snapshot import entries_of
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.placement import Placement, channels_between
from raypipe.engine.stage_work import StageWork
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import CheckpointError, StageError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Span

SAVE_TIMEOUT_S = 3600.0

_Outcome = tuple[int, list[list[StepReport]] | BaseException]
"""Worker index, and its reports or its failure."""


class LocalFleet:
    """All stages of a pipeline as threads; same interface as runtime.fleet.fleet.Fleet.

    Args:
        initial: parameters and buffers by canonical name, which are copied; or sources of them, of which the first
            that has a name is read.
        device_of: worker -> device that it computes on.
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
        writing = self.executors if run.place is not None else []
        self._writers = [writer for executor in writing for writer in executor.shard_writers()]

    @property
    def _works(self) -> list[StageWork]:
        """Stages of the leading replicas, in order."""
        leading = (executor for executor in self.executors if executor.placement.leads)
        return sorted((work for executor in leading for work in executor.works.values()), key=lambda work: work.stage)

    @property
    def states(self) -> list[StageState]:
        """States of all stages, in order."""
        return [work.state for work in self._works]

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]:
        """Carry out orders one by one; yield the reports of each, by stage and replica. Ends early after ``halt``.

        Args:
            schedules: the lowered rows by key.
            last: these orders complete micro-batches that ``halt`` left in flight, and are carried out after it.

        Raises:
            StageError, LinkError: the first failure; the other workers are aborted at once.
        """
        while (last or not self._halted) and (order := next(orders, None)) is not None:
            reports = self._run_segment(order, schedules(order.rows))
            if order.keep_spans:
                self._spans = [span for stage in reports for report in stage for span in report.spans]
            if order.save_to:
                self.save(order.save_to)
            yield reports

    def halt(self) -> None:
        """Stop after the current segment, from another thread; later runs carry out nothing."""
        self._halted = True

    def makers(self, reports: Sequence[StepReport]) -> tuple[dict[str, Any], ...]:
        """Return no process facts: stages in threads have no process of their own."""
        return ()

    def spans(self) -> list[Span]:
        """Return the spans of the last segment run with keep_spans, of all stages."""
        return self._spans

    def save(self, folder: str) -> None:
        """Start writing a snapshot of every stage to ``folder`` in the run's folder; see ``entries``."""
        for writer in self._writers:
            writer.begin(folder)

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until every stage has written its part of checkpoint ``folder``; return the manifest's entries."""
        entries = entries_of(self._writers, folder, SAVE_TIMEOUT_S)
        saved = [entry for entry in entries if entry is not None]
        if len(saved) < len(entries):
            raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
        return saved

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Load checkpoint ``folder`` on every stage, except for these options of the optimizer."""
        for executor in self.executors:
            executor.restore(folder, fresh)

    def stop(self) -> None:
        """Close the channels and the data; safe to call twice."""
        self._pool.close()
        for writer in self._writers:
            writer.close()
        for executor in self.executors:
            for work in executor.works.values():
                work.feed.close()
            for channel in executor.channels.values():
                channel.close()

    def _run_segment(self, order: Order, schedule: Schedule) -> list[list[StepReport]]:
        def carry_out(index: int) -> _Outcome:
            try:
                row, alone = schedule.row(index), schedule.wiring.alone(index)
                return index, self.executors[index].run(order, row, alone=alone)
            except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
                return index, error

        with one_thread():
            outcomes = self._pool.submit([partial(carry_out, index) for index in range(len(self.executors))])
            by_worker, failure = self._gather(outcomes)
        if failure is not None:
            raise failure
        by_holder = {
            (stage, index): of_stage
            for index, executor in enumerate(self.executors)
            for stage, of_stage in zip(executor.works, by_worker[index], strict=True)
        }
        return [by_holder[holder] for holder in sorted(by_holder)]

    def _gather(
        self, outcomes: SimpleQueue[_Outcome]
    ) -> tuple[dict[int, list[list[StepReport]]], BaseException | None]:
        """Return the reports by worker, and the first failure, preferably a StageError; abort the other workers."""
        by_worker: dict[int, list[list[StepReport]]] = {}
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
    """Copy the stage functions for another replica: they bind parameters to modules, so threads must not share them."""
    programs = [
        replace(program, train=copy(program.train), eval=copy(program.eval)) if stage in placement.stages else program
        for stage, program in enumerate(setup.programs)
    ]
    return replace(setup, programs=programs)
