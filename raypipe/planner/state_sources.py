"""Transition of a running job to a plan: the member (process) that becomes each worker, and the source of its state.

    after a loss           stage 0   worker 0: 20, 21                 step 21 lacks stage 1, so all load step 20:
                           stage 1   (lost)   worker 0 holds: 20      stage 0 from worker 0, stage 1 from worker 0
    another plan           all load the current step, which each member has just copied
    a replica less, more   members that hold the same stages keep their state; a spare loads that of a replica

If replicas shard their optimizer state, a copy of their stage has several pieces: one that is equal on all replicas,
and the slices of each replica.

    stage 0   replica 0              has steps 20, 21: the common piece, and its own slices
              replica 1 (lost)       worker 2 holds its slices of step 20: so step 20 has all pieces
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.schedule import Homes, groups_in


class Layout(NamedTuple):
    """Workers of a plan.

    Attributes:
        generation: number of the plan. Plans of one generation have the same stages, but perhaps other replicas.
        homes: workers of each stage.
    """

    generation: int
    homes: Homes

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Stages held by each group of replicas."""
        return [self.stages_of(workers[0]) for workers in groups_in(self.homes)]

    @property
    def num_workers(self) -> int:
        """Number of distinct workers."""
        return len({worker for workers in self.homes for worker in workers})

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker holds."""
        return tuple(stage for stage, workers in enumerate(self.homes) if worker in workers)


class Living(NamedTuple):
    """Member of the run whose process is alive.

    Attributes:
        position: position in the roster, the list of all members of the run.
        worker: number in the current plan; None for a spare.
        step: number of optimizer steps in its state; None if unknown, as after a step that was stopped.
        stays: False if it has to leave: its copies can be read, but it gets no stage.
        linked: True if its links work.
    """

    position: int
    worker: int | None = None
    step: int | None = None
    stays: bool = True
    linked: bool = True


class Copy(NamedTuple):
    """Copies of one stage's state, or of a piece of it, after several steps, in the memory of one process.

    Attributes:
        holder: process that holds the copies; not interpreted here.
        generation, num_stages: number of the plan that the copies belong to, and its number of stages.
        stage: number of the stage in that plan.
        steps: steps after which a complete copy was made.
        piece: 0 for state that is equal on all replicas, n for the slices of the n-th replica.
        pieces: number of pieces with slices that a stage's state has besides piece 0.
    """

    holder: Any
    generation: int
    num_stages: int
    stage: int
    steps: tuple[int, ...]
    piece: int = 0
    pieces: int = 0


class Transition(NamedTuple):
    """Assignment of members to the workers of a plan, and the copies from which they load their state.

    Attributes:
        plan: layout of the workers after the transition.
        members: by worker, position in the roster of the member that becomes this worker.
        sources: for each worker that loads its state from copies, all copies that it needs; others keep their state.
        step: number of steps in the state that all have afterwards; None if every worker has to load a checkpoint from
            storage.
    """

    plan: Layout
    members: tuple[int, ...]
    sources: Mapping[int, tuple[Copy, ...]]
    step: int | None


def plan_transition(
    current: Layout, wanted: Layout, living: Sequence[Living], copies: Sequence[Copy], saved: int | None = None
) -> Transition | None:
    """Find members for a plan, and the newest step whose state all of them can have; None if nothing would change.

    Args:
        current: layout that the members have now.
        wanted: layout that they get.
        living: all members whose processes are alive.
        copies: copies in memory, preferred ones first, with the steps to which the run can roll back.
        saved: step of the newest checkpoint, which is used if no state in memory is as new.

    Raises:
        PlanError: there are fewer members than workers.
    """
    members = _members(current, wanted, [member for member in living if member.stays])
    by_step = {step: _sources(current, wanted, members, copies, step) for step in _steps(members, copies)}
    step = max((step for step, sources in by_step.items() if sources is not None), default=None)
    if step is None or (saved is not None and saved > step):
        return Transition(wanted, tuple(member.position for member in members), {}, None)
    sources = by_step[step] or {}
    stays = [(member.worker, member.linked) for member in members] == [(at, True) for at in range(len(members))]
    if current == wanted and stays and not sources:
        return None
    return Transition(wanted, tuple(member.position for member in members), sources, step)


def _members(current: Layout, wanted: Layout, staying: Sequence[Living]) -> list[Living]:
    """Choose a member for each worker of the wanted layout.

    If the layouts differ only in the numbers of replicas, members keep their stages, otherwise their numbers. Spares
    fill the gaps; see ``members_by_number``.
    """
    groups = [groups_in(layout.homes) for layout in (current, wanted)]
    if current.homes == wanted.homes or current.groups != wanted.groups:
        return members_by_number(staying, wanted.num_workers)
    living = {member.worker for member in staying}
    numbers = {
        old: new
        for olds, news in zip(*groups, strict=True)
        for old, new in zip([old for old in olds if old in living], news, strict=False)
    }
    return members_by_number(staying, wanted.num_workers, numbers)


def members_by_number(staying: Sequence[Living], count: int, numbers: Mapping[int, int] | None = None) -> list[Living]:
    """Choose a member for each of the workers 0, ..., count - 1.

    Members keep their number, or get that of ``numbers``, and spares fill the numbers that are left. If there are too
    few spares for that, members are numbered anew from 0, in the order of their present numbers, spares last.

    Args:
        numbers: new number of a worker by its present one; None if numbers stay.

    Raises:
        PlanError: there are fewer members than workers.
    """
    if count > len(staying):
        raise PlanError(f"The plan needs {count} workers, but only {len(staying)} are there.")
    in_order = sorted(staying, key=lambda member: math.inf if member.worker is None else member.worker)
    workers = {member.worker: member for member in in_order if member.worker is not None}
    kept = workers if numbers is None else {new: workers[old] for old, new in numbers.items()}
    spares = iter([member for member in in_order if member.worker is None])
    members = [kept[worker] if worker in kept else next(spares, None) for worker in range(count)]
    return [member for member in members if member is not None] if None not in members else in_order[:count]


def _steps(members: Sequence[Living], copies: Sequence[Copy]) -> set[int]:
    return {member.step for member in members if member.step is not None} | {s for copy in copies for s in copy.steps}


def _sources(
    current: Layout, wanted: Layout, members: Sequence[Living], copies: Sequence[Copy], step: int
) -> dict[int, tuple[Copy, ...]] | None:
    """Return, by worker, the copies of this step that it has to load; workers that keep their state are left out.

    Returns None if some worker neither has the state of this step nor can load it from copies.
    """
    whole: tuple[Copy, ...] | None = None  # of all stages of the newest plan that has them
    for generation in sorted({copy.generation for copy in copies}, reverse=True):
        whole = whole or _all_stages([copy for copy in copies if copy.generation == generation], step)
    sources: dict[int, tuple[Copy, ...]] = {}
    for worker, member in enumerate(members):
        stages = wanted.stages_of(worker)
        if _keeps(current, wanted, member, stages, step):
            continue
        own = _of_stages([copy for copy in copies if copy.generation == wanted.generation], stages, step)
        if (taken := own or whole) is None:
            return None
        sources[worker] = taken
    return sources


def _keeps(current: Layout, wanted: Layout, member: Living, stages: tuple[int, ...], step: int) -> bool:
    """Return True if the member has the state of these stages of the wanted plan after this step."""
    same = current.generation == wanted.generation and member.worker is not None
    return same and member.step == step and current.stages_of(member.worker or 0) == stages


def _all_stages(copies: Sequence[Copy], step: int) -> tuple[Copy, ...] | None:
    """Return one copy of each piece of all stages, after this step; None if a piece has no such copy.

    Args:
        copies: copies of one plan; at least one.
    """
    return _of_stages(copies, range(copies[0].num_stages), step) or None


def _of_stages(copies: Sequence[Copy], stages: Iterable[int], step: int) -> tuple[Copy, ...] | None:
    """Return, for each piece of these stages, the first copy that has this step; None if a piece has no such copy."""
    chosen = [next((c for c in of_piece if step in c.steps), None) for of_piece in _by_piece(copies, stages)]
    whole = tuple(copy for copy in chosen if copy is not None)
    return whole if len(whole) == len(chosen) else None


def _by_piece(copies: Sequence[Copy], stages: Iterable[int]) -> Iterator[list[Copy]]:
    """Yield, for each piece of the state of these stages (see Copy), the list of its copies."""
    for stage in stages:
        here = [copy for copy in copies if copy.stage == stage]
        for piece in range(1 + max((copy.pieces for copy in here), default=0)):
            yield [copy for copy in here if copy.piece == piece]


def lacking(copies: Sequence[Copy]) -> str:
    """Describe which state of the newest plan is missing in all copies; "" if some step has copies of all stages."""
    newest = [copy for copy in copies if copy.generation == max(copy.generation for copy in copies)]
    if not newest:
        return "no worker has copies"
    for stage in range(newest[0].num_stages):
        for piece, of_piece in enumerate(_by_piece(newest, [stage])):
            if not any(copy.steps for copy in of_piece):
                whose = f"the slices of replica {piece - 1}" if piece else "the state"
                return f"no worker has a copy of {whose} of stage {stage}"
    common = any(_all_stages(newest, step) for step in _steps((), newest))
    return "" if common else "no step has copies of all stages"
