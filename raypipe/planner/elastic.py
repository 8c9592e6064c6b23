"""Rules of elastic runs: when a run waits, begins, grows and requests workers, and its replicas afterwards.

    workers available         0     1     2     3     4     5     6         num_workers=(2, 5), the plan for 5 uses 4
    used by the run           waits waits 2     3     4     4     4
    one spare                                               yes   yes       if it survives failures
    requests to autoscaler    5 workers until it has them, fewer if growing would no longer pay

Replicas are added and removed first, then stages. num_workers=(1, 3), two stages 2-1:

    workers                   1     2     3
    workers of the stages     1     1-1   2-1

Growing pays if the seconds that the remaining steps save exceed the pause in which layers move (``pays``).

Regrouping keeps the stages and changes the numbers of replicas, after the loss of a worker and when it is replaced:

    2-1, lanes 2    worker 1 is lost             1-1: worker 0 runs all micro-batches of stage 0
    2-2, lanes 2    workers 2 and 3 are lost     1-1: one of the two replicas of stage 0 takes stage 1

The number of lanes (partial sums of gradients) stays, so that no bit depends on the number of replicas; see
``schedule.replicas``. Replicas are counted by group of workers, one group per stage. If workers hold several stages
there are fewer groups, all of equal size: a lost worker leaves one worker of every other group without work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from raypipe.config.ray import WorkerRange
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Homes, groups_in
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search.request import PER_WORKER, Request

SURE = 2.0
"""Least ratio of the seconds that a move saves to its pause: models are not exact, and speeds may change again."""
MOST_PAUSED = 0.05
"""Maximum share of a run's time for moves that the planner starts, however often speeds change."""


class Gain(NamedTuple):
    """Expected gain of a move.

    Attributes:
        before_s, after_s: seconds of one step, without and with the move.
        steps_left: remaining steps of the run.
        pause_s: seconds for which training pauses during the move.
    """

    before_s: float
    after_s: float
    steps_left: int
    pause_s: float

    @property
    def share(self) -> float:
        """Relative gain in step time; negative if steps get slower."""
        return 1.0 - self.after_s / self.before_s if self.before_s > 0 else 0.0


def pays(gain: Gain, min_gain: float) -> bool:
    """Return True if the move is worth its pause.

    Args:
        min_gain: relative gain in step time below which nothing is moved.
    """
    earned_s = (gain.before_s - gain.after_s) * gain.steps_left
    return gain.share >= min_gain and earned_s > 0 and earned_s >= SURE * gain.pause_s


def rest_steps(pause_s: float, step_s: float) -> int:
    """Return the least number of steps between a move with this pause and the next move."""
    return int(pause_s / MOST_PAUSED / step_s) + 1 if step_s > 0 else 0


def counts_of(homes: Homes) -> tuple[int, ...]:
    """Return the number of replicas by group."""
    return tuple(map(len, groups_in(homes)))


