"""A worker that dies anywhere in a step does its steps again alone, to the same bits, and the others repeat none."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.engine.beside import channels_between
from raypipe.engine.capture import capture
from raypipe.engine.checkpoint import load_stage
from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.copy import StageCopies
from raypipe.engine.data.source import open_data
from raypipe.engine.executor import Executor
from raypipe.engine.message_log import MessageLog
from raypipe.engine.one_thread import one_thread
from raypipe.engine.reached import newest
from raypipe.engine.replay_channel import ReplayChannel
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState
from raypipe.errors import LinkError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.recovery import Log, Lost, Replay, StepTimes, replay_or_why_not
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.segments import train_segments
from tests.engine.mortal import Mortal, MortalChannel
from tests.exactness import same_bits

pytestmark = pytest.mark.engine

STEPS, SAMPLES, COPIED, STRUCK = 5, 40, 1, 3
"""The copy is that of step 1, and the victim dies in the fourth step, so that two or three steps are replayed."""


class Case(NamedTuple):
    schedule: str
    num_stages: int
    codec: str = "none"
    tied: bool = False


class Net(nn.Module):
    """Dropout, statistics of batches and, where it is tied, a parameter that the first and the last stage have."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.last = nn.Linear(8, 12, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@cache
def made(case: Case) -> tuple[Sequence[StageProgram], Mapping[str, torch.Tensor], RunSetup]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 12, (SAMPLES,)), torch.randint(0, 12, (SAMPLES,)))
    source = open_data(data, seed=0)
    found = capture(Net(tied=case.tied), source.read(0, 0, 2, (0, 1)), (0, 1), functional.cross_entropy)
    programs = found.programs(equal_parameters(found.graph, case.num_stages).cuts)
    run = RunSetup(
        lambda named: torch.optim.AdamW(named, lr=1e-2),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        {"train": source},
        Settings(0, "mean", 0.5, 120.0),
    )
    return programs, {**found.parameters, **found.buffers}, run


def log_since(step: int) -> MessageLog:
    """Of a worker that has a copy of its state after this step."""
    log = MessageLog()
    log.copied(step, 0)
    return log


