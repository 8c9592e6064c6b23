"""The same plan in threads of one process, without Ray: the reference of every test, the debugger's friend.

Each worker is a thread of its own over in-memory channels that go through the real frames. Intra-op
threads are held at one per stage while it runs, as in an actor (the executor sees to its own thread), for
sums over many threads round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from raypipe.engine.beside import channels_between
from raypipe.engine.checkpoint import FreshOptions, GivenTensors, StateSource, read_all
from raypipe.engine.crew import Crew
from raypipe.engine.crossing import Crossing
from raypipe.engine.device import CPU, Crosses, Device
from raypipe.engine.executor import Executor
from raypipe.engine.one_thread import one_thread
from raypipe.engine.placement import Placement
from raypipe.engine.restoring import restore_stages
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.shard_writer import writers_of
from raypipe.engine.stage_work import StageWork
from raypipe.engine.state import StageState
from raypipe.errors import CheckpointError, StageError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Span
from raypipe.ir.work_order import Order

__all__ = ["LocalFleet"]

SAVE_TIMEOUT_S = 3600.0

_Outcome = tuple[int, list[list[StepReport]] | BaseException]
"""Of one worker: its reports, or why there are none."""


class LocalFleet:
    """All stages of a pipeline as threads; the same face as runtime.fleet.Fleet.

    Args:
        initial: parameters and buffers by canonical name, which are copied; or where they are, each name in the first
            that has it.
        device_of: worker -> what it computes on.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        initial: Mapping[str, torch.Tensor] | Sequence[StateSource],
        device_of: Callable[[int], Device] = lambda _: CPU,
    ) -> None:
        programs = setup.programs
        self._setup = run
        self._halted = False
        self._spans: list[Span] = []
        placements = [setup.placement(worker) for worker in range(setup.num_workers)]
        channels = channels_between(placements, programs)
        self.executors = []
        sources = [GivenTensors(initial)] if isinstance(initial, Mapping) else initial
        for worker, placement in enumerate(placements):
            crossing = Crossing(device_of(worker))
            states = []
            for program in (programs[stage] for stage in placement.stages):
                own = read_all(sources, (*program.parameters, *program.buffers))
                own = crossing.named(own, Crosses.PARAMETERS)
                states.append(StageState(program, own, run.make_optimizer, run.make_scheduler))
            mine = setup if placement.leads else _with_own_functions(setup, placement)
            self.executors.append(Executor(run, mine, worker, states, channels[worker], crossing.device))
        self._crew: Crew[_Outcome] = Crew("raypipe worker", len(self.executors))
        writing = self.executors if run.place is not None else []
        self._writers = [writer for executor in writing for writer in writers_of(executor, run)]

    @property
    def _works(self) -> list[StageWork]:
        """Of all stages, in their order, on the replicas that lead."""
        leading = (executor for executor in self.executors if executor.placement.leads)
        return sorted((work for executor in leading for work in executor.works.values()), key=lambda work: work.stage)

    @property
    def states(self) -> list[StageState]:
        """Of all stages, in their order."""
        return [work.state for work in self._works]

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]:
        """Carry out orders one by one; yields the reports of each, by stage and replica. Ends early after ``halt``.

        Args:
            schedules: the lowered rows by key.
            last: these orders complete what ``halt`` left under way, and are carried out after it.

        Raises:
            StageError, LinkError: the first failure; the other stages are released at once.
        """
        while (last or not self._halted) and (order := next(orders, None)) is not None:
            reports = self._run_segment(order, schedules(order.rows))
            if order.keep_spans:
                self._spans = [span for stage in reports for report in stage for span in report.spans]
            if order.save_to:
                self.save(order.save_to)
            yield reports

    def halt(self) -> None:
        """From another thread: end after the segment that is running; runs that begin later are empty."""
        self._halted = True

    def spans(self) -> list[Span]:
        """Spans of the last segment run with keep_spans, of all stages."""
        return self._spans

    def save(self, folder: str) -> None:
        """Take a snapshot of every stage, to be written to ``folder`` below the run's; see ``entries``."""
        for writer in self._writers:
            writer.begin(folder)

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until every stage has written its part of checkpoint ``folder``; the manifest's entries."""
        entries = [writer.entry(folder, SAVE_TIMEOUT_S) for writer in self._writers]
        found = [entry for entry in entries if entry is not None]
        if len(found) < len(entries):
            raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
        return found

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Go back to the state of checkpoint ``folder`` on every stage, but for these options of the optimizer."""
        for executor in self.executors:
            restore_stages(executor.works.values(), self._setup, folder, fresh, executor.crossing)

    def stop(self) -> None:
        """Close the channels and the data; safe to call twice."""
        self._crew.close()
        for writer in self._writers:
            writer.close()
        for executor in self.executors:
            for work in executor.works.values():
                work.feed.close()
            for channel in executor.channels.values():
                channel.close()

    def _run_segment(self, order: Order, schedule: Schedule) -> list[list[StepReport]]:
        if order.training:
            for executor in self.executors:
                executor.use_codecs(order.codecs)

        def carry_out(index: int) -> _Outcome:
            try:
                row = schedule.row(index)
                return index, self.executors[index].run(
                    order.segment,
                    row,
                    training=order.training,
                    alone=schedule.wiring.alone(index),
                    keep_spans=order.keep_spans,
                    measure=order.measure,
                )
            except BaseException as error:  # noqa: BLE001  (handed to the caller's thread, not swallowed)
                return index, error

        with one_thread():
            outcomes = self._crew.hand([partial(carry_out, index) for index in range(len(self.executors))])
            found, failure = self._gather(outcomes)
        if failure is not None:
            raise failure
        by_holder = {
            (stage, index): of_stage
            for index, executor in enumerate(self.executors)
            for stage, of_stage in zip(executor.works, found[index], strict=True)
        }
        return [by_holder[holder] for holder in sorted(by_holder)]

    def _gather(
        self, outcomes: SimpleQueue[_Outcome]
    ) -> tuple[dict[int, list[list[StepReport]]], BaseException | None]:
        """The reports of each worker, and the first failure, or what explains it; it releases the other workers."""
        found: dict[int, list[list[StepReport]]] = {}
        failure: BaseException | None = None
        for _ in self.executors:
            index, outcome = _next(outcomes)
            if isinstance(outcome, BaseException):
                if failure is None or (not isinstance(failure, StageError) and isinstance(outcome, StageError)):
                    failure = outcome
                for executor in self.executors:
                    executor.abort(f"{executor.placement.name_of(index)} failed")
            else:
                found[index] = outcome
        return found, failure


def _next(outcomes: SimpleQueue[_Outcome]) -> _Outcome:
    while True:  # in short waits, so that Ctrl-C gets through
        try:
            return outcomes.get(timeout=0.5)
        except Empty:
            continue


def _with_own_functions(setup: GenerationSetup, placement: Placement) -> GenerationSetup:
    """The setup of a further replica: a stage function binds parameters to its modules, so no two threads share one."""
    programs = [
        replace(program, train=copy(program.train), eval=copy(program.eval)) if stage in placement.stages else program
        for stage, program in enumerate(setup.programs)
    ]
    return replace(setup, programs=programs)
