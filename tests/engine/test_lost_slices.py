"""Replicas that share out the state of their optimizer, and some of them are lost, or others come: no bit is another.

copies of step 2    every worker's own, and what another one holds of them
copies of step 3    every worker's own; nothing of them was sent yet
step 4              its middle, where somebody dies
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.copy import (
    CopyHeader,
    CopyPiece,
    HeldCopies,
    StageCopies,
    copy_source,
    views_of,
)
from raypipe.engine.io.checkpoint import TensorInfo, load_stage
from raypipe.engine.io.checkpoint.state_source import StoredState
from raypipe.engine.optim.slices import ParameterSlice, flat
from raypipe.engine.optim.state import Settings, StageState, shard_optimizer
from raypipe.engine.setup import GenerationSetup
from raypipe.ir.segment import Segment
from raypipe.planner.copy_interval import holders, pieces_sent
from raypipe.planner.segments import train_segments
from raypipe.planner.state_sources import Copy, Layout, Living, plan_transition
from tests.engine.copy.stages import parcels_of, piece_of
from tests.engine.mortal import Counts, Job, Workers, job_of, new_state, schedule_for
from tests.exactness import same_bits

pytestmark = pytest.mark.engine

LANES, STEPS, SAMPLES, SENT, OWN = 6, 5, 48, 2, 3


@cache
def made() -> Job:
    """Two stages whose slices begin within a parameter; dropout, a schedule of the rate, every step clipped."""
    torch.manual_seed(0)
    sizes = (6, 90, 70, 60, 50, 3)
    layers: list[nn.Module] = []
    for before, behind in itertools.pairwise(sizes):
        layers += [nn.Linear(before, behind), nn.ReLU(), nn.Dropout(0.1)]
    return job_of(
        nn.Sequential(*layers[:-2]), lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        Settings(0, "mean", 0.1, 120.0, shard_optimizer=True), SAMPLES,
    )  # fmt: skip


def segments() -> list[Segment]:
    return [segment for segment, _ in train_segments(SAMPLES, 12, 2, STEPS)]


class Copying(Workers):
    """Workers with the copies of each and those that it has of others."""

    def __init__(self, counts: Counts, states: Any = None, mortal: int | None = None) -> None:
        super().__init__(made(), counts, LANES, 6, states, mortal)
        programs = self.setup.programs
        self.copies = [
            {stage: StageCopies(programs[stage], state) for stage, state in zip(one.stages, of_one, strict=True)}
            for one, of_one in zip(self.placements, self.states, strict=True)
        ]
        self.held: list[dict[tuple[int, int], HeldCopies]] = [{} for _ in self.placements]
        self.held_by = holders(["node"] * len(self.placements), self.setup.homes, shared_out=True)

    def copy(self, step: int, *, send: bool = True) -> None:
        """All take one; what is sent went through text and parcels."""
        for of_worker, states in zip(self.copies, self.states, strict=True):
            for copies, state in zip(of_worker.values(), states, strict=True):
                copies.take(step, state.updates)
        told = pieces_sent(self.setup.homes, self.held_by, shared_out=True)
        for worker, holder in enumerate(self.held_by):
            for stage, piece in told[worker] if send and holder is not None else ():
                header, block = self.copies[worker][stage].copy(step, piece)
                held = self.held[holder].setdefault((stage, piece), HeldCopies())
                coming = held.begin(CopyHeader.from_json(header.to_json()))
                for offset, data in parcels_of(block, 1000):
                    coming.place(offset, bytes(data))

    def known(self, lost: Collection[int]) -> list[Copy]:
        """What those that are left have, their own first; a holder is the copies and, where they are held, True."""
        own, held = [], []
        for worker in range(len(self.copies)):
            if worker in lost:
                continue
            for stage, copies in self.copies[worker].items():
                for piece in {header.piece: None for header in copies.headers}:
                    steps = tuple(header.step for header in copies.headers if header.piece == piece)
                    own.append(Copy(copies, 0, 2, stage, steps, piece, copies.headers[-1].pieces))
            for (stage, piece), copies_held in self.held[worker].items():
                held.append(Copy(copies_held, 0, 2, stage, copies_held.steps, piece, copies_held.pieces))
        return own + held

    def source(self, lost: Collection[int]) -> tuple[int, StoredState] | None:
        """(step, state) that all can go back to."""
        living = [Living(at, at, linked=False) for at in range(len(self.placements))]
        now, then = (Layout(generation, self.setup.homes) for generation in (0, 1))
        found = plan_transition(now, then, living, self.known(lost))
        if found is None or found.step is None:
            return None
        step = found.step
        pieces = [
            copy.holder.copy(step).piece()
            if isinstance(copy.holder, HeldCopies)
            else piece_of(copy.holder, step, copy.piece)
            for copy in found.sources[0]
        ]
        return step, copy_source(pieces)

    def as_one(self) -> dict[str, torch.Tensor]:
        """All parameters and what optimizers keep, put together; every replica has the same of the former."""
        for copies in self.copies:
            for one in copies.values():
                one.forget_after(-1)
        self.copy(STEPS, send=False)
        found = self.source(())
        assert found is not None
        source = found[1]
        tensors = {name: x.clone() for name, x in source.read(source.names)}
        for states in self.states:
            for state in states:
                assert state.updates == STEPS
                for name, parameter in state.parameters.items():
                    assert same_bits(parameter.detach(), tensors[name]), f"replicas differ in {name}"
        kept = source.kept(source.names)
        options = {f"lr of {name}": torch.tensor(group.options["lr"]) for name, group in source.groups.items()}
        return tensors | options | {f"{key} of {name}": x for name, of in kept.items() for key, x in of.items()}


def gone_on(before: Copying, counts: Counts, lost: Collection[int]) -> Copying | None:
    """With so many workers from the newest common step on: who is left goes back in place where its stages stay.

    None where there is none.
    """
    found = before.source(lost)
    if found is None:
        return None
    step, source = found
    programs, tensors, run = made()
    assert step == (SENT if lost else OWN)
    homes = schedule_for(counts, LANES, 6).wiring.homes
    setup = GenerationSetup(programs, homes, lanes=LANES)
    left = [worker for worker in range(len(before.states)) if worker not in lost]
    states: list[list[StageState]] = []
    for worker in range(setup.num_workers):
        placement = setup.placement(worker)
        mine = [programs[stage] for stage in placement.stages]
        same = next((old for old in left if before.placements[old].stages == placement.stages), None)
        if same is not None:
            left.remove(same)
            states.append(before.states[same])
            for state in before.states[same]:
                state.renew(run.make_optimizer, run.make_scheduler)
        else:
            empty = {name: torch.zeros_like(x) for name, x in tensors.items()}
            states.append([new_state((programs, empty, run), x) for x in mine])
        for program, state in zip(mine, states[-1], strict=True):
            shard_optimizer(program, state, placement, run.settings)
            load_stage(source, program, state)
    after = Copying(counts, states)
    for segment in segments()[step:]:
        after.run(segment)
    return after


@cache
def undisturbed() -> dict[str, torch.Tensor]:
    """Of one worker for each stage, which keeps its state whole."""
    alone = Copying((1, 1))
    for segment in segments():
        alone.run(segment)
    found = alone.as_one()
    assert sum("exp_avg of" in name for name in found) == 10
    return found


def differences(workers: Copying) -> list[str]:
    found, wanted = workers.as_one(), undisturbed()
    assert found.keys() == wanted.keys()
    return [name for name, x in wanted.items() if not same_bits(found[name], x)]


def struck(counts: Counts, victim: int | None = None, messages: int = 0) -> Copying:
    """Copies of two steps, of which one was sent; in the step behind them a victim dies after so many messages."""
    before = Copying(counts, mortal=victim)
    for step, segment in enumerate(segments()[:OWN], 1):
        before.run(segment)
        if step >= SENT:
            before.copy(step, send=step == SENT)
    if victim is not None:
        before.run(segments()[OWN], dies_after=messages)
    return before


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 2), (3, 1), (2,), (3,)], ids=str)
@pytest.mark.parametrize("many", [1, 2])
def test_whoever_is_lost_all_go_on_from_what_the_others_hold(counts: Counts, many: int) -> None:
    """One worker, or two of any stages: replaced, and without them. Two that hold each other's pieces lose them."""
    count = sum(counts)
    for lost in itertools.combinations(range(count), many):
        before = struck(counts, victim=lost[0], messages=3)
        gone = any(before.held_by[worker] in lost for worker in lost)
        after = gone_on(before, counts, lost)
        assert (after is None) == gone, lost
        if after is not None:
            assert differences(after) == [], lost


