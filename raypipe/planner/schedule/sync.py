"""Synchronous schedules: every stage warms up with some forwards, then forwards and backwards take turns.

The rows have one stage per worker (several in ``interleaved``) and compute actions only; the optimizer step comes after
the last micro-batch. Two kinds hide slow links at the cost of memory; 1F1B is the smallest setting of both:

    kFkB    takes turns in groups of k micro-batches         (Ada-Grouper, arXiv:2303.01675, abstract)
    slack   takes turns one by one, but warms up further: stage h runs r_h forwards ahead of stage h + 1

Every stage may have replicas, between which its micro-batches are dealt out (``replicas``): each replica warms up and
takes turns with its own.

Interleaved 1F1B has several stages per worker, so that the pipeline fills and drains in smaller pieces: the bubble
shrinks by the number of chunks per worker, and every micro-batch crosses that many times more links (Narayanan et al.,
arXiv:2104.04473, section 2.2, in the order of Megatron-LM).

Schedules have no times: ``raypipe.planner.simulator`` computes their seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import OP_CODE, Op, Row, Schedule, Wiring, single_homes
from raypipe.planner.dependency_tables import pack
from raypipe.planner.schedule.replicas import SINGLE, Replicas, warmups_of


def k_f_k_b(
    num_stages: int, num_microbatches: int, k: int, first_trainable: int = 0, replicas: Replicas = SINGLE
) -> Schedule:
    """Build group-scheduled 1F1B: k forwards, then k backwards, each in micro-batch order.

    S=2, M=4, k=2, one slot per action:

        0: F0 F1 F2 F3 B0 B1  .  . B2 B3
        1:  . F0 F1 B0 B1 F2 F3 B2 B3  .

    k=1 is 1F1B, k=M is GPipe. Stage s holds min(M, k * (S - s)) micro-batches at most. With free links
    every k takes (M + S - 1) * (t_F + t_B); a latency of c seconds per hop is hidden by
    k = 1 + ceil(2 * c / (t_F + t_B)). M need not be a multiple of k; the last group is then short.

    Args:
        num_stages: S.
        num_microbatches: M, per optimizer step.
        k: micro-batches per group.
        first_trainable: lowest stage with a backward.
        replicas: replicas of each stage.

    Raises:
        ScheduleError: a number is out of range.
    """
    if k < 1:
        raise ScheduleError(f"kfkb needs groups of at least one micro-batch, not k={k}.")
    check_counts(num_stages, num_microbatches, first_trainable)
    warmups = warmups_of(replicas.of(num_stages))
    return _schedule("kfkb", k, warmups, num_microbatches, first_trainable, replicas)


def one_f_one_b(
    num_stages: int, num_microbatches: int, first_trainable: int = 0, replicas: Replicas = SINGLE
) -> Schedule:
    """Build 1F1B with a flush (PipeDream-2BW, arXiv:2006.09503): backwards as early as possible.

    S=4, M=8, one slot per action:

        0: F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
        1:  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
        2:  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
        3:  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .

    Stage s holds min(M, S - s) micro-batches: the least that keeps every stage busy. It has no slack:
    any latency on a link delays every micro-batch.

    Raises:
        ScheduleError: a number is out of range.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    return _schedule("1f1b", 1, warmups_of(replicas.of(num_stages)), num_microbatches, first_trainable, replicas)


