"""Dependencies between the actions of a lowered schedule as integer tables, for simulation and validation.

Every action is a node. Nodes are numbered row after row, so that the actions of a worker form one range, and one
comparison with the worker's progress shows whether an action has ended. ``dependencies()`` is called once per stage,
operation and lane, not once per action, because it depends on distances between micro-batches, never on their numbers.

A schedule is rejected here if an action is on the wrong worker or occurs twice, or waits for an action that no row
contains. A deadlock is found when ``blocks()`` searches for an order of execution.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import OF_UPDATES, OP_CODE, OPS, Action, Op, PackedRow, Row, Schedule, Wiring, dependencies

Ints = NDArray[np.int32]

NO_WAIT = -1
BARRIER = -2

# Members are singletons, so their ids distinguish them; hashing a member is many times slower.
_CODES = np.array(sorted(range(len(OPS)), key=lambda code: id(OPS[code])), dtype=np.int8)
_IDS = np.array([id(OPS[code]) for code in _CODES])
_IS_OF_UPDATES = np.array([op in OF_UPDATES for op in OPS])


@dataclass(frozen=True, slots=True)
class Program:
    """Rows of all workers as tables with one entry per node (action), row after row.

    Attributes:
        wiring: wiring of the schedule.
        first: first node of each worker's row; one more entry for the end of the last row.
        worker, stage, op, microbatch: numbers of each node; op is an ``OP_CODE``.
        source: the node of another worker that a node waits for; NO_WAIT if it waits for none of them, BARRIER if for
            several.
        barriers: for each node marked BARRIER, all nodes of other workers that it waits for.
        needed: True for nodes that another node waits for.
    """

    wiring: Wiring
    first: list[int]
    worker: Ints
    stage: Ints
    op: NDArray[np.int8]
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
        """Format an action for messages: ``2F0 (worker 2, position 0 of its row)``."""
        worker = int(self.worker[node])
        return f"{self.action(node)} (worker {worker}, position {node - self.first[worker]} of its row)"

    def blocks(self) -> list[tuple[int, int, int]]:
        """Return an order in which all nodes can run, as blocks of nodes of one worker.

        A block (worker, first node, node after the last) waits only for earlier blocks, so it runs without a pause.

        Raises:
            ScheduleError: deadlock; names the next action of each stuck worker and what it waits for.
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
        """Return, by stage, the most micro-batches whose activations one of the stage's workers holds at once.

        A worker runs its row in order, so this does not depend on any cost. A stage without backward releases its input
        as soon as its forward ends.
        """
        release = OP_CODE[Op.W if self.wiring.split_backward else Op.B]
        change = (self.op == OP_CODE[Op.F]).astype(np.int64) - (self.op == release)
        peaks = []
        for stage, workers in enumerate(self.wiring.homes):
            peak = 0
            for worker in workers:
                row = slice(self.first[worker], self.first[worker + 1])
                resident = np.cumsum(change[row][self.stage[row] == stage])
                peak = max(peak, int(resident.max(initial=0)))
            peaks.append(peak if stage >= self.wiring.first_trainable else min(peak, 1))
        return tuple(peaks)


def build(schedule: Schedule, repeats: int = 1) -> Program:
    """Build the tables of a lowered schedule with its body repeated.

    Raises:
        ScheduleError: an action sits on the wrong worker, occurs twice, or waits for an action that is
            missing or comes later in the same row.
    """
    flat = _flatten(schedule, repeats)
    program = Program(
        schedule.wiring,
        *flat,
        source=np.full(len(flat[1]), NO_WAIT, dtype=np.int32),
        barriers={},
        needed=np.zeros(len(flat[1]), dtype=np.bool_),
    )
    _check_places(program)
    slots = _Slots(program)
    slots.check_unique()
    unmet = []
    for nodes, kinds, wanted in _questions(program):
        sources = slots.find(kinds, wanted)
        foreign = program.worker[sources] != program.worker[nodes, None]
        missing = (sources < 0) | (~foreign & (sources >= nodes[:, None]))
        if missing.any():
            i, j = np.argwhere(missing)[0].tolist()
            kind = int(kinds[j]) // max(program.wiring.replicas)
            unmet.append((len(kinds), int(nodes[i]), kind, int(wanted[i, j]), int(sources[i, j])))
        else:
            _connect(program, nodes, sources, foreign)
    if unmet:
        raise ScheduleError(_explain_unmet(program, *min(unmet)[1:]))
    return program


