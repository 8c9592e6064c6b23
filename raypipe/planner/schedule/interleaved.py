"""Interleaved 1F1B: several stages per worker, so that the pipeline fills and drains in smaller pieces.

Narayanan et al., arXiv:2104.04473, section 2.2, in the order of Megatron-LM. The bubble shrinks by the
number of chunks per worker; every micro-batch crosses that many times more links.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Op, Schedule, Wiring, single_homes
from raypipe.planner.schedule.sync import check_counts, take_turns
from raypipe.planner.tables import OP_CODE, pack

__all__ = ["in_rounds", "interleaved"]


def interleaved(num_workers: int, num_microbatches: int, chunks: int, first_trainable: int = 0) -> Schedule:
    """Worker w holds stages w, w + P, w + 2P, ... (P workers) and takes them in turn, a round at a time.

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
    """Micro-batches cut into rounds as equal as can be, the longer ones first."""
    count = max(1, num_microbatches // num_workers)
    size, longer = divmod(num_microbatches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
