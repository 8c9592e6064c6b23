"""When a run whose number of workers may change waits, begins, grows and asks for more. Pure arithmetic.

    places that are there     0     1     2     3     4     5     6         num_workers=(2, 5), the plan for 5 wants 4
    the run                   waits waits 2     3     4     4     4
    and is one spare                                        yes   yes       where it survives failures
    asks the autoscaler for   5 places until it has them, fewer where growing would not pay any more

With replicas, those are what comes and goes first, and then stages. num_workers=(1, 3), two stages 2-1:

    workers                   1     2     3
    workers of the stages     1     1-1   2-1

Growing pays where the remaining steps gain more than the move takes, see planner/worth.py.
"""

from __future__ import annotations

from typing import NamedTuple

from raypipe.config.ray import WorkerRange
from raypipe.planner.regroup import counts_for
from raypipe.planner.tune.request import PER_WORKER, Request
from raypipe.planner.worth import Gain

__all__ = ["LEAST_GAIN", "Shape", "asked_for", "begins_with", "gain_of", "move_seconds", "shape_of"]

LEAST_GAIN = 0.02
"""Of a step; less is within what a prediction is off by."""
PAUSE_S = 2.0
"""Of a move of little state, which is planned, drained and configured: an assumption, above what was measured
(docs/design/0043)."""
MOVED_BYTES_S = 200e6
"""Of state that changes its worker: half of what a restore from another process was measured at (docs/design/0038)."""


class Shape(NamedTuple):
    """What a plan is to be made for; ``num_stages`` and ``replicas`` are None where the planner chooses."""

    num_stages: int | None
    num_workers: int
    replicas: int | tuple[int, ...] | None = 1


def gain_of(now_s: float, then_s: float, measured_s: float, move_s: float, steps_left: int) -> Gain:
    """What growing would bring, where a prediction that is off now will be off then, as much.

    Args:
        now_s, then_s: a step with as many workers as now, and with more, as both are predicted.
        measured_s: a step as it is; 0 where none was measured.
        move_s: for which the run would stand still.
    """
    before_s = measured_s or now_s
    return Gain(before_s, before_s * then_s / now_s if now_s else then_s, steps_left, move_s)


def move_seconds(state_bytes: float, last_s: float = 0.0) -> float:
    """For which a run stands still while it takes another plan.

    Args:
        state_bytes: parameters and optimizer of the whole model, all of which may change their workers.
        last_s: that the last move of this run took; 0 before one.
    """
    return last_s or PAUSE_S + state_bytes / MOVED_BYTES_S


def begins_with(workers: WorkerRange, wanted: int, there: int) -> int:
    """Workers that a run begins or goes on with; 0 where it waits for more.

    Args:
        wanted: by the plan for the most workers.
        there: that it could have at once.
    """
    return min(there, wanted) if there >= min(workers.least, wanted) else 0


def asked_for(workers: WorkerRange, wanted: int, *, spare: bool) -> int:
    """Workers that a run wants to have, of which one is a spare where it survives failures and the range has room."""
    return min(workers.most, max(workers.least, wanted + spare))


def shape_of(request: Request, there: int) -> Shape:
    """For so many workers: at most as many stages as were asked for, and as many workers as those can be shared out to.

    One stage on each worker: fewer workers have fewer stages. Several: the stages stay as many and are shared out over
    the most workers that take as many each; "zb-v" has two on each, so there they follow the workers. Replicas are
    taken away first.

    Args:
        request: as it was configured.
        there: workers, at least 1.
    """
    asked = request.asked_stages
    if request.replicated and asked is not None and (groups := request.workers(asked)) <= there:
        if request.kind.several_stages:
            each = min(request.replicas_of(asked)[0], there // groups)
            return Shape(asked, each * groups, each)
        wanted = request.replicas_of(asked)
        return Shape(asked, there, counts_for(wanted, there, tuple((stage,) for stage in range(asked))))
    if not request.kind.several_stages:
        chosen = request.replicas if request.replicas is None else 1
        return Shape(None if asked is None else min(asked, there), there, chosen)
    if asked is None:
        return Shape(None, there)
    if request.kind.stages_per_worker is not None:
        each = min(there, asked // PER_WORKER)
        return Shape(PER_WORKER * each, each)
    return Shape(asked, next(count for count in range(min(there, asked), 0, -1) if asked % count == 0))