@pytest.mark.parametrize(("counts", "victim"), [((2, 1), 0), ((2, 1), 1), ((1, 2), 0), ((2,), 1)])
def test_wherever_in_a_step_a_worker_dies(counts: Counts, victim: int) -> None:
    """Also where some slices have been stepped and others not."""
    total = Copying(counts, mortal=victim).messages_of(segments()[0])
    for messages in sorted({*range(0, total, 7), *range(total - 6, total + 1)}):
        after = gone_on(struck(counts, victim, messages), counts, {victim})
        assert after is not None
        assert differences(after) == [], messages


SHAPES = ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (3, 2))


@pytest.mark.parametrize("before", SHAPES, ids=str)
def test_slices_are_cut_anew_for_other_numbers_of_replicas(before: Counts) -> None:
    """Nobody is lost, so that all have the newest copy of their own: 2 to 1, 1 to 2, 2 to 3 replicas and so on."""
    for counts in SHAPES:
        after = gone_on(struck(before), counts, ())
        assert after is not None
        assert differences(after) == [], counts


@pytest.mark.parametrize(
    ("before", "lost", "counts"),
    [
        ((3, 1), (0,), (2, 1)),
        ((3, 1), (3,), (2, 1)),
        ((2, 2), (0, 1), (1, 1)),
        ((2, 1), (1,), (1, 1)),
        ((3, 2), (1, 2), (2, 1)),
    ],
)
def test_with_fewer_workers_in_other_places(before: Counts, lost: Counts, counts: Counts) -> None:
    """Where nobody takes the place of those that were lost; a replica may become another stage."""
    after = gone_on(struck(before, lost[0], 5), counts, lost)
    assert after is not None
    assert differences(after) == []