class Workers:
    """Executors with their logs, over states that stay."""

    def __init__(
        self,
        case: Case,
        states: Sequence[Sequence[StageState]] = (),
        logs: Sequence[MessageLog] = (),
        mortal: int | None = None,
    ) -> None:
        self.programs, self.tensors, self.run_setup = made(case)
        shape = {"zb-h1": {"slack": (1, 1)}, "interleaved": {"chunks": 2}}.get(case.schedule, {})
        self.schedule = lower(schedule_of(ScheduleSpec(case.schedule, 4, **shape), case.num_stages))
        codec = Codec(case.codec, rounding_seed=None if case.codec == "none" else 5)
        self.setup = GenerationSetup(self.programs, self.schedule.wiring.homes, codecs=Codecs(codec, codec))
        self.placements = [self.setup.placement(worker) for worker in range(self.setup.num_workers)]
        self.states = list(states) or [self.new_states(worker) for worker in range(self.setup.num_workers)]
        self.logs = list(logs) or [log_since(0) for _ in self.placements]
        self.channels: list[dict[int, Any]] = channels_between(self.placements, self.programs)
        self.life = Mortal()
        if mortal is not None:
            self.channels[mortal] = {p: MortalChannel(end, self.life) for p, end in self.channels[mortal].items()}
            self.life.channels = self.channels[mortal]
        for log, channels in zip(self.logs, self.channels, strict=True):
            log.reopen()
            for peer, channel in channels.items():
                channel.keep_sent(log.writer(peer))
        self.executors = [self.executor(worker, self.channels[worker]) for worker in range(len(self.placements))]

    def new_states(self, worker: int) -> list[StageState]:
        run = self.run_setup
        return [
            StageState(
                self.programs[stage], {name: x.clone() for name, x in self.tensors.items() if self._has(stage, name)},
                run.make_optimizer, run.make_scheduler,
            )
            for stage in self.placements[worker].stages
        ]  # fmt: skip

    def _has(self, stage: int, name: str) -> bool:
        return name in self.programs[stage].parameters or name in self.programs[stage].buffers

    def executor(self, worker: int, channels: Mapping[int, Any]) -> Executor:
        return Executor(self.run_setup, self.setup, worker, self.states[worker], channels, log=self.logs[worker])

    def run(self, segment: Segment, *, alone: bool = False) -> dict[int, list[list[StepReport]]]:
        """One step; who fails leaves. Reports by worker that made it.

        Args:
            alone: stages take their norms alone.
        """
        found = {}

        def work(worker: int, executor: Executor, row: Row) -> None:
            self.logs[worker].begin(Order(segment))
            try:
                found[worker] = executor.run(segment, row, alone=alone)
            except LinkError:
                executor.leave("it failed")

        with one_thread():
            rows = enumerate(zip(self.executors, self.schedule.rows(), strict=True))
            threads = [threading.Thread(target=work, args=(worker, *pair)) for worker, pair in rows]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    def replayed(self, worker: int, begins: int, step: int) -> list[list[list[StepReport]]]:
        """A new process in place of a worker comes to this step; what it is told and sent went through the logs."""
        self.logs[worker] = log_since(begins)
        placement = self.placements[worker]
        channels = {
            peer: ReplayChannel(
                f"{worker} <-> {peer}", 0, placement.message_capacity(self.programs, peer),
                self.logs[worker].writer(peer),
            )
            for peer in placement.neighbours(self.programs)
        }  # fmt: skip
        executor, found = self.executor(worker, channels), []
        with one_thread():
            for logged in self.logs[min(channels)].logged(range(begins, step)):
                at = logged.order.segment.first_step
                for peer, channel in channels.items():
                    channel.deliver(self.logs[peer].messages(worker, at).values())
                self.logs[worker].begin(logged.order)
                found.append(executor.replay(logged, self.schedule.row(worker)))
        return found


def segments() -> list[Segment]:
    return [segment for segment, _ in train_segments(SAMPLES, 8, 2, STEPS)]


@cache
def undisturbed(case: Case) -> tuple[Workers, list[dict[int, list[list[StepReport]]]]]:
    found = Workers(case)
    return found, [found.run(segment) for segment in segments()]


def disturbed(case: Case, victim: int, messages: int) -> tuple[Workers, int]:
    """The run whose victim dies after so many messages of a step and is replayed, and how many had made that step."""
    todo = segments()
    before = Workers(case, mortal=victim)
    for segment in todo[:COPIED]:
        before.run(segment)
    mine = [before.programs[stage] for stage in before.placements[victim].stages]
    copies = [StageCopies(*pair) for pair in zip(mine, before.states[victim], strict=True)]
    for copy, state in zip(copies, before.states[victim], strict=True):
        copy.take(COPIED, state.updates)
    for segment in todo[COPIED:STRUCK]:
        before.run(segment)
    before.life.most = before.life.used + messages
    before.run(todo[STRUCK])
    living = [worker for worker in range(len(before.executors)) if worker != victim]
    reached = [before.executors[worker].reached for worker in living]
    known = newest(reached, STRUCK)
    assert known is not None, "nobody may have lost a step that another one has made"
    step, totals = known
    for worker, at in zip(living, reached, strict=True):
        if at.made != step:
            assert totals is not None
            before.executors[worker].finish(*totals)
        before.executors[worker].undo()
    peers = frozenset(before.placements[victim].neighbours(before.programs))
    logs = {at: Log(before.logs[at].steps, {victim: before.logs[at].bytes_to(victim)}) for at in living}
    found = replay_or_why_not(step, {victim: Lost(peers, [COPIED])}, logs, COPIED, StepTimes())
    assert isinstance(found, Replay), found
    assert found.begins == {victim: COPIED}
    before.states[victim] = before.new_states(victim)
    for copy, program, state in zip(copies, mine, before.states[victim], strict=True):
        load_stage(copy.source(COPIED), program, state)
    reports = before.replayed(victim, COPIED, step)
    wanted = [of_worker[victim] for of_worker in undisturbed(case)[1][COPIED:step]]
    assert [numbers(of_step) for of_step in reports] == [numbers(of_step) for of_step in wanted]
    after = Workers(case, before.states, before.logs)
    for segment in todo[step:]:
        after.run(segment)
    return after, sum(at.made == STRUCK + 1 for at in reached)


