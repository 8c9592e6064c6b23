"""Forward only: what an evaluation runs. There is nothing to schedule but the order of the micro-batches."""

from __future__ import annotations

from raypipe.ir.schedule import Action, Op, Schedule, Wiring

__all__ = ["forward_only"]


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Lowered rows of an evaluation, one stage per worker.

    S=2, M=2
    0: 0F0 0SEND_F0 0F1 0SEND_F1
    1: 1RECV_F0 1F0 1RECV_F1 1F1
    """
    rows = []
    for stage in range(num_stages):
        row = []
        for m in range(num_microbatches):
            if stage:
                row.append(Action(stage, Op.RECV_F, m))
            row.append(Action(stage, Op.F, m))
            if stage + 1 < num_stages:
                row.append(Action(stage, Op.SEND_F, m))
        rows.append(tuple(row))
    wiring = Wiring(tuple(range(num_stages)), update_interval=num_microbatches)
    return Schedule("forward", wiring, tuple(rows), stride=num_microbatches)
