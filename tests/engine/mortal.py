"""Replicated workers in threads, of which one may die in the middle of a step, after a number of its messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.capture import capture
from raypipe.data.open_data import open_data
from raypipe.engine.executor import Executor
from raypipe.engine.local import _with_own_functions
from raypipe.engine.messages.channel import InMemoryChannel, Message
from raypipe.engine.optim.state import Settings, StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.placement import channels_between
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import LinkError
from raypipe.ir.schedule import Row
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Order, Segment
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower

__all__ = ["Counts", "Job", "Workers", "job_of", "new_state", "schedule_for"]

Counts = tuple[int, ...]
"""Workers of each stage; of both stages together if there is one number: two stages on a worker, in a V."""
Job = tuple[Sequence[StageProgram], Mapping[str, torch.Tensor], RunSetup]
"""Programs of two stages, initial tensors, and the setup of the run."""


class Mortal:
    """Channels of a worker that is gone after so many messages, which it has sent or taken."""

    def __init__(self, most: float = math.inf) -> None:
        self.used, self.most = 0, most
        self.channels: dict[int, Any] = {}

    def use(self) -> None:
        if self.used == self.most:
            for channel in self.channels.values():
                channel.within.close()
        self.used += 1


class MortalChannel:
    def __init__(self, within: InMemoryChannel, life: Mortal) -> None:
        self.within, self._life = within, life

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def send(self, *message: Any) -> None:
        self._life.use()
        self.within.send(*message)

    def recv(self, *wanted: Any) -> Message:
        self._life.use()
        return self.within.recv(*wanted)


def job_of(model: nn.Module, make_scheduler: Any, settings: Settings, samples: int) -> Job:
    """A job of AdamW on two stages of a model of six inputs and three classes."""
    data = TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))
    source = open_data(data, seed=0)
    found = capture(model, source.read(0, 0, 2, (0, 1)), (0, 1), functional.cross_entropy)
    run = RunSetup(lambda named: torch.optim.AdamW(named, lr=1e-2), make_scheduler, {"train": source}, settings)
    programs = found.programs(equal_parameters(found.graph, 2).cuts)
    return programs, {**found.parameters, **found.buffers}, run


def run_step(executors: Sequence[Executor], rows: Sequence[Row], segment: Segment) -> None:
    """One step of all workers, each in a thread; who fails leaves."""

    def work(executor: Executor, row: Row) -> None:
        try:
            executor.run(Order(segment), row)
        except LinkError:
            executor.leave("it failed")

    with one_thread():
        threads = [threading.Thread(target=work, args=pair) for pair in zip(executors, rows, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def schedule_for(counts: Counts, lanes: int, num_microbatches: int) -> Any:
    kind, replicas = ("1f1b", counts) if len(counts) == 2 else ("zb-v", 2 * counts)
    return lower(schedule_of(ScheduleSpec(kind, num_microbatches, replicas=replicas, lanes=lanes), 2))


def new_state(job: Job, program: StageProgram) -> StageState:
    _, tensors, run = job
    return StageState(program, {name: x.clone() for name, x in tensors.items()}, run.make_optimizer, run.make_scheduler)


class Workers:
    """Executors of two stages over states that outlive them.

    Args:
        states: by worker; None creates new ones.
        mortal: a worker whose channels can end.
    """

    def __init__(
        self,
        job: Job,
        counts: Counts,
        lanes: int,
        num_microbatches: int,
        states: Sequence[list[StageState]] | None = None,
        mortal: int | None = None,
    ) -> None:
        programs, _, run = job
        self.schedule = schedule_for(counts, lanes, num_microbatches)
        setup = self.setup = GenerationSetup(programs, self.schedule.wiring.homes, lanes=lanes)
        self.placements = [setup.placement(worker) for worker in range(setup.num_workers)]
        fresh = states is None
        self.states = [[new_state(job, programs[s]) for s in p.stages] for p in self.placements] if fresh else [*states]  # type: ignore[misc]
        channels: list[dict[int, Any]] = channels_between(self.placements, programs)
        self.life = Mortal()
        if mortal is not None:
            channels[mortal] = {peer: MortalChannel(end, self.life) for peer, end in channels[mortal].items()}
            self.life.channels = channels[mortal]
        self.executors = [
            Executor(run, _with_own_functions(setup, placement), worker, self.states[worker], channels[worker])
            for worker, placement in enumerate(self.placements)
        ]

    def run(self, segment: Segment, dies_after: int | None = None) -> None:
        """Run a step, in which the mortal worker dies after a number of messages."""
        if dies_after is not None:
            self.life.most = self.life.used + dies_after
        run_step(self.executors, self.schedule.rows(), segment)

    def messages_of(self, segment: Segment) -> int:
        """Run a step; messages that the mortal worker sent and took in it."""
        before = self.life.used
        self.run(segment)
        return self.life.used - before