def left(homes: Homes, lost: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return, by group, the workers that continue after a loss, in their order; a group may be empty.

    Args:
        lost: numbers of the lost workers.
    """
    remaining = tuple(tuple(worker for worker in workers if worker not in lost) for workers in groups_in(homes))
    least = min(map(len, remaining))
    return tuple(workers[:least] for workers in remaining) if _several(homes) else remaining


def _several(homes: Homes) -> bool:
    """Return True if workers hold several stages, so that all groups have equally many replicas."""
    return len(groups_in(homes)) < len(homes)


def counts_for(wanted: Sequence[int], workers: int, homes: Homes) -> tuple[int, ...] | None:
    """Reduce the wanted numbers of replicas until ``workers`` suffice, the largest group first.

    Args:
        wanted: wanted replicas by group.
        homes: workers by stage of any plan of these stages.

    Returns:
        the replicas by group; None if there are fewer workers than groups.
    """
    if workers < len(wanted):
        return None
    if _several(homes):
        return (min(wanted[0], workers // len(wanted)),) * len(wanted)
    counts = list(wanted)
    while sum(counts) > workers:
        most = max(counts)
        counts[max(stage for stage, count in enumerate(counts) if count == most)] -= 1
    return tuple(counts)


def with_spares(homes: Homes, wanted: Sequence[int], spares: int) -> tuple[int, ...]:
    """Return the replicas by group after spare workers joined the groups that lack most replicas.

    Args:
        homes: current workers by stage.
        wanted: target replicas by group; empty without a target.
        spares: number of spare workers.
    """
    counts = list(counts_of(homes))
    if _several(homes) and wanted:
        return counts_for(wanted, sum(counts) + spares, homes) or tuple(counts)
    for _ in range(spares):
        missing = [want - count for want, count in zip(wanted, counts, strict=bool(wanted))]
        if max(missing, default=0) > 0:
            counts[missing.index(max(missing))] += 1
    return tuple(counts)


def regrouped(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """Return the plan with other numbers of replicas and the same lanes; the prediction is left out.

    Args:
        plan: plan of a run whose gradients are summed in lanes.
        counts: replicas by group, at most the number of lanes.

    Raises:
        PlanError: the schedule is asynchronous, so that other numbers would change the weight versions of gradients.
    """
    assert plan.spec is not None, "a plan with lanes has the spec of its schedule"
    homes = plan.schedule.wiring.homes
    by_group = dict(zip(groups_in(homes), counts, strict=True))
    by_stage = tuple(by_group[workers] for workers in homes)
    if not plan.spec.of_kind.synchronous and by_stage != plan.spec.replicas:
        raise PlanError(
            f"With schedule={plan.spec.kind!r} the numbers of replicas, {'-'.join(map(str, plan.spec.replicas))}, "
            "decide how old the weights are that gradients are taken at, so that a run keeps them."
        )
    spec = dataclasses.replace(plan.spec, replicas=by_stage)
    schedule = schedule_of(spec, len(homes))
    return dataclasses.replace(
        plan,
        partition=plan.partition.on_workers(schedule.wiring.homes),
        schedule=schedule,
        spec=spec,
        prediction=None,
    )


LEAST_GAIN = 0.02
"""Minimum relative gain of a step; less is within the error of a prediction."""
PAUSE_S = 2.0
"""Seconds of a move of little state: an assumption, above what was measured (docs/design/0037)."""
MOVED_BYTES_S = 200e6
"""Bytes per second of state that moves to another worker: half of a measured restore (docs/design/0038)."""


class Shape(NamedTuple):
    """Numbers of stages, workers and replicas of a plan to be made; None leaves a number to the planner."""

    num_stages: int | None
    num_workers: int
    replicas: int | tuple[int, ...] | None = 1


def gain_of(now_s: float, then_s: float, measured_s: float, move_s: float, steps_left: int) -> Gain:
    """Estimate the gain of growing, assuming that both predictions have the same relative error.

    Args:
        now_s, then_s: predicted seconds of a step with the current workers, and with more.
        measured_s: measured seconds of a step; 0 without a measurement.
        move_s: seconds for which training would pause.
    """
    before_s = measured_s or now_s
    return Gain(before_s, before_s * then_s / now_s if now_s else then_s, steps_left, move_s)


def move_seconds(state_bytes: float, last_s: float = 0.0) -> float:
    """Estimate the seconds for which training pauses while the run moves to another plan.

    Args:
        state_bytes: parameters and optimizer of the whole model, all of which may change their workers.
        last_s: seconds of this run's last move; 0 before the first.
    """
    return last_s or PAUSE_S + state_bytes / MOVED_BYTES_S


def begins_with(workers: WorkerRange, wanted: int, there: int) -> int:
    """Return the number of workers with which a run begins or resumes; 0 if it waits for more.

    Args:
        workers: permitted numbers of workers.
        wanted: number of workers that the plan for the most workers uses.
        there: number of workers that are available now.
    """
    return min(there, wanted) if there >= min(workers.least, wanted) else 0


def target_workers(workers: WorkerRange, wanted: int, *, spare: bool) -> int:
    """Return the number of workers to request.

    Args:
        workers: permitted numbers of workers.
        wanted: number of workers that the plan uses.
        spare: True to request one more if the range has room.
    """
    return min(workers.most, max(workers.least, wanted + spare))


def shape_of(request: Request, there: int) -> Shape:
    """Choose the size of a plan for ``there`` workers: at most the requested stages, divided evenly over workers.

    With one stage per worker, fewer workers have fewer stages. With several stages per worker, the number of stages
    stays, and they are divided over the largest number of workers that get equally many. "zb-v" has two stages per
    worker, so the number of stages follows from the workers. Replicas are removed first.

    Args:
        request: request as it was configured.
        there: number of available workers, at least 1.
    """
    stages = request.requested_stages
    if request.replicated and stages is not None and (groups := request.workers(stages)) <= there:
        if request.kind.several_stages:
            each = min(request.replicas_of(stages)[0], there // groups)
            return Shape(stages, each * groups, each)
        wanted = request.replicas_of(stages)
        return Shape(stages, there, counts_for(wanted, there, tuple((stage,) for stage in range(stages))))
    if not request.kind.several_stages:
        chosen = request.replicas if request.replicas is None else 1
        return Shape(None if stages is None else min(stages, there), there, chosen)
    if stages is None:
        return Shape(None, there)
    if request.kind.stages_per_worker is not None:
        each = min(there, stages // PER_WORKER)
        return Shape(PER_WORKER * each, each)
    return Shape(stages, next(count for count in range(min(there, stages), 0, -1) if stages % count == 0))
