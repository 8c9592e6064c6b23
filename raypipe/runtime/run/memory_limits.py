"""What workers may hold that have run out of memory: plans that cut the stages of the same workers again keep to it."""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError, RanOut
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.planner.replan import can_be_cut_again
from raypipe.planner.tune import ASSUMED_LINK, Decision
from raypipe.planner.tune.again import line_of
from raypipe.planner.tune.lighter import lighter
from raypipe.runtime.run.later import another
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis, known_request

__all__ = ["MemoryLimits"]


class MemoryLimits:
    """Of one run, by worker.

    Args:
        first: plan of the run, which says how mini-batches are parted.
    """

    def __init__(self, basis: PlanBasis, first: Plan) -> None:
        self._basis, self._first = basis, first
        self._most_bytes: dict[int, int] = {}

    def lighter(self, plan: Plan, ran_out: RanOut) -> Decision:
        """A plan for the same workers in which the one that ran out holds less; its limit is kept.

        Raises:
            PlanError: there is none; names worker, bytes and fields.
        """
        profile, stages = self._basis.profile, plan.partition.num_stages
        if profile is None or not can_be_cut_again(plan):
            raise PlanError(
                "a plan that needs less can only be found for a model with a profile, in several stages with a worker "
                "each, under a synchronous schedule."
            )
        basis = another(self._basis, self._first, num_stages=stages, num_workers=stages)
        found = lighter(known_request(basis), profile, plan, self.on(line_of(plan, None, ASSUMED_LINK)), *ran_out)
        limit = found.cluster.devices[ran_out.worker].memory_bytes
        assert limit is not None, "lighter() has set it"
        self._most_bytes[ran_out.worker] = limit
        return found

    def capped(self, planned: Planned) -> Planned:
        """The same plan with no more micro-batches in flight on these workers than it has there itself.

        Their bytes were found out by running out of memory, so the plan's count of them, by which the controller would
        take more, is known to be wrong.
        """
        budgets, prediction = list(planned.budgets), planned.plan.prediction
        assert prediction is not None, "of a plan made with a profile"
        for worker in [worker for worker in self._most_bytes if worker < len(budgets)]:  # there may be fewer by now
            stage, budget = prediction.stages[worker], budgets[worker]
            most = min(filter(None, (stage.in_flight, budget.most_in_flight)))
            budgets[worker] = dataclasses.replace(budget, most_in_flight=most)
        return dataclasses.replace(planned, budgets=tuple(budgets))

    def on(self, line: Cluster) -> Cluster:
        """The same workers with these limits."""
        devices = (
            dataclasses.replace(device, memory_bytes=min(filter(None, (device.memory_bytes, self._most_bytes.get(at)))))
            if at in self._most_bytes
            else device
            for at, device in enumerate(line.devices)
        )
        return Cluster(tuple(devices), line.links)