def gpipe(num_stages: int, num_microbatches: int, first_trainable: int = 0, replicas: Replicas = SINGLE) -> Schedule:
    """Build GPipe (arXiv:1811.06965): all forwards, then all backwards, in micro-batch order.

    S=4, M=4, one slot per action:

        0: F0 F1 F2 F3  .  .  .  .  .  . B0 B1 B2 B3
        1:  . F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3  .
        2:  .  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .  .
        3:  .  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .  .

    Every stage holds M micro-batches. The paper runs the backwards in reverse; in order, gradients add
    up in the same order as in 1F1B, so the results of both are bitwise equal.

    Raises:
        ScheduleError: a number is out of range.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    return _schedule("gpipe", num_microbatches, (1,) * num_stages, num_microbatches, first_trainable, replicas)


def slack(
    num_stages: int,
    num_microbatches: int,
    slack: Sequence[int] | int,
    first_trainable: int = 0,
    replicas: Replicas = SINGLE,
) -> Schedule:
    """Build 1F1B with a longer warm-up: stage h runs r_h forwards more ahead of its backwards than stage h + 1.

    S=4, M=8, r=2, one slot per action:

        0: F0 F1 F2 F3 F4 F5 F6 B0 F7 B1  . B2  . B3  . B4  . B5  . B6  . B7
        1:  . F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3  . B4  . B5  . B6  . B7  .
        2:  .  . F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .  .
        3:  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .

    Stage s warms up with the sum of r_h over the hops h >= s, so it holds min(M, 1 + that sum), and
    r_h = 1 + ceil(2 * c_h / T) hides a latency of c_h seconds on hop h, where T is the seconds of F and
    B on the slowest stage. r=1 is 1F1B; r=2 is Alpa's ``1f1b_overlap_friendly``. The period per
    micro-batch is the largest of T_s over stages and, over runs of consecutive stages, of
    (sum of T_s + 2 * sum of c_h) / (1 + sum of r_h), hops inside the run.

    Args:
        slack: r_h by hop, or one number for all hops. The other arguments are those of ``k_f_k_b``.

    Raises:
        ScheduleError: a number is out of range, or ``slack`` does not have one number for each hop.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    by_hop = slack_by_hop(num_stages, slack)
    warmups = warmups_of(replicas.of(num_stages), by_hop)
    return _schedule("slack", 1, warmups, num_microbatches, first_trainable, replicas)


def slack_by_hop(num_stages: int, slack: Sequence[int] | int) -> tuple[int, ...]:
    """Return the slack r_h of every hop h: one number is repeated for all hops, a sequence becomes a tuple.

    Raises:
        ScheduleError: a number is below 1, or the sequence does not have one number for each of num_stages - 1 hops.
    """
    hops = num_stages - 1
    by_hop = (slack,) * hops if isinstance(slack, int) else tuple(slack)
    if len(by_hop) != hops:
        raise ScheduleError(f"{num_stages} stages have {hops} hops, but slack lists {len(by_hop)} numbers: {by_hop}.")
    if any(r < 1 for r in (by_hop if hops or not isinstance(slack, int) else (slack,))):
        raise ScheduleError(f"slack is {by_hop or slack}: every hop needs at least 1, which is 1F1B.")
    return by_hop


def check_counts(num_stages: int, num_microbatches: int, first_trainable: int) -> None:
    """Raise ScheduleError if there is no stage, no micro-batch, or nothing to train."""
    if num_stages < 1:
        raise ScheduleError(f"A pipeline needs at least one stage, not {num_stages}.")
    if num_microbatches < 1:
        raise ScheduleError(f"An optimizer step needs at least one micro-batch, not {num_microbatches}.")
    if not 0 <= first_trainable < num_stages:
        raise ScheduleError(
            f"first_trainable={first_trainable} leaves nothing to train: with {num_stages} stages "
            f"it lies between 0 and {num_stages - 1}."
        )


def _schedule(
    kind: str,
    group_size: int,
    warmups: Sequence[int],
    num_microbatches: int,
    first_trainable: int,
    replicas: Replicas,
) -> Schedule:
    """Build a schedule in which every worker takes turns in groups of ``group_size`` of its own micro-batches.

    Args:
        warmups: by stage, number of forward groups before the first group that is followed by backwards.
    """
    wiring = Wiring(
        replicas.homes(len(warmups)), num_microbatches, first_trainable=first_trainable, lanes=replicas.lanes
    )
    rows = []
    for stage, workers in enumerate(wiring.homes):
        for worker in workers:
            own = replicas.microbatches(wiring, stage, worker)
            sizes = np.minimum(group_size, len(own) - np.arange(0, len(own), group_size))
            rows.append(_row(stage, own, sizes, warmups[stage], stage >= first_trainable))
    return Schedule(kind, wiring, tuple(rows), stride=num_microbatches)