def encode(row: Row) -> tuple[Ints, NDArray[np.int8], Ints]:
    """Return stage, operation (index into OPS) and micro-batch of every action; read-only.

    Raises:
        ScheduleError: an operation is not a member of Op.
    """
    if isinstance(row, PackedRow):
        return (
            np.frombuffer(row.stage, np.int32),
            np.frombuffer(row.op, np.int8),
            np.frombuffer(row.microbatch, np.int32),
        )
    stage, ops, microbatch = zip(*row, strict=True) if row else ((), (), ())
    ids = np.fromiter(map(id, ops), np.int64, len(row))
    place = np.minimum(np.searchsorted(_IDS, ids), len(OPS) - 1)
    if (_IDS[place] != ids).any():
        odd = row[int(np.argmax(_IDS[place] != ids))]
        raise ScheduleError(
            f"{odd!r} has an operation that is no member of Op: write Op.F, or let parse_action() read it."
        )
    return np.array(stage, dtype=np.int32), _CODES[place], np.array(microbatch, dtype=np.int32)


def pack(stage: NDArray[np.integer], op: NDArray[np.integer], microbatch: NDArray[np.integer]) -> PackedRow:
    """Make a row from the arrays that ``encode`` returns."""
    columns = (("i", np.int32, stage), ("b", np.int8, op), ("i", np.int32, microbatch))
    return PackedRow(*(array(code, column.astype(kind).tobytes()) for code, kind, column in columns))


def _questions(program: Program) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield the nodes of each worker, stage, operation and lane, with the actions that they wait for.

    Yields:
        nodes, shape (nodes,); slots (see ``_Slots``) of the actions that each of them waits for, shape (waits,); and
        micro-batches of these actions, shape (nodes, waits).
    """
    wiring = program.wiring
    lanes = wiring.lanes if wiring.replicated else 1
    for worker, (first, stop) in enumerate(pairwise(program.first)):
        kind_of = program.stage[first:stop] * len(OPS) + program.op[first:stop]
        if lanes > 1:
            kind_of = kind_of * lanes + wiring.lane_of(program.microbatch[first:stop])
        for code in np.flatnonzero(np.bincount(kind_of)).tolist():
            kind, lane = divmod(code, lanes)
            answer = dependencies(Action(kind // len(OPS), OPS[kind % len(OPS)], lane), wiring)
            if answer:
                slots, microbatches = _slots_of(answer, worker, wiring)
                nodes = (np.flatnonzero(kind_of == code) + first).astype(np.int32)
                yield nodes, slots, program.microbatch[nodes, None] + (microbatches - lane)


def _slots_of(actions: Row, worker: int, wiring: Wiring) -> tuple[Ints, Ints]:
    """Return the slots (see ``_Slots``) and micro-batches of actions that a node of this worker waits for."""
    stage, op, microbatch = encode(actions)
    width = max(wiring.replicas)
    slots = (stage * len(OPS) + op) * width
    if width == 1 or not _IS_OF_UPDATES[op].any():
        return slots, microbatch
    places = []
    for s, o in zip(stage.tolist(), op.tolist(), strict=True):
        workers = wiring.homes[s]
        mine = [workers.index(worker)] if worker in workers else range(len(workers))
        places.append(mine if _IS_OF_UPDATES[o] else [0])
    times = np.array([len(each) for each in places])
    within = np.array([place for each in places for place in each], dtype=np.int32)
    return np.repeat(slots, times) + within, np.repeat(microbatch, times)


def _flatten(schedule: Schedule, repeats: int) -> tuple[list[int], Ints, Ints, NDArray[np.int8], Ints]:
    """Return the first node of each row, then by node: worker, stage, op, micro-batch."""
    first = [0]
    stages, ops, microbatches = [], [], []
    for worker in range(schedule.num_workers):
        parts = [(schedule.prologue[worker], 0)] if schedule.prologue else []
        parts += [(schedule.body[worker], i * schedule.stride) for i in range(repeats)]
        parts += [(schedule.epilogue[worker], repeats * schedule.stride)] if schedule.epilogue else []
        tables = {id(row): encode(row) for row, _ in parts}  # the body is encoded once, however often it repeats
        for row, shift in parts:
            stage, op, microbatch = tables[id(row)]
            stages.append(stage)
            ops.append(op)
            microbatches.append(microbatch + shift if shift else microbatch)
        first.append(first[-1] + sum(len(row) for row, _ in parts))
    worker_of = np.repeat(np.arange(schedule.num_workers, dtype=np.int32), np.diff(first))
    return first, worker_of, np.concatenate(stages), np.concatenate(ops), np.concatenate(microbatches)


def _connect(program: Program, nodes: Ints, sources: Ints, foreign: NDArray[np.bool_]) -> None:
    """Store the waits of ``nodes``: ``sources`` has a row per node and a column per wait."""
    program.needed[sources] = True
    # Earlier actions of the same row have ended: only actions of other workers are waited for.
    number = foreign.sum(axis=1)
    single = number == 1
    program.source[nodes[single]] = sources[single][foreign[single]]
    program.source[nodes[number > 1]] = BARRIER
    for i in np.flatnonzero(number > 1).tolist():
        program.barriers[int(nodes[i])] = tuple(sources[i, foreign[i]].tolist())


class _Slots:
    """Dense table from slot and micro-batch to node.

    A slot is the number (stage * len(OPS) + op) * R + r, where R is the largest number of replicas of a stage. r is the
    index of the replica for actions that end an update, which every replica has, and 0 for all others.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._replicas = max(program.wiring.replicas)
        self._width = int(program.microbatch.max(initial=-1)) + 1
        self._slot = (program.stage * len(OPS) + program.op) * self._replicas + _replica_of(program)
        slots = program.wiring.num_stages * len(OPS) * self._replicas
        self._node = np.full((slots, self._width), -1, dtype=np.int32)
        self._node[self._slot, program.microbatch] = np.arange(len(program.op))

    def check_unique(self) -> None:
        program = self._program
        seen = self._node[self._slot, program.microbatch]
        hidden = np.flatnonzero(seen != np.arange(len(program.op)))
        if len(hidden):
            one, other = int(hidden[0]), int(seen[hidden[0]])
            raise ScheduleError(f"{program.where(other)} is there twice, also as {program.where(one)}: drop one.")

    def find(self, slots: Ints, microbatch: Ints) -> Ints:
        """Return the node of each slot (by column) and micro-batch; -1 if it does not exist."""
        inside = (microbatch >= 0) & (microbatch < self._width)
        nodes: Ints = np.where(inside, self._node[slots, np.where(inside, microbatch, 0)], np.int32(-1))
        return nodes