def test_a_replica_never_holds_more_than_its_slices() -> None:
    """Nor does a copy: of three replicas, each has about a third of the optimizer's state once."""
    before = struck((3, 1))
    whole = sum(x.nbytes for name, x in undisturbed().items() if "exp_avg" in name)
    of_slices = [
        header.size_bytes
        for copies in before.copies[:3]
        for header in copies[0].headers
        if header.piece and header.step == OWN
    ]
    of_stage = sum(of_slices)
    assert len(of_slices) == 3
    assert max(of_slices) <= of_stage / 3 + 2 * 4 * 1024
    assert of_stage < whole
    assert [sorted(before.held[worker]) for worker in range(4)] == [[(1, 0)], [], [], [(0, 0), (0, 1), (0, 2), (0, 3)]]


def test_a_part_of_a_copy_is_read_without_the_rest() -> None:
    """Of stage 0 on three replicas after two steps."""
    workers = Copying((3, 1))
    read_bytes: list[int] = []
    for segment in segments()[:2]:
        workers.run(segment)
    workers.copy(2, send=False)

    def counted(header: CopyHeader, block: torch.Tensor) -> CopyPiece:
        views = views_of(block)

        def fetch(infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
            read_bytes.append(sum(info.size_bytes for info in infos))
            return views(infos)

        return CopyPiece(header, fetch)

    source = copy_source(
        [
            counted(*copies[0].copy(2, piece))
            for at, copies in enumerate(workers.copies[:3])
            for piece in ([0, 1] if at == 0 else [1 + at])
        ]
    )
    names = [name for name in source.names if source.info(name).shape]
    kept = source.kept(names)
    for name in names:
        size = source.info(name).size_bytes // 4
        for first, stop in ((0, size), (0, min(7, size)), (size // 3, max(size // 2, 1))):
            read_bytes.clear()
            found = source.kept_part(ParameterSlice(name, first, stop))
            assert found.keys() == kept[name].keys() == {"exp_avg", "exp_avg_sq", "step"}
            assert same_bits(found["step"], kept[name]["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(found[key], flat(kept[name][key])[first:stop])
            assert sum(read_bytes) == 2 * 4 * (stop - first) + 4, "and the number of its steps"