def _row(stage: int, own: NDArray[np.int64], sizes: NDArray[np.int64], warmup: int, trains: bool) -> Row:
    """Build the row of one worker: ``warmup`` groups forward, then one forward and one backward in turn, then the rest.

    Args:
        own: micro-batches of the worker.
        sizes: sizes of the groups into which ``own`` is divided.
        trains: False for a stage without backwards.
    """
    if not trains:
        return pack(np.full(len(own), stage), np.full(len(own), OP_CODE[Op.F]), own)
    forward, backward = take_turns(len(sizes), warmup)
    size = np.empty(2 * len(sizes), dtype=np.int64)
    size[forward] = size[backward] = sizes
    place = np.cumsum(size) - size
    within = np.arange(len(own)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ops, microbatches = np.empty(2 * len(own), dtype=np.int8), np.empty(2 * len(own), dtype=np.int32)
    for op, turn in ((Op.F, forward), (Op.B, backward)):
        at = np.repeat(place[turn], sizes) + within
        ops[at], microbatches[at] = OP_CODE[op], own
    return pack(np.full(len(ops), stage), ops, microbatches)


def take_turns(count: int, warmup: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (positions of the forwards, positions of the backwards) in a row with ``count`` of each.

    The row has ``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left.
    """
    number = np.arange(count)
    warmup = min(warmup, count)
    return number + np.maximum(number - warmup, 0), number + np.minimum(count, number + warmup + 1)


def interleaved(num_workers: int, num_microbatches: int, chunks: int, first_trainable: int = 0) -> Schedule:
    """Build interleaved 1F1B: worker w of P holds stages w, w + P, w + 2P, ... and runs them in turn, round by round.

    2 workers, 2 chunks each (4 stages), M=4, one slot per action:

        0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
        1:   . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .

    A round is about P micro-batches: with them a worker runs its first chunk, then its second, and so on;
    backwards take the chunks from the last to the first. Worker w warms up with
    (chunks - 1) * round + 2 * (P - 1 - w) forwards. Megatron-LM wants M to be a multiple of P; here M is cut into
    max(1, M // P) rounds whose sizes differ by at most one, so any M will do.

    Args:
        num_workers: P; there are P * chunks stages.
        num_microbatches: M, per optimizer step.
        chunks: stages per worker.
        first_trainable: lowest stage with a backward.

    Raises:
        ScheduleError: a number is out of range.
    """
    if num_workers < 1 or chunks < 1:
        raise ScheduleError(f"interleaved needs at least one worker and one chunk, not {num_workers} and {chunks}.")
    num_stages = num_workers * chunks
    check_counts(num_stages, num_microbatches, first_trainable)
    rounds = in_rounds(num_microbatches, num_workers)
    forward = np.array([(c, m) for part in rounds for c in range(chunks) for m in part])
    backward = np.array([(c, m) for part in rounds for c in reversed(range(chunks)) for m in part])
    rows = []
    for worker in range(num_workers):
        warmup = (chunks - 1) * len(rounds[0]) + 2 * (num_workers - 1 - worker)
        row = np.empty((2 * len(forward), 3), dtype=np.int32)
        for op, order, at in zip((Op.F, Op.B), (forward, backward), take_turns(len(forward), warmup), strict=True):
            row[at, 0], row[at, 1], row[at, 2] = order[:, 0] * num_workers + worker, OP_CODE[op], order[:, 1]
        row = row[(row[:, 1] == OP_CODE[Op.F]) | (row[:, 0] >= first_trainable)]
        rows.append(pack(*row.T))
    homes = single_homes(stage % num_workers for stage in range(num_stages))
    wiring = Wiring(homes, update_interval=num_microbatches, first_trainable=first_trainable)
    return Schedule("interleaved", wiring, tuple(rows), stride=num_microbatches)


def in_rounds(num_microbatches: int, num_workers: int) -> list[range]:
    """Divide micro-batches into rounds of about ``num_workers``, as equal as possible, the longer ones first."""
    count = max(1, num_microbatches // num_workers)
    size, longer = divmod(num_microbatches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
