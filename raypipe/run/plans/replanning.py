"""Other cuts of a running job: measures every step, and offers another partition if the time saved exceeds the pause.

    loop: reports of a step --> on_step --> RepartitionQuery, queued for the controller's thread
    controller's thread: search, which may take seconds --> Offer, which the loop takes between two steps

Only runs that survive failures change their cut, for two reasons: an optional change must not end a run, and layers are
moved by means of the in-memory copies that only such runs keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.report import StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller.config import LINK_DRIFT_THRESHOLD
from raypipe.planner.cost.tolerance import MIN_GAIN
from raypipe.planner.repartition import Offer, RepartitionQuery, Replanner, answer, can_be_cut_again, line_of
from raypipe.planner.search import ASSUMED_LINK
from raypipe.run.plans.blueprint import Blueprint
from raypipe.run.plans.later import MemoryLimits, another


def replanning_of(blueprint: Blueprint, first: Plan, limits: MemoryLimits) -> Replanning | None:
    """Create the replanner of a run whose partition the planner may change; return None for other runs.

    Args:
        first: first plan of the run, which fixes its micro-batches.
        limits: memory limits that later partitions must not exceed.
    """
    pipeline, basis = blueprint.pipeline, blueprint.basis
    chosen = basis.request.partitioner == "parameters" or bool(basis.request.split_points)
    if basis.profile is None or chosen or basis.retunes_microbatches or not blueprint.turns:
        return None
    if max(first.partition.replicas) > 1:  # lanes fix the micro-batches of a slow replica: no partition relieves it
        return None
    if blueprint.spec.max_failures == 0 or pipeline.retune_interval_steps == 0:
        return None
    return Replanning(blueprint, first, limits)


class Replanning:
    """Replanner of a run: measures every step, and offers another partition if the time saved exceeds the pause.

    Attributes:
        measures: True if reports of steps must include the stages' durations.
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
        """Set the function that is called with each offer, from another thread."""
        self._offer = offer

    def begin(self, plan: Plan) -> None:
        """Drop all measurements, and start measuring steps of ``plan``, which the stages run from now on."""
        self.measures = can_be_cut_again(plan)
        if self.measures:
            self._replanner.begin(plan, self._line(plan))

    def taken(self, offer: Offer, plan: Plan, pause_s: float, step: int) -> None:
        """Record that the stages run the offered plan since ``step``, after ``pause_s`` seconds without training."""
        self._replanner.taken(offer, plan, pause_s, step)

    def on_step(
        self, step: int, seconds: float, reports: Sequence[StepReport], spec: ScheduleSpec | None
    ) -> RepartitionQuery | None:
        """Add the measurements of a step; return a query if a search for another partition is to start now.

        Steps during which a copy of a stage's state was sent are ignored.

        Args:
            seconds: duration of the step.
            reports: reports of all workers on the step.
            spec: schedule of the step; None if it is that of the plan.
        """
        samples = [report.sample for report in reports if report.sample is not None]
        if not self.measures or len(samples) < len(reports) or any(report.copying for report in reports):
            return None
        return self._replanner.on_step(step, seconds, samples, spec)

    def search(self, query: RepartitionQuery) -> None:
        """Search for a better partition, and offer it if the time saved exceeds the pause; callable from any thread."""
        stages = query.plan.partition.num_stages
        basis = another(self._basis, self._first, num_stages=stages, num_workers=stages)
        offer = answer(basis.request, query, self._min_gain)
        if offer is not None:
            self._offer(offer)

    def _line(self, plan: Plan) -> Cluster:
        """Return the workers of a plan as a cluster, with their memory limits.

        The first plan has the devices of the described cluster; workers of later plans are assumed to be equal.
        """
        return self._limits.on(line_of(plan, self._basis.cluster if plan.generation == 0 else None, ASSUMED_LINK))
