"""ZB-H1 and ZB-V: backwards split into I (input gradients) and W (weight gradients).

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), call them B and W. The previous stage waits for I
only, and a stage that would idle computes a deferred W.

S=4, M=8, r=1, one slot per action:

    0: F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    1:  . F0 F1 F2  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    2:  .  . F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7

Forwards and I alternate as forwards and backwards do in ``slack``. W of a micro-batch follows the I of the l_s-th one
after it, where l_s is the sum of r_h over the hops before stage s: early stages hold forwards in flight, late ones
deferred W. So every stage holds at most min(M, 1 + sum of all r_h) micro-batches between F and W. A stage without so
much memory gets a smaller l_s (``lag``); with 0 its W follows the I, and it holds no more than in ``slack``. Only W
move: sums of gradients have the same order with any lag. With free links,
equal stages, r=1 and t_F = t_I = t_W a step takes M * (t_F + t_I + t_W) + (S - 1) * (t_F + t_I - t_W), where 1F1B adds
(S - 1) * (t_F + t_I + t_W).

With overlapping steps, no stage waits for the global norm before its optimizer step. S=2, M=4, r=2:

    0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 F4 F5 F6 I4 W4 F7 I5 W5 I6 W6 I7 W7 F8 F9
    1:  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 F4 I4 F5 I5 F6 I6 W4 F7 I7 W5 W6 W7 F8

A later stage begins every step later and ends it equally later, so that with enough slack no stage idles: the
parallelogram of the same paper, which validates the norm afterwards; here, clipping by the global norm is excluded.
Steps do not overlap with fewer than 1 + sum r_h micro-batches, because forwards of the next step would be held in
addition to deferred W of this one; nor if a stage has no backward, because it could run ahead without bound.

Each replica of a stage (``replicas``) has such a row of its own micro-batches. Its W are deferred by its share of
sum r_h R_(h + 1) over the hops before, where R is the number of replicas. Steps of replicas do not overlap.

ZB-V puts two stages on every worker, there and back, so that no worker waits once it has begun (section 6, and
"Pipeline Parallelism with Controllable Memory", arXiv:2405.15362). The first worker holds the first stage and the last
one: backwards begin where forwards did, and all workers hold equally many activations.

The order comes from a timetable of a pipeline that has been full forever, in slots of one action:

    F of stage s and micro-batch m   6 m + 3 s
    I                                6 m + 3 (2 S - 2 - s) + 1
    W                                the slot after its I

A period of 6 slots has each of a worker's six actions once, in the turn F I W F I W of one stage and the other. Three
slots from a stage to the next leave two for the message, and use up the memory of 2 P activations at any time.

To fill and drain the pipeline sooner than in this timetable, the rows are built slot by slot: every worker runs, of its
actions that are ready and fit into memory, the one that is due first. After its last forward, actions that another
worker waits for come before W.

A latency of up to two slots per hop is paid once in a step, while the pipeline fills and drains, not per micro-batch.

The model leaves out real durations: the order is found with equal slots and free links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import OP_CODE, Op, Row, Schedule, Wiring, single_homes
from raypipe.planner.dependency_tables import pack
from raypipe.planner.schedule.replicas import SINGLE, Replicas, warmups_of
from raypipe.planner.schedule.sync import check_counts, slack_by_hop, take_turns


def zb_h1(
    num_stages: int,
    num_microbatches: int,
    slack: Sequence[int] | int = 1,
    first_trainable: int = 0,
    *,
    overlap: bool = False,
    replicas: Replicas = SINGLE,
    lag: Sequence[int] = (),
) -> Schedule:
    """Build slack 1F1B with split backwards; the module docstring has pictures.

    A stage holds at most as many micro-batches as the first stage of slack 1F1B.

    Args:
        num_stages: S.
        num_microbatches: M, per optimizer step.
        slack: r_h by hop, or one number for all hops; 1 is ZB-H1 of the paper, more hides slow links.
        first_trainable, replicas: as in ``sync.k_f_k_b``.
        overlap: True if steps may overlap.
        lag: by stage, the largest l_s (see the module); empty for no bound.

    Raises:
        ScheduleError: a number is out of range, ``slack`` does not have one number for each hop, or ``lag`` one for
            each stage.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    by_hop = slack_by_hop(num_stages, slack)
    counts = replicas.of(num_stages)
    warmups = warmups_of(counts, by_hop)
    lags = full_lags(by_hop, counts, first_trainable)
    if lag:
        if len(lag) != num_stages or min(lag) < 0:
            raise ScheduleError(f"lag={tuple(lag)} for {num_stages} stages: give each stage a number of at least 0.")
        lags = tuple(map(min, lags, lag))
    wiring = Wiring(
        replicas.homes(num_stages),
        num_microbatches,
        split_backward=True,
        first_trainable=first_trainable,
        norm_per_stage=overlap and replicas.lanes == 1 and not first_trainable and num_microbatches > sum(by_hop),
        lanes=replicas.lanes,
    )
    rows = tuple(
        _row(s, replicas.microbatches(wiring, s, worker), warmups[s], lags[s], s >= first_trainable)
        for s, workers in enumerate(wiring.homes)
        for worker in workers
    )
    return Schedule("zb-h1", wiring, rows, stride=num_microbatches)


