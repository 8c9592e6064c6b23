"""Replay of a schedule: the seconds of one step, with separate seconds for every message.

``planner.simulator`` gives every message of a hop the same seconds. Here each message has its own, taken in turn from
measured ones. All candidates get the same sequence, so that results differ by the schedule only, not by chance.

Rows need not be lowered first: a message leaves when its action ends, and is waited for when it is needed. With equal
messages the result equals ``makespan_s`` bit for bit (tests/planner/test_replay.py). Overlapping steps are
replayed in sequence, and the result is the time that each adds to the run.

A hop between stages with replicas has several links (``Routes``). Each keeps its messages in order, both ways:

    stages 2-1, lanes 2       link 0: worker 0 - 2, micro-batches 0 2 4 ...       link 1: worker 1 - 2, 1 3 5 ...
    stages 1-1-1              link 0: worker 0 - 1, all micro-batches             link 1: worker 1 - 2, all
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.schedule import OP_CODE, OPS, Homes, Op, Wiring
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.compiled_rows import CompiledRows, Seconds, run
from raypipe.planner.dependency_tables import encode
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.simulator import Costs


@dataclass(frozen=True, slots=True)
class Routes:
    """Links of a synchronous schedule with one stage on each worker, and the micro-batches that cross them.

    Attributes:
        homes: workers by stage.
        lanes: number of lanes, L; micro-batch m of a step belongs to lane m % L.
        workers: worker by stage and lane, as in ``Wiring.by_lane``.
        ends: by link, (hop, worker of the lower stage, worker of the higher stage); sorted by hop.
        by_lane: by hop and lane, (link, number of earlier lanes on that link, number of all lanes on that link).
    """

    homes: Homes
    lanes: int
    workers: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int, int], ...]
    by_lane: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stage of each worker."""
        return tuple(stage for stage, workers in enumerate(self.homes) for _ in workers)

    @property
    def hops(self) -> tuple[int, ...]:
        """Hop of each link."""
        return tuple(hop for hop, _, _ in self.ends)

    def links_of(self, hop: int) -> list[int]:
        """List the links that join stage hop to stage hop + 1."""
        return [link for link, (at, _, _) in enumerate(self.ends) if at == hop]

    def name(self, link: int) -> str:
        """Name a link by its stages; by its workers too if the hop has several links."""
        hop, source, target = self.ends[link]
        return f"link {hop} - {hop + 1}" + f" (workers {source} - {target})" * (len(self.links_of(hop)) > 1)

    def place_of(self, hop: int, microbatch: int) -> tuple[int, int]:
        """Return (link, index of the message among those of the step on this link) for a micro-batch on a hop."""
        link, before, each = self.by_lane[hop][microbatch % self.lanes]
        return link, microbatch // self.lanes * each + before

    def microbatches_of(self, worker: int, count: int) -> Iterator[int]:
        """Yield the micro-batches that a worker runs in a step of ``count`` micro-batches, in order."""
        by_lane = self.workers[self.stages[worker]]
        return (m for m in range(count) if by_lane[m % self.lanes] == worker)

    def messages(self, num_microbatches: int) -> tuple[int, ...]:
        """Count the messages of a step that cross each link in one direction."""
        counts = [0] * len(self.ends)
        for row in self.by_lane:
            for lane, (link, _, _) in enumerate(row):
                counts[link] += len(range(lane, num_microbatches, self.lanes))
        return tuple(counts)


def routes_of(spec: ScheduleSpec, num_stages: int) -> Routes:
    """Build the routes of a schedule."""
    return _routes(Replicas(spec.replicas, spec.lanes), num_stages)


@functools.lru_cache(maxsize=64)
def _routes(replicas: Replicas, num_stages: int) -> Routes:
    homes, lanes = replicas.homes(num_stages), replicas.lanes
    workers = Wiring(homes, lanes, lanes=lanes).by_lane
    ends = [[(hop, *pair) for pair in zip(*pairs, strict=True)] for hop, pairs in enumerate(pairwise(workers))]
    links = sorted({end for by_lane in ends for end in by_lane})
    by_lane = (
        tuple((links.index(end), row[:lane].count(end), row.count(end)) for lane, end in enumerate(row)) for row in ends
    )
    return Routes(homes, lanes, workers, tuple(links), tuple(by_lane))


