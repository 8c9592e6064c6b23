"""Split backwards: I, which the stage before waits for, and W, which only the optimizer's step needs.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), call them B and W. Whatever waits for a backward in
1F1B waits for half of it, and where a stage would stand still it does a W that it has put off.

S=4, M=8, r=1, one slot per action:

    0: F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    1:  . F0 F1 F2  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    2:  .  . F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7

Forwards and I take turns as forwards and backwards do in ``slack``; W of a micro-batch comes behind the I of one
that is l_s later, where l_s is the sum of r_h over the hops before stage s: what stages that come earlier hold in
forwards that wait, a later one holds in weights' gradients that wait. So every stage holds at most
min(M, 1 + sum of all r_h) micro-batches between F and W. With free links, equal stages, r=1 and t_F = t_I = t_W a
step takes M * (t_F + t_I + t_W) + (S - 1) * (t_F + t_I - t_W), where 1F1B adds (S - 1) * (t_F + t_I + t_W).

Where steps overlap, no stage waits for the norm of all before its optimizer step. S=2, M=4, r=2:

    0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 F4 F5 F6 I4 W4 F7 I5 W5 I6 W6 I7 W7 F8 F9
    1:  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 F4 I4 F5 I5 F6 I6 W4 F7 I7 W5 W6 W7 F8

A later stage begins every step later and ends it as much later, so that with enough slack nobody ever stands still:
the parallelogram of the same paper, which checks the norm afterwards; here nobody may clip by it. They do not
overlap with fewer than 1 + sum r_h micro-batches, for forwards of the next step would wait beside weights'
gradients of this one, nor where a stage has no backward, for nothing would hold it back from running steps ahead.

Replicas of a stage (``replicas``) have such rows of their own micro-batches, W coming as many of those later as all
replicas of earlier stages together hold more. Their steps do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.schedule import Op, Row, Schedule, Wiring
from raypipe.planner.schedule.replicas import SINGLE, Replicas, warmups_of
from raypipe.planner.schedule.sync import check_counts, slack_by_hop, take_turns
from raypipe.planner.tables import OP_CODE, pack

__all__ = ["zb_h1"]


def zb_h1(
    num_stages: int,
    num_microbatches: int,
    slack: Sequence[int] | int = 1,
    first_trainable: int = 0,
    *,
    overlap: bool = False,
    replicas: Replicas = SINGLE,
) -> Schedule:
    """Slack 1F1B with split backwards, in the memory of 1F1B's first stage on every stage; see the module for pictures.

    Args:
        num_stages: S.
        num_microbatches: M, per optimizer step.
        slack: r_h by hop, or one number for all hops; 1 is ZB-H1 of the paper, more hides slow links.
        first_trainable: lowest stage with a backward; stages below have none, so none is put off for them.
        overlap: steps may overlap.
        replicas: of each stage.

    Raises:
        ScheduleError: a number is out of range, or not one r_h for each hop.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    by_hop = slack_by_hop(num_stages, slack)
    counts = replicas.of(num_stages)
    warmups = warmups_of(counts, by_hop)
    # Micro-batches that wait over the hops before a stage, shared out among its replicas.
    waiting = (r * counts[hop + 1] if hop >= first_trainable else 0 for hop, r in enumerate(by_hop))
    lags = [-(-all_of // count) for all_of, count in zip(accumulate(waiting, initial=0), counts, strict=True)]
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


def _row(stage: int, own: NDArray[np.int64], warmup: int, lag: int, trains: bool) -> Row:
    """Of one worker.

    Args:
        own: its micro-batches, in their order.
        warmup: forwards before the first I.
        lag: how many of its own later a W comes.
    """
    count = len(own)
    if not trains or not count:
        return pack(np.full(count, stage), np.full(count, OP_CODE[Op.F]), own)
    number = np.arange(count)
    forward, backward = take_turns(count, warmup)
    behind = backward[np.minimum(count - 1, number + lag)]
    # A W stands behind the I that it waits for, and behind the W before it.
    order = np.lexsort((np.tile(number, 3), np.repeat([0, 0, 1], count), np.concatenate([forward, backward, behind])))
    ops = np.repeat([OP_CODE[op] for op in (Op.F, Op.I, Op.W)], count)
    return pack(np.full(3 * count, stage), ops[order], np.tile(own, 3)[order])
