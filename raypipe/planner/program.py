"""A lowered schedule as integer tables: who waits for whom, looked up instead of derived.

Nodes are numbered row after row, so everything one worker does lies in one range, and "has it ended?"
is one comparison with how far that worker has come. ``dependencies()`` is asked once per stage and
operation, not once per action: it looks at distances between micro-batches, never at their numbers.

A schedule that cannot be wired up (an action on the wrong worker, twice, or waiting for something that
no row contains) is refused here; a deadlock when ``blocks()`` looks for an order to run it in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op, Row, Schedule, Wiring, dependencies

__all__ = ["BARRIER", "NO_WAIT", "OPS", "OP_CODE", "Ints", "Program", "build"]

Ints = NDArray[np.int64]

NO_WAIT = -1
BARRIER = -2

OPS = tuple(Op)
OP_CODE = {op: code for code, op in enumerate(OPS)}
# Members are singletons, so their ids tell them apart; hashing a member is many times slower.
_CODES = np.array(sorted(range(len(OPS)), key=lambda code: id(OPS[code])))
_IDS = np.array([id(OPS[code]) for code in _CODES])


@dataclass(frozen=True, slots=True)
class Program:
    """The rows of all workers, one behind the other.

    Attributes:
        wiring: of the schedule.
        first: first node of each worker's row; one more entry for the end of the last row.
        worker, stage, op, microbatch: by node; op by ``OP_CODE``.
        source: by node, the one node of another worker that it waits for, NO_WAIT, or BARRIER.
        barriers: for the nodes marked BARRIER, all nodes of other workers that they wait for.
        needed: by node, whether any other action waits for it.
    """

    wiring: Wiring
    first: list[int]
    worker: Ints
    stage: Ints
    op: Ints
    microbatch: Ints
    source: Ints
    barriers: dict[int, tuple[int, ...]]
    needed: NDArray[np.bool_]

    @property
    def num_workers(self) -> int:
        return len(self.first) - 1

    def action(self, node: int) -> Action:
        return Action(int(self.stage[node]), OPS[self.op[node]], int(self.microbatch[node]))

    def where(self, node: int) -> str:
        """``2F0 (worker 2, position 0 of its row)``: how messages name an action."""
        worker = int(self.worker[node])
        return f"{self.action(node)} (worker {worker}, position {node - self.first[worker]} of its row)"

    def blocks(self) -> list[tuple[int, int, int]]:
        """An order in which everything can run: (worker, first node, node after the last) without a wait inside.

        Raises:
            ScheduleError: deadlock; names the action at which each stuck worker stands and what it waits for.
        """
        owner, source, barriers = self.worker.tolist(), self.source.tolist(), self.barriers
        at, end = self.first[:-1], self.first[1:]
        waits = np.flatnonzero(self.source != NO_WAIT)
        cuts = np.searchsorted(waits, self.first)
        gates = [[*waits[cuts[w] : cuts[w + 1]].tolist(), end[w]] for w in range(self.num_workers)]
        passed = [0] * self.num_workers
        sleepers: list[list[int]] = [[] for _ in range(self.num_workers)]
        blocks: list[tuple[int, int, int]] = []
        ready = deque(range(self.num_workers))
        while ready:
            w = ready.popleft()
            stop, mine, i = end[w], gates[w], passed[w]
            while (gate := mine[i]) < stop:
                blocker = source[gate]
                if blocker == BARRIER:
                    blocker = next((node for node in barriers[gate] if node >= at[owner[node]]), NO_WAIT)
                if blocker != NO_WAIT and blocker >= at[owner[blocker]]:
                    sleepers[owner[blocker]].append(w)
                    break
                i += 1
            passed[w] = i
            if gate > at[w]:
                blocks.append((w, at[w], gate))
                at[w] = gate
                ready.extend(sleepers[w])
                sleepers[w].clear()
        if at != end:
            raise ScheduleError(self._deadlock(at))
        return blocks

    def _deadlock(self, at: list[int]) -> str:
        stuck = []
        for w, node in enumerate(at):
            if node < self.first[w + 1]:
                wanted = self.barriers.get(node, (int(self.source[node]),))
                missing = next(d for d in wanted if d >= at[self.worker[d]])
                stuck.append(f"{self.where(node)} waits for {self.where(missing)}")
        return (
            f"Deadlock, {len(stuck)} workers wait for each other: {'; '.join(stuck)}. "
            "Move the awaited actions ahead of the waiting ones in their own rows."
        )

    def peak_in_flight(self) -> tuple[int, ...]:
        """Most micro-batches whose activations each stage holds at once.

        A worker runs its row in order, so this does not depend on any cost. A stage without backward
        lets go of its input as soon as its forward ends.
        """
        release = OP_CODE[Op.W if self.wiring.split_backward else Op.B]
        change = (self.op == OP_CODE[Op.F]).astype(np.int64) - (self.op == release)
        peaks = []
        for stage, worker in enumerate(self.wiring.placement):
            row = slice(self.first[worker], self.first[worker + 1])
            held = np.cumsum(change[row][self.stage[row] == stage])
            peak = int(held.max(initial=0))
            peaks.append(peak if stage >= self.wiring.first_trainable else min(peak, 1))
        return tuple(peaks)


def build(schedule: Schedule, repeats: int = 1) -> Program:
    """The tables of a lowered schedule with its body repeated.

    Raises:
        ScheduleError: an action sits on the wrong worker, occurs twice, or waits for an action that is
            missing or comes later in the same row.
    """
    wiring = schedule.wiring
    flat = _flatten(schedule, repeats)
    program = Program(
        wiring,
        *flat,
        source=np.full(len(flat[1]), NO_WAIT, dtype=np.int64),
        barriers={},
        needed=np.zeros(len(flat[1]), dtype=np.bool_),
    )
    _check_places(program)
    slots = _Slots(program)
    slots.check_unique()
    for nodes, wanted in _questions(program):
        _connect(program, nodes, wanted, slots.find(wanted))
    return program


def _questions(program: Program) -> Iterator[tuple[Ints, Ints]]:
    """Nodes and what they wait for: (stage, op, micro-batch) by node and by wait; nodes with as many waits together."""
    kinds, kind_of = np.unique(program.stage * len(OPS) + program.op, return_inverse=True)
    at_zero = [Action(int(kind) // len(OPS), OPS[kind % len(OPS)], 0) for kind in kinds]
    answers = [dependencies(action, program.wiring) for action in at_zero]
    counts = np.array([len(answer) for answer in answers], dtype=np.int64)
    for count in np.unique(counts[counts > 0]).tolist():
        alike = np.flatnonzero(counts == count)
        place = np.zeros(len(kinds), dtype=np.int64)
        place[alike] = np.arange(len(alike))
        table = _encode(tuple(chain.from_iterable(answers[kind] for kind in alike))).reshape(3, len(alike), count)
        nodes = np.flatnonzero(counts[kind_of] == count)
        wanted = table[:, place[kind_of[nodes]]]
        wanted[2] += program.microbatch[nodes, None]
        yield nodes, wanted


def _flatten(schedule: Schedule, repeats: int) -> tuple[list[int], Ints, Ints, Ints, Ints]:
    """First node of each row, then by node: worker, stage, op, micro-batch."""
    first, columns = [0], []
    for worker in range(schedule.num_workers):
        parts = [(schedule.prologue[worker], 0)] if schedule.prologue else []
        parts += [(schedule.body[worker], i * schedule.stride) for i in range(repeats)]
        parts += [(schedule.epilogue[worker], repeats * schedule.stride)] if schedule.epilogue else []
        tables = {id(row): _encode(row) for row, _ in parts}  # the body is encoded once, however often it repeats
        columns += [tables[id(row)] + np.array([[0], [0], [shift]]) for row, shift in parts]
        first.append(first[-1] + sum(len(row) for row, _ in parts))
    stage, op, microbatch = np.concatenate(columns, axis=1)
    worker_of = np.repeat(np.arange(schedule.num_workers), np.diff(first))
    return first, worker_of, stage, op, microbatch


def _encode(row: Row) -> Ints:
    """The row as three lines of numbers: stage, op, micro-batch."""
    ids = np.fromiter(map(id, map(itemgetter(1), row)), np.int64, len(row))
    place = np.minimum(np.searchsorted(_IDS, ids), len(OPS) - 1)
    if (_IDS[place] != ids).any():
        odd = row[int(np.argmax(_IDS[place] != ids))]
        raise ScheduleError(
            f"{odd!r} has an operation that is no member of Op: write Op.F, or let parse_action() read it."
        )
    stage, microbatch = (np.fromiter(map(itemgetter(i), row), np.int64, len(row)) for i in (0, 2))
    return np.stack([stage, _CODES[place], microbatch])


def _connect(program: Program, nodes: Ints, wanted: Ints, found: Ints) -> None:
    """Note what ``nodes`` wait for: ``found`` has a line per node and a column per wait."""
    foreign = program.worker[found] != program.worker[nodes, None]
    unmet = (found < 0) | (~foreign & (found >= nodes[:, None]))
    if unmet.any():
        i, j = np.argwhere(unmet)[0].tolist()
        stage, op, microbatch = wanted[:, i, j].tolist()
        raise ScheduleError(
            _explain_unmet(program, int(nodes[i]), Action(stage, OPS[op], microbatch), int(found[i, j]))
        )
    program.needed[found] = True
    # What the own row did earlier has ended; only other workers can make this one wait.
    number = foreign.sum(axis=1)
    single = number == 1
    program.source[nodes[single]] = found[single][foreign[single]]
    program.source[nodes[number > 1]] = BARRIER
    for i in np.flatnonzero(number > 1).tolist():
        program.barriers[int(nodes[i])] = tuple(found[i, foreign[i]].tolist())


class _Slots:
    """Finds a node by stage, operation and micro-batch: a dense table instead of a dictionary of tuples."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._width = int(program.microbatch.max(initial=-1)) + 1
        self._key = (program.stage * len(OPS) + program.op) * self._width + program.microbatch
        self._node = np.full(program.wiring.num_stages * len(OPS) * self._width, -1, dtype=np.int64)
        self._node[self._key] = np.arange(len(self._key))

    def check_unique(self) -> None:
        hidden = np.flatnonzero(self._node[self._key] != np.arange(len(self._key)))
        if len(hidden):
            one, other = int(hidden[0]), int(self._node[self._key[hidden[0]]])
            raise ScheduleError(
                f"{self._program.where(other)} is there twice, also as {self._program.where(one)}: drop one."
            )

    def find(self, wanted: Ints) -> Ints:
        """The node of each (stage, op, micro-batch); -1 where there is none."""
        stage, op, microbatch = wanted
        inside = (microbatch >= 0) & (microbatch < self._width)
        key = (stage * len(OPS) + op) * self._width + microbatch
        return np.where(inside, self._node[np.where(inside, key, 0)], -1)


def _check_places(program: Program) -> None:
    placement = np.asarray(program.wiring.placement)
    if program.num_workers <= placement.max():
        raise ScheduleError(
            f"The placement names worker {placement.max()}, but there are {program.num_workers} rows: "
            "give every worker a row."
        )
    unknown = np.flatnonzero((program.stage < 0) | (program.stage >= len(placement)))
    if len(unknown):
        raise ScheduleError(
            f"{program.where(unknown[0])} names a stage that does not exist: "
            f"the placement lists stages 0 to {len(placement) - 1}."
        )
    strangers = np.flatnonzero(placement[program.stage] != program.worker)
    if len(strangers):
        stage = program.stage[strangers[0]]
        raise ScheduleError(
            f"{program.where(strangers[0])} is on the wrong worker: stage {stage} is placed on worker "
            f"{placement[stage]}; move it to row {placement[stage]}."
        )


def _explain_unmet(program: Program, node: int, wanted: Action, found: int) -> str:
    action = program.action(node)
    if found < 0:
        return f"{program.where(node)} waits for {wanted}, which no row contains: add {wanted} or remove {action}."
    return (
        f"{program.where(node)} waits for {program.where(found)}, later in its own row: "
        f"move {program.action(found)} ahead of it."
    )