FILLING = 2
"""Steps that are replayed, if steps overlap, to fill the empty pipeline before seconds are counted."""
STEADY = (4, 12)
"""Numbers of steps, or of repetitions of an asynchronous schedule's body, that are simulated if steps overlap: the
difference in seconds gives the seconds per step."""
ROUNDING = 1e-12
"""Relative difference of times up to which they count as equal."""
_OF_CODE, _WAY = np.zeros((2, len(OPS)), dtype=np.int32)
_OF_CODE[[OP_CODE[op] for op in (Op.F, Op.B, Op.I, Op.W)]] = range(4)
_WAY[[OP_CODE[op] for op in (Op.F, Op.B, Op.I, Op.W)]] = 0, 1, 1, 0
"""Offset of an operation in the 4 numbers of work of a worker; and 1 for those whose messages go backward."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Link in one direction.

    Attributes:
        latency_s: latency of every message.
        draws_s: occupancies of successive messages, repeated if there are more messages; empty means 0.
    """

    latency_s: float = 0.0
    draws_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Synchronous schedule with one stage on each worker, compiled for replay.

    Attributes:
        routes: routes of its messages.
        messages: number of messages that cross each link in one direction.
        steps: one for each compute action. Work 4 w + (0, 1, 2 or 3) is F, B, I or W of worker w; link 2 l + (0 or 1)
            is link l forward or backward; messages are numbered link after link.
        overlaps: True if a stage may begin its next step before others have ended theirs; never with replicas.
        shares: True if some messages share one wire of their receiver (``CompiledRows.with_shared_wires``).
    """

    routes: Routes
    messages: tuple[int, ...]
    steps: CompiledRows
    overlaps: bool = False
    shares: bool = False

    @property
    def num_workers(self) -> int:
        return len(self.routes.stages)


@functools.lru_cache(maxsize=512)
def compiled(spec: ScheduleSpec, num_stages: int, half_duplex: tuple[bool, ...] = ()) -> Compiled:
    """Compile a synchronous schedule with one stage on each worker; results are cached.

    Args:
        half_duplex: by hop, True if its messages share one wire of each receiving worker; empty means False.

    Raises:
        ScheduleError: the schedule does not allow so many stages, or deadlocks.
    """
    if any(half_duplex):
        plain = compiled(spec, num_stages)
        shared = np.repeat([half_duplex[hop] for hop in plain.routes.hops], 2 * np.array(plain.messages))
        return replace(plain, steps=plain.steps.with_shared_wires(shared), shares=True)
    schedule, routes = schedule_of(spec, num_stages), routes_of(spec, num_stages)
    messages = routes.messages(spec.num_microbatches)
    rows = [encode(row) for row in schedule.body]
    stage, op, microbatch = map(np.concatenate, zip(*rows, strict=True))
    sizes = np.array([len(ops) for _, ops, _ in rows])
    first = [0, *np.cumsum(sizes + 1).tolist()]
    worker, none = np.repeat(np.arange(len(rows)), sizes), first[-1]
    step = np.arange(len(op)) + worker
    lane, turn, way = microbatch % routes.lanes, microbatch // routes.lanes, _WAY[op]
    # (link, messages before, messages per turn) by hop and lane; nothing before the first stage and after the last.
    nothing = ((-1, 0, 0),) * routes.lanes
    by_hop = np.array((nothing, *routes.by_lane, nothing))
    begins = np.array([*accumulate((n for n in messages for _ in (0, 1)), initial=0)])

    def crossing(hop: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (wire, message number) of each action between stages hop - 1 and hop; -1 without such a message."""
        link, before, each = by_hop[hop, lane].T
        wire = np.where((link < 0) | (op == OP_CODE[Op.W]), -1, 2 * link + way)
        return wire, np.where(wire < 0, -1, begins[wire] + turn * each + before)

    _, taken = crossing(stage + way)
    wire, given = crossing(stage + 1 - way)
    maker = np.full(begins[-1] + 1, none, dtype=np.int32)
    maker[given] = step
    maker[-1] = none
    columns = np.full((4, none + 1), (((none,), (0,), (0,), (2 * len(messages),))), dtype=np.int32)
    columns[:, step] = maker[taken], 4 * worker + _OF_CODE[op], given, np.where(wire < 0, 2 * len(messages), wire)
    source, work, message, link = columns
    steps = CompiledRows(first, source, (), [], work, message, link, 2 * len(messages))
    _ = steps.blocks
    return Compiled(routes, messages, steps, schedule.wiring.norm_per_stage)