def _replica_of(program: Program) -> Ints:
    """Return, by node, the index of its worker among its stage's replicas if the action ends an update; else 0."""
    index = np.zeros(len(program.op), dtype=np.int32)
    if program.wiring.replicated:
        replica = np.zeros((program.wiring.num_stages, program.num_workers), dtype=np.int32)
        for stage, workers in enumerate(program.wiring.homes):
            replica[stage, list(workers)] = np.arange(len(workers))
        ending = _IS_OF_UPDATES[program.op]
        index[ending] = replica[program.stage[ending], program.worker[ending]]
    return index


def _check_places(program: Program) -> None:
    workers = np.asarray(program.wiring.by_lane)
    if program.num_workers <= workers.max():
        raise ScheduleError(
            f"The placement names worker {workers.max()}, but there are {program.num_workers} rows: "
            "give every worker a row."
        )
    unknown = np.flatnonzero((program.stage < 0) | (program.stage >= len(workers)))
    if len(unknown):
        raise ScheduleError(
            f"{program.where(unknown[0])} names a stage that does not exist: "
            f"the placement lists stages 0 to {len(workers) - 1}."
        )
    home = workers[program.stage, program.wiring.lane_of(program.microbatch)]
    right_place = home == program.worker
    if program.wiring.replicated:
        holds = np.zeros((len(workers), program.num_workers), dtype=np.bool_)
        for stage, replicas in enumerate(program.wiring.homes):
            holds[stage, list(replicas)] = True
        right_place |= _IS_OF_UPDATES[program.op] & holds[program.stage, program.worker]
    strangers = np.flatnonzero(~right_place)
    if len(strangers):
        stage, right = program.stage[strangers[0]], home[strangers[0]]
        its = "this micro-batch of stage {} belongs to" if program.wiring.replicated else "stage {} is placed on"
        raise ScheduleError(
            f"{program.where(strangers[0])} is on the wrong worker: {its.format(stage)} worker "
            f"{right}; move it to row {right}."
        )


def _explain_unmet(program: Program, node: int, kind: int, microbatch: int, source: int) -> str:
    action, wanted = program.action(node), Action(kind // len(OPS), OPS[kind % len(OPS)], microbatch)
    if source < 0:
        return f"{program.where(node)} waits for {wanted}, which no row contains: add {wanted} or remove {action}."
    return (
        f"{program.where(node)} waits for {program.where(source)}, later in its own row: "
        f"move {program.action(source)} ahead of it."
    )