def numbers(of_step: Sequence[Sequence[StepReport]]) -> list[Any]:
    return [(report.step, report.loss, report.grad_norm, report.lr) for of_stage in of_step for report in of_stage]


def messages_of(case: Case, victim: int) -> int:
    """That a worker sends and takes in a step."""
    found = Workers(case, mortal=victim)
    found.run(segments()[0])
    return found.life.used


@pytest.mark.parametrize(
    ("case", "victim", "every"),
    [
        (Case("1f1b", 3), 1, 2),
        (Case("1f1b", 3, tied=True), 0, 4),
        (Case("gpipe", 3, "int8", tied=True), 2, 4),
        (Case("zb-h1", 3, "int4"), 1, 5),
        (Case("interleaved", 4, tied=True), 1, 9),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_a_worker_that_dies_after_any_message_is_replayed_to_the_same_bits(case: Case, victim: int, every: int) -> None:
    wanted = undisturbed(case)[0]
    made_by = []
    count = messages_of(case, victim)
    for messages in sorted({*range(0, count + 1, every), count - 1, count}):
        found, made_it = disturbed(case, victim, messages)
        made_by.append(made_it)
        for ours, theirs in zip(found.states, wanted.states, strict=True):
            for state, twin in zip(ours, theirs, strict=True):
                assert state.updates == twin.updates == STEPS
                for mine, other in ((state.parameters, twin.parameters), (state.buffers, twin.buffers)):
                    assert all(same_bits(mine[name], x) for name, x in other.items()), messages
                assert kept_by(state) == kept_by(twin), messages
        for ours, theirs in zip(found.logs, wanted.logs, strict=True):
            for peer in range(len(found.logs)):
                mine, other = ours.messages(peer, STEPS - 1), theirs.messages(peer, STEPS - 1)
                assert {action: bytes(sent.payload) for action, sent in mine.items()} == {
                    action: bytes(sent.payload) for action, sent in other.items()
                }
    assert made_by[0] == 0, "without the victim the step cannot end"
    assert made_by[-1] == len(found.states) - 1


def test_nobody_is_replayed_before_a_step_with_the_norm_of_all_has_ended() -> None:
    """A stage that takes its norm alone may be a step ahead of another one."""
    found = Workers(Case("1f1b", 3))
    found.run_setup = replace(found.run_setup, settings=replace(found.run_setup.settings, max_grad_norm=None))
    found.executors = [found.executor(worker, channels) for worker, channels in enumerate(found.channels)]
    for segment, alone, flows in zip(segments(), (False, True, False, False), (False, True, True, False), strict=False):
        found.run(segment, alone=alone)
        assert [executor.reached.flows for executor in found.executors] == [flows] * 3
    assert [log.steps for log in found.logs] == [range(2, 4)] * 3


def kept_by(state: StageState) -> list[Any]:
    """What the optimizer has kept, as bytes, and its learning rate."""
    assert state.optimizer is not None
    held = state.optimizer.state_dict()
    tensors = {(at, name): x.numpy().tobytes() for at, of in held["state"].items() for name, x in of.items()}
    return [tensors, [group["lr"] for group in held["param_groups"]]]
