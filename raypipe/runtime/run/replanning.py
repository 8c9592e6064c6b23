"""The replanner beside the loop: told of every step, it looks for another cut in a thread and offers what pays.

    loop: reports of a step --> heard --> Question --> thread: answer, which may take seconds
    loop: between two steps <-- Requests.take_offer <-- offer --+

The loop never waits for it. Only runs that survive failures have one: what nobody asked for may not end a run, and the
copies of state that carry the layers have their place in memory there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.report import StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control.config import LINK_DRIFT_THRESHOLD, MIN_GAIN
from raypipe.planner.replan import Offer, Question, Replanner, answer, can_be_cut_again
from raypipe.planner.tune import ASSUMED_LINK
from raypipe.planner.tune.again import line_of
from raypipe.runtime.run.blueprint import Blueprint
from raypipe.runtime.run.later import another
from raypipe.runtime.run.memory_limits import MemoryLimits
from raypipe.runtime.run.planning import known_request

__all__ = ["Replanning", "replanning_of"]


def replanning_of(blueprint: Blueprint, first: Plan, limits: MemoryLimits) -> Replanning | None:
    """For a run of which the planner may choose the cut, None for others.

    Args:
        first: plan of the run, which says how mini-batches are parted.
        limits: that later cuts keep to.
    """
    pipeline, basis = blueprint.pipeline, blueprint.basis
    chosen = basis.request.partitioner == "parameters" or bool(basis.request.split_points)
    if basis.profile is None or chosen or basis.retunes_microbatches or not blueprint.turns:
        return None
    if (
        max(first.partition.replicas) > 1
    ):  # a slow replica has the micro-batches of its lanes, wherever the stages are cut
        return None
    if blueprint.spec.max_failures == 0 or pipeline.retune_interval_steps == 0:
        return None
    return Replanning(blueprint, first, limits)


class Replanning:
    """Told of every step; offers another cut where one pays. See ``replanning_of``.

    Attributes:
        measures: reports of steps are to say how long stages took.
    """

    def __init__(self, blueprint: Blueprint, first: Plan, limits: MemoryLimits) -> None:
        pipeline, basis = blueprint.pipeline, blueprint.basis
        assert basis.profile is not None
        drift, gain = pipeline.link_drift_threshold, pipeline.min_gain
        drift_threshold = LINK_DRIFT_THRESHOLD if drift == "auto" else drift
        self._min_gain = MIN_GAIN if gain == "auto" else gain
        self._basis, self._first, self._limits = basis, first, limits
        self._replanner = Replanner(basis.profile, blueprint.spec.num_steps, drift_threshold)
        self._offer: Callable[[Offer], None] = lambda offer: None
        self.begin(first)

    def serve(self, offer: Callable[[Offer], None]) -> None:
        """From now on this is called, from another thread, with what pays."""
        self._offer = offer

    def begin(self, plan: Plan) -> None:
        """The stages run this plan from now on, and nothing is known of its workers."""
        self.measures = can_be_cut_again(plan)
        if self.measures:
            self._replanner.begin(plan, self._line(plan))

    def taken(self, offer: Offer, plan: Plan, pause_s: float, step: int) -> None:
        """The stages run what was offered."""
        self._replanner.taken(offer, plan, pause_s, step)

    def heard(self, step: int, seconds: float, reports: Sequence[StepReport], spec: ScheduleSpec | None) -> None:
        """A step is over; see Replanner. While copies are under way nothing is measured."""
        samples = [report.sample for report in reports if report.sample is not None]
        if not self.measures or len(samples) < len(reports) or any(report.copying for report in reports):
            return
        asked = self._replanner.heard(step, seconds, samples, spec)
        if asked is not None:
            threading.Thread(target=self._look, args=(asked,), name="raypipe replanning", daemon=True).start()

    def _line(self, plan: Plan) -> Cluster:
        """Later plans of a run are made for equal workers."""
        return self._limits.on(line_of(plan, self._basis.cluster if plan.generation == 0 else None, ASSUMED_LINK))

    def _look(self, asked: Question) -> None:
        stages = asked.plan.partition.num_stages
        basis = another(self._basis, self._first, num_stages=stages, num_workers=stages)
        offer = answer(known_request(basis), asked, self._min_gain)
        if offer is not None:
            self._offer(offer)