def full_lags(slack: Sequence[int], replicas: Sequence[int], first_trainable: int = 0) -> tuple[int, ...]:
    """Return l_s of the module docstring by stage: micro-batches by which a replica defers W if memory allows it.

    Args:
        slack: r_h by hop.
        replicas: number of replicas by stage.
        first_trainable: as in ``sync.k_f_k_b``.
    """
    # Micro-batches that wait over the hops before a stage, shared out among its replicas.
    waiting = (r * replicas[hop + 1] if hop >= first_trainable else 0 for hop, r in enumerate(slack))
    return tuple(-(-every // count) for every, count in zip(accumulate(waiting, initial=0), replicas, strict=True))


def _row(stage: int, own: NDArray[np.int64], warmup: int, lag: int, trains: bool) -> Row:
    """Build the row of one worker.

    Args:
        own: micro-batches of the worker.
        warmup: number of forwards before the first I.
        lag: number of the worker's micro-batches by which W is deferred.
        trains: False for a stage without backwards.
    """
    count = len(own)
    if not trains or not count:
        return pack(np.full(count, stage), np.full(count, OP_CODE[Op.F]), own)
    number = np.arange(count)
    forward, backward = take_turns(count, warmup)
    behind = backward[np.minimum(count - 1, number + lag)]
    # A W follows the I that it waits for, and the W before it.
    order = np.lexsort((np.tile(number, 3), np.repeat([0, 0, 1], count), np.concatenate([forward, backward, behind])))
    ops = np.repeat([OP_CODE[op] for op in (Op.F, Op.I, Op.W)], count)
    return pack(np.full(3 * count, stage), ops[order], np.tile(own, 3)[order])


PERIOD, HOP = 6, 3
"""Slots of the timetable from a micro-batch to the next, and from a stage to the next."""

Turn = tuple[bool, int, int, Op]
"""(True after the last forward if no worker waits for it, slot in which it is due, stage, operation); slots differ."""


def zb_v(num_stages: int, num_microbatches: int, first_trainable: int = 0) -> Schedule:
    """Build ZB-V: worker w of P holds stages w and 2 P - 1 - w; forwards, I and W alternate on each stage.

    2 workers (4 stages), M=4, one slot per action:

        0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3   .
        1:   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    A worker holds at most 2 P activations between F and W, of both stages together: as many bytes as 1F1B keeps on the
    first of P workers. With free links and t_F = t_I = t_W a step takes max(6 M + P - 1, 3 M + 4 P - 2) slots, where
    1F1B on the same workers takes 6 (M + P - 1). From M = 2 P - 1 on every worker w begins in slot w, which is the
    earliest that it can, and then never idles.

    Args:
        num_stages: S = 2 P.
        num_microbatches: M, per optimizer step.
        first_trainable: lowest stage with a backward; stages below hold nothing and take no room.

    Raises:
        ScheduleError: a number is out of range, or num_stages is odd.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    if num_stages % 2:
        fewer = f"{num_stages - 1} or " if num_stages > 1 else ""
        raise ScheduleError(
            f"zb-v puts two stages on every worker, but num_stages={num_stages} is odd: cut the model into {fewer}"
            f"{num_stages + 1} stages."
        )
    way = range(num_stages // 2)
    progress = _Progress.begin(num_stages, num_microbatches, first_trainable)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in way]
    while any(turns := [min(progress.ready(worker), default=None) for worker in way]):
        for row, turn in zip(rows, turns, strict=True):
            if turn is not None:
                *_, stage, op = turn
                row.append((stage, OP_CODE[op], progress.take(stage, op)))
    wiring = Wiring(
        single_homes((*way, *reversed(way))), num_microbatches, split_backward=True, first_trainable=first_trainable
    )
    return Schedule("zb-v", wiring, tuple(pack(*np.array(row).T) for row in rows), stride=num_microbatches)


@dataclass(slots=True)
class _Progress:
    """Progress of every stage; operations run in micro-batch order, so counts are sufficient.

    Attributes:
        forward, inputs, weights: by stage, number of micro-batches whose F, I and W have ended.
        num_microbatches, first_trainable: as in ``zb_v``.
    """

    forward: list[int]
    inputs: list[int]
    weights: list[int]
    num_microbatches: int
    first_trainable: int

    @classmethod
    def begin(cls, num_stages: int, num_microbatches: int, first_trainable: int) -> _Progress:
        forward, inputs, weights = ([0] * num_stages for _ in range(3))
        return cls(forward, inputs, weights, num_microbatches, first_trainable)

    def take(self, stage: int, op: Op) -> int:
        """Return the next micro-batch of an operation, and count it as done."""
        done = self.forward if op is Op.F else self.inputs if op is Op.I else self.weights
        done[stage] += 1
        return done[stage] - 1

    def ready(self, there: int) -> Iterator[Turn]:
        """Yield the actions that stage ``there`` (first half) and its counterpart (second half) may start.

        A forward of the first half may use the last free slot only if the oldest activation of that stage has passed
        the counterpart too. This excludes deadlock, whatever is chosen: for the oldest unfinished micro-batch, only a
        forward of the second half can lack a slot, on a worker full of first-half activations. When the last of those
        was admitted, the oldest one had passed the counterpart, so it belonged to an older, finished micro-batch,
        which left a slot.
        """
        forward, inputs, weights, first = self.forward, self.inputs, self.weights, self.first_trainable
        last = len(forward) - 1
        back = last - there
        room = last + 1 - sum(forward[stage] - weights[stage] for stage in (there, back) if stage >= first)
        end = PERIOD * (self.num_microbatches - 1) + HOP * back + 2
        for stage in (there, back):
            due = PERIOD * forward[stage] + HOP * stage
            if forward[stage] < (forward[stage - 1] if stage else self.num_microbatches):
                needed = 2 if stage == there and forward[back] == weights[there] else 1
                if room >= needed or stage < first:
                    yield False, due, stage, Op.F
            if stage < first:
                continue
            behind = HOP * (2 * last - stage) + 1
            if inputs[stage] < (inputs[stage + 1] if stage < last else forward[stage]):
                due = PERIOD * inputs[stage] + behind
                yield stage == first and due > end, due, stage, Op.I  # no stage waits for this one
            if weights[stage] < inputs[stage]:
                due = PERIOD * weights[stage] + behind + 1
                yield due > end, due, stage, Op.W
