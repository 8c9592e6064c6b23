"""Lowered schedules (with messages and optimizer steps) as integer tables, for validation and every simulation.

Every action is a node. Nodes are numbered row after row, so that the actions of a worker form one range.
``dependencies()`` is called once per stage, operation and lane, not once per action, because it depends on distances
between micro-batches, never on their numbers. A schedule is rejected here if an action is on the wrong worker or occurs
twice, or waits for an action that no row contains.

A deadlock is found when the order of execution is (``CompiledRows``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import OF_UPDATES, OP_CODE, OPS, Action, Op, PackedRow, Row, Schedule, Wiring, dependencies
from raypipe.planner.compiled_rows import CompiledRows, DeadlockError, Ints

Columns = tuple[Ints, NDArray[np.int8], Ints]
"""Stage, operation (index into OPS) and micro-batch of each action of a row."""

NO_WAIT = -1

WAIT, WORK, SEND = range(3)
ROLE = np.full(len(OPS), WORK, dtype=np.int8)
ROLE[[OP_CODE[op] for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE_NORM)]] = WAIT
ROLE[[OP_CODE[op] for op in (Op.SEND_F, Op.SEND_B)]] = SEND
"""Place of an operation in its step, by code."""

# Members are singletons, so their ids distinguish them; hashing a member is many times slower.
_CODES = np.array(sorted(range(len(OPS)), key=lambda code: id(OPS[code])), dtype=np.int8)
_IDS = np.array([id(OPS[code]) for code in _CODES])
_IS_OF_UPDATES = np.array([op in OF_UPDATES for op in OPS])


@dataclass(frozen=True)
class Program:
    """Rows of all workers, their actions (nodes) numbered row after row, and their steps.

    Attributes:
        kind: name of the schedule.
        wiring: placement and update rules of the schedule.
        rows: columns of each worker's row.
        first: first node of each worker's row; one more entry for the end of the last row.
        needed: True for nodes that another node waits for.
        starts: True for nodes that begin a step.
        steps: the rows as steps, for simulation. Work and messages have the numbers stage * len(OPS) + op; the number
            after the last one means none.
    """

    kind: str
    wiring: Wiring
    rows: list[Columns]
    first: list[int]
    needed: NDArray[np.bool_]
    starts: NDArray[np.bool_]
    steps: CompiledRows

    @property
    def num_workers(self) -> int:
        return len(self.rows)

    def action(self, node: int) -> Action:
        return _action(self.rows, self.first, node)[1]

    def where(self, node: int) -> str:
        """Format an action for messages: ``2F0 (worker 2, position 0 of its row)``."""
        return _where(self.rows, self.first, node)

    def nodes_of(self, ops: Sequence[Op], least: int = 0) -> Iterator[tuple[int, int, int, Op, int]]:
        """Yield node, worker, stage, operation and micro-batch of the actions with these operations.

        Args:
            least: lowest micro-batch.
        """
        asked = np.array([op in ops for op in OPS])
        for worker, (stages, codes, microbatches) in enumerate(self.rows):
            at = np.flatnonzero(asked[codes] & (microbatches >= least))
            columns = (stages[at].tolist(), codes[at].tolist(), microbatches[at].tolist())
            for node, stage, code, microbatch in zip((at + self.first[worker]).tolist(), *columns, strict=True):
                yield node, worker, stage, OPS[code], microbatch

    def checked_steps(self) -> CompiledRows:
        """Return the steps, after a check that the workers can run all of them.

        Raises:
            ScheduleError: deadlock; names the next action of each stuck worker and what it waits for.
        """
        try:
            _ = self.steps.waves if self.steps.wide else self.steps.blocks
        except DeadlockError as stuck:
            raise ScheduleError(self._deadlock(stuck.at)) from None
        return self.steps

    def _deadlock(self, at: list[int]) -> str:
        steps, stuck = self.steps, []
        owner = np.repeat(np.arange(self.num_workers), np.diff(steps.first))
        # Steps that never run have no node.
        begin = np.append(np.flatnonzero(self.starts), self.first[-1])
        for w, step in enumerate(at):
            if step < steps.first[w + 1] - 1:
                source = int(steps.source[step])
                wanted = steps.groups[-2 - source].tolist() if source < 0 else [source]
                missing = next(one for one in wanted if one >= at[owner[one]])
                last = int(begin[missing - owner[missing] + 1]) - 1
                stuck.append(f"{self.where(int(begin[step - w]))} waits for {self.where(last)}")
        return (
            f"Deadlock, {len(stuck)} workers wait for each other: {'; '.join(stuck)}. "
            "Move the awaited actions ahead of the waiting ones in their own rows."
        )

    def peak_in_flight(self) -> tuple[int, ...]:
        """Return, by stage, the most micro-batches whose activations one of the stage's workers holds at once.

        A worker runs its row in order, so this does not depend on any cost. A stage without backward releases its input
        as soon as its forward ends.
        """
        change = np.zeros(len(OPS), dtype=np.int64)
        change[[OP_CODE[Op.F], OP_CODE[Op.W if self.wiring.split_backward else Op.B]]] = 1, -1
        peaks = []
        for stage, workers in enumerate(self.wiring.homes):
            peak = 0
            for worker in workers:
                stages, op, _ = self.rows[worker]
                peak = max(peak, int(np.cumsum(change[op[stages == stage]]).max(initial=0)))
            peaks.append(peak if stage >= self.wiring.first_trainable else min(peak, 1))
        return tuple(peaks)


def build(schedule: Schedule, repeats: int = 1) -> Program:
    """Build the tables of a lowered schedule with its body repeated.

    Raises:
        ScheduleError: an action sits on the wrong worker, occurs twice, or waits for an action that is
            missing or comes later in the same row.
    """
    rows = [_columns(schedule, worker, repeats) for worker in range(schedule.num_workers)]
    nodes = _Nodes(schedule.wiring, rows)
    return Program(schedule.kind, schedule.wiring, rows, nodes.first, nodes.needed, nodes.starts, nodes.steps())


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


def _slots_of(actions: Row, worker: int, wiring: Wiring, width: int) -> tuple[Ints, Ints]:
    """Return the slots (see ``_Nodes``) and micro-batches of the nodes of these actions.

    Args:
        actions: actions that a node of ``worker`` waits for.
        width: R in the number of a slot.
    """
    stage, op, microbatch = encode(actions)
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


def _columns(schedule: Schedule, worker: int, repeats: int) -> Columns:
    """Return the whole row of one worker (prologue, repeated body, epilogue); a row of one part is not copied."""
    parts = [(schedule.prologue[worker], 0)] if schedule.prologue else []
    parts += [(schedule.body[worker], i * schedule.stride) for i in range(repeats)]
    parts += [(schedule.epilogue[worker], repeats * schedule.stride)] if schedule.epilogue else []
    tables = {id(row): encode(row) for row, _ in parts}  # the body is encoded once, however often it repeats
    if len(parts) == 1:
        return tables[id(parts[0][0])]
    columns = [(*tables[id(row)][:2], tables[id(row)][2] + np.int32(shift)) for row, shift in parts]
    stage, op, microbatch = (np.concatenate(column) for column in zip(*columns, strict=True))
    return stage, op, microbatch


class _Nodes:
    """Dependencies between the nodes, found in a dense table from slot and micro-batch to node.

    A slot is the number (stage * len(OPS) + op) * R + r, where R is the largest number of replicas of a stage. r is the
    index of the replica for actions that end an update, which every replica has, and 0 for all others.

    Attributes:
        source: the node of another worker that each node waits for; NO_WAIT if it waits for none of them,
            ``-2 - g`` if it waits for several, which are group g.
        groups: number of each group, by the bytes of the array of its nodes.
    """

    def __init__(self, wiring: Wiring, rows: list[Columns]) -> None:
        self._wiring, self._rows, self._replicas = wiring, rows, max(wiring.replicas)
        self._by_lane = np.asarray(wiring.by_lane, dtype=np.int32)
        self.first = [*accumulate((len(op) for _, op, _ in rows), initial=0)]
        self._check_places()
        self._table = self._filled()
        self.needed, self.starts = (np.zeros(self.first[-1], dtype=np.bool_) for _ in range(2))
        self.source = np.full(self.first[-1], NO_WAIT, dtype=np.int32)
        self.groups: dict[bytes, int] = {}
        self._connect_all()
        del self._table

    def _where(self, node: int) -> str:
        return _where(self._rows, self.first, node)

    def _check_places(self) -> None:
        workers, wiring = self._by_lane, self._wiring
        if len(self._rows) <= workers.max():
            raise ScheduleError(
                f"The placement names worker {workers.max()}, but there are {len(self._rows)} rows: "
                "give every worker a row."
            )
        for first, (stage, _, _) in zip(self.first, self._rows, strict=False):
            unknown = np.flatnonzero((stage < 0) | (stage >= len(workers)))
            if len(unknown):
                raise ScheduleError(
                    f"{self._where(first + int(unknown[0]))} names a stage that does not exist: "
                    f"the placement lists stages 0 to {len(workers) - 1}."
                )
        for worker, (stage, op, microbatch) in enumerate(self._rows):
            home = workers[stage, wiring.lane_of(microbatch) if self._replicas > 1 else 0]
            strange = home != worker
            if self._replicas > 1:
                holds = np.array([worker in replicas for replicas in wiring.homes])
                strange &= ~(_IS_OF_UPDATES[op] & holds[stage])
            if strange.any():
                at = int(strange.argmax())
                its = "this micro-batch of stage {} belongs to" if self._replicas > 1 else "stage {} is placed on"
                raise ScheduleError(
                    f"{self._where(self.first[worker] + at)} is on the wrong worker: {its.format(stage[at])} worker "
                    f"{home[at]}; move it to row {home[at]}."
                )

    def _filled(self) -> Ints:
        """Return the table of nodes by slot and micro-batch; -1 if no row has the action."""
        width = 1 + max((int(microbatch.max(initial=-1)) for _, _, microbatch in self._rows), default=-1)
        slots = self._wiring.num_stages * len(OPS) * self._replicas
        table = np.full((slots, width), -1, dtype=np.int32)
        flat = table.reshape(-1)
        for worker, (stage, op, microbatch) in enumerate(self._rows):
            slot = stage * len(OPS) + op
            if self._replicas > 1:
                places = [replicas.index(worker) if worker in replicas else 0 for replicas in self._wiring.homes]
                slot = slot * self._replicas + np.where(_IS_OF_UPDATES[op], np.array(places)[stage], 0)
            at = slot.astype(np.int64) * width + microbatch
            own = np.arange(self.first[worker], self.first[worker + 1], dtype=np.int32)
            flat[at] = own
            again = flat[at] != own
            if again.any():
                one = int(again.argmax())
                raise ScheduleError(
                    f"{self._where(int(flat[at[one]]))} is there twice, also as {self._where(int(own[one]))}: drop one."
                )
        return table

    def _connect_all(self) -> None:
        """Look up what the nodes of each slot and lane wait for."""
        wiring, (_, width) = self._wiring, self._table.shape
        number = np.arange(width)
        lane_of = wiring.lane_of(number) if self._replicas > 1 else np.zeros_like(number)
        by_lane = [np.flatnonzero(lane_of == lane) for lane in range(wiring.lanes if self._replicas > 1 else 1)]
        unmet = []
        for slot in np.flatnonzero(self._table.max(axis=1, initial=-1) >= 0).tolist():
            kind, replica = divmod(slot, self._replicas)
            stage, op = divmod(kind, len(OPS))
            for lane, microbatches in enumerate(by_lane):
                nodes = self._table[slot] if len(by_lane) == 1 else self._table[slot, microbatches]
                there = None if nodes.min(initial=0) >= 0 else np.flatnonzero(nodes >= 0)
                answer = dependencies(Action(stage, OPS[op], lane), wiring)
                if not answer or (there is not None and not len(there)):
                    continue
                if there is not None:
                    nodes, microbatches = nodes[there], microbatches[there]
                worker = wiring.homes[stage][replica] if _IS_OF_UPDATES[op] else int(self._by_lane[stage, lane])
                slots, others = _slots_of(answer, worker, wiring, self._replicas)
                sources = self._find(slots, microbatches, others - lane)
                foreign = (sources < self.first[worker]) | (sources >= self.first[worker + 1])
                missing = (sources < 0) | (~foreign & (sources >= nodes[:, None]))
                if missing.any():
                    lacking = np.flatnonzero(missing.any(axis=1))
                    i = int(lacking[nodes[lacking].argmin()])
                    j = int(missing[i].argmax())
                    awaited, code = divmod(int(slots[j]) // self._replicas, len(OPS))
                    wanted = Action(awaited, OPS[code], int(microbatches[i] + others[j] - lane))
                    unmet.append((len(slots), int(nodes[i]), int(sources[i, j]), wanted))
                else:
                    self._connect(nodes, sources, foreign, ROLE[slots // self._replicas % len(OPS)] != SEND)
        if unmet:
            _, node, source, wanted = min(unmet)
            raise ScheduleError(self._explain_unmet(node, wanted, source))

    def _find(self, slots: Ints, microbatches: NDArray[np.intp], shift: Ints) -> Ints:
        """Look up nodes: [i, j] is that of slots[j] and microbatches[i] + shift[j]; -1 if no row has such a node."""
        width = self._table.shape[1]
        if not shift.any():  # most are about their own micro-batch
            return (self._table[slots] if len(microbatches) == width else self._table[slots[:, None], microbatches]).T
        wanted = microbatches[:, None] + shift
        inside = (wanted >= 0) & (wanted < width)
        nodes: Ints = np.where(inside, self._table[slots, np.where(inside, wanted, 0)], np.int32(-1))
        return nodes

    def _connect(self, nodes: Ints, sources: Ints, foreign: NDArray[np.bool_], ending: NDArray[np.bool_]) -> None:
        """Store which nodes of other workers each of ``nodes`` waits for.

        Args:
            sources: awaited nodes, a row per node and a column per wait.
            foreign: True for awaited nodes of other workers; the others need no wait, because they are earlier in the
                row.
            ending: by column, True if the wait is for no message: the awaited node is then the last one of its step.
        """
        self.needed[sources] = True
        if not foreign.any():
            return
        number = foreign.sum(axis=1)
        single = number == 1
        self.source[nodes[single]] = sources[single][foreign[single]]
        awaited = [sources[:, ending][foreign[:, ending]]] if ending.any() else []
        for i in np.flatnonzero(number > 1).tolist():
            group = np.ascontiguousarray(sources[i])
            self.source[nodes[i]] = -2 - self.groups.setdefault(group.tobytes(), len(self.groups))
            awaited.append(group)
        for each in awaited:
            self.starts[each[each + 1 < len(self.starts)] + 1] = True

    def steps(self) -> CompiledRows:
        """Split the rows into steps.

        The first node of a row begins a step. A later node does so in three cases: its role does not come after the
        role of the previous node in the sequence WAIT, WORK, SEND; or its role is WORK and it has to wait (REDUCE_GRAD
        of a replica); or a node of another worker waits for the previous node, which is no SEND.
        """
        of, first = np.empty(len(self.source), dtype=np.int32), [0]
        for op, own in self._parts():
            role, starts = ROLE[op], self.starts[own]
            starts[:1] = True
            starts[1:] |= role[1:] <= role[:-1]
            starts |= (role == WORK) & (self.source[own] != NO_WAIT)
            of[own] = np.cumsum(starts, dtype=np.int32) + np.int32(first[-1] - 1)
            first.append(first[-1] + int(np.count_nonzero(starts)) + 1)
        count, none = first[-1] + 1, self._wiring.num_stages * len(OPS)
        workers = len(self._rows)
        source = np.full(count, count - 1, dtype=np.int32)
        small = np.dtype(np.int16 if none < 1 << 15 else np.int32)
        work, message = (np.full(count, none, dtype=small) for _ in range(2))
        link, untimed = np.zeros(count, dtype=np.int32), []
        for worker, (op, own) in enumerate(self._parts()):
            stage, _, microbatch = self._rows[worker]
            source[first[worker + 1] - 1] = first[worker + 1] - 1
            link[first[worker] : first[worker + 1]] = workers**2 + worker
            role, mine, kind = ROLE[op], of[own], stage * np.int32(len(OPS)) + op
            waiting = np.flatnonzero(self.source[own] != NO_WAIT)
            awaited = self.source[own][waiting]
            source[mine[waiting]] = np.where(awaited >= 0, of[awaited], awaited)
            untimed += mine[waiting[role[waiting] == WORK]].tolist()
            works, sends = np.flatnonzero(role == WORK), np.flatnonzero(role == SEND)
            work[mine[works]], message[mine[sends]] = kind[works], kind[sends]
            ahead = np.where(op[sends] == OP_CODE[Op.SEND_F], np.int32(1), np.int32(-1))
            lane = self._wiring.lane_of(microbatch[sends]) if self._replicas > 1 else 0
            peer = self._by_lane[np.clip(stage[sends] + ahead, 0, len(self._by_lane) - 1), lane]
            link[mine[sends]] = worker * workers + peer
        groups = tuple(of[np.frombuffer(nodes, dtype=np.int32)] for nodes in self.groups)
        return CompiledRows(first, source, groups, untimed, work, message, link, workers**2)

    def _parts(self) -> Iterator[tuple[NDArray[np.int8], slice]]:
        """Yield the operations of each row, and its range of nodes."""
        for (_, op, _), (first, stop) in zip(self._rows, pairwise(self.first), strict=True):
            yield op, slice(first, stop)

    def _explain_unmet(self, node: int, wanted: Action, source: int) -> str:
        _, action = _action(self._rows, self.first, node)
        if source < 0:
            return f"{self._where(node)} waits for {wanted}, which no row contains: add {wanted} or remove {action}."
        return (
            f"{self._where(node)} waits for {self._where(source)}, later in its own row: "
            f"move {_action(self._rows, self.first, source)[1]} ahead of it."
        )


def _action(rows: Sequence[Columns], first: list[int], node: int) -> tuple[int, Action]:
    """Return the worker of a node, and its action."""
    worker = int(np.searchsorted(first, node, side="right")) - 1
    stage, op, microbatch = (column[node - first[worker]] for column in rows[worker])
    return worker, Action(int(stage), OPS[op], int(microbatch))


def _where(rows: Sequence[Columns], first: list[int], node: int) -> str:
    worker, action = _action(rows, first, node)
    return f"{action} (worker {worker}, position {node - first[worker]} of its row)"