def step_s(
    program: Compiled,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    wires: Sequence[Wire],
    optimizer_s: Sequence[float] = (),
    replays: int = 1,
    split_backward_s: Sequence[tuple[float, float]] = (),
) -> float:
    """Compute the seconds of one step, as the mean over ``replays`` steps with successive messages.

    Args:
        forward_s, backward_s: seconds of one micro-batch, by worker.
        wires: link 0 forward, link 0 backward, link 1 forward, ...
        optimizer_s: seconds of the optimizer step, by worker; empty means 0.
        split_backward_s: seconds of (I, W) of a split backward, by worker; empty means half of backward_s each.
    """
    work = _work(forward_s, backward_s, split_backward_s)
    if program.overlaps:
        return _overlapping_s(program, work, wires, optimizer_s, replays)
    total_s = 0.0
    for replay in range(replays):
        clock, free = _idle(program)
        _replay(program, work, wires, replay, clock, free)
        total_s += max(clock)
    return total_s / replays + max(optimizer_s, default=0.0)


def equal_messages_s(spec: ScheduleSpec, costs: Costs) -> float:
    """Compute the seconds of one step as ``planner.simulator`` does; in the steady state if steps overlap.

    The summing of gradients between replicas is left out.

    Args:
        spec: schedule of a synchronous kind that puts one stage on each worker.
        costs: costs with all optional seconds given; ``step_s`` and ``reduce_s`` are ignored.
    """
    program = compiled(spec, costs.num_stages, costs.half_duplex)
    routes = program.routes
    work = _work(
        [costs.forward_s[stage] for stage in routes.stages],
        [costs.backward_s[stage] for stage in routes.stages],
        [(costs.backward_input_s[stage], costs.backward_weight_s[stage]) for stage in routes.stages],
    )
    wires = []
    for hop in routes.hops:
        wires.append(Wire(costs.forward_latency_s[hop], (costs.forward_occupancy_s[hop],)))
        wires.append(Wire(costs.backward_latency_s[hop], (costs.backward_occupancy_s[hop],)))
    clock, free = _idle(program)
    _replay(program, work, wires, 0, clock, free)
    # The first stage begins a step only after it has ended the one before: its own time is a lower bound.
    if not program.overlaps or max(clock) <= clock[0]:
        return max(clock)
    ends_s = [max(clock)]
    for replay in range(1, STEADY[1]):  # the replayed step is the first
        before = (*clock, *free)
        _replay(program, work, wires, replay, clock, free)
        ends_s.append(max(clock))
        later_s = [now - then for now, then in zip((*clock, *free), before, strict=True)]
        # Once all clocks advance alike, every further step only adds the same seconds.
        if max(later_s) - min(later_s) <= ROUNDING * ends_s[-1]:
            each_s = ends_s[-1] - ends_s[-2]
            ends_s += [ends_s[-1] + number * each_s for number in range(1, STEADY[1] - replay)]
            break
    return (ends_s[-1] - ends_s[STEADY[0] - 1]) / (STEADY[1] - STEADY[0])


def _work(
    forward_s: Sequence[float], backward_s: Sequence[float], split_backward_s: Sequence[tuple[float, float]]
) -> list[float]:
    by_worker = zip(forward_s, backward_s, split_backward_s or [(s / 2, s / 2) for s in backward_s], strict=True)
    return [s for f, b, parts in by_worker for s in (f, b, *parts)]


def _overlapping_s(
    program: Compiled,
    work: list[float],
    wires: Sequence[Wire],
    optimizer_s: Sequence[float],
    replays: int,
) -> float:
    clock, free = _idle(program)
    begin_s = 0.0
    for replay in range(-FILLING, replays):
        if replay == 0:
            begin_s = max(clock)
        _replay(program, work, wires, replay, clock, free)
        for worker, seconds in enumerate(optimizer_s):
            clock[worker] += seconds
    return (max(clock) - begin_s) / replays


def _idle(program: Compiled) -> tuple[list[float], list[float]]:
    """Return the times at which the workers and the links begin: 0."""
    return [0.0] * program.steps.num_workers, [0.0] * program.steps.num_links


def _replay(
    program: Compiled, work: list[float], wires: Sequence[Wire], replay: int, clock: list[float], free: list[float]
) -> None:
    """Replay one step; changes ``clock`` and ``free`` in place.

    Args:
        replay: number of the step, which selects its messages' seconds.
        clock, free: times at which each worker and each wire has ended the previous step; set to those of this step.
    """
    occupancy: list[float] = []
    latency: list[float] = []
    for number, wire in enumerate(wires):
        count = program.messages[number // 2]
        draws = wire.draws_s or (0.0,)
        at = replay * count % len(draws)
        occupancy.extend((draws * (1 + (at + count - 1) // len(draws)))[at : at + count])
        latency.extend([wire.latency_s] * count)
    seconds = Seconds(work, occupancy, latency)
    run(program.steps, seconds.with_shared_wires() if program.shares else seconds, clock, free)
