"""All plans of a run, numbered by generation: 0, 1, ... Later plans compute the same mini-batches on other workers.

Lanes are partial sums of gradients, each computed by one replica; only a run with several lanes can have replicas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import groups_in
from raypipe.planner.controller import Choice
from raypipe.planner.elastic import counts_for, counts_of, regrouped
from raypipe.planner.search import Decision, Request
from raypipe.planner.segments import flow_of
from raypipe.run.plans.blueprint import Blueprint, assemble
from raypipe.run.plans.later import MemoryLimits, another, for_workers, later_plan
from raypipe.run.spec import PlanInForce, Planned, RequestedSize


def regroup(made: PlanInForce, counts: tuple[int, ...], generation: int) -> PlanInForce:
    """Create a plan of the stages of ``made`` with other numbers of replicas.

    Args:
        counts: replicas of each group, which are the workers that hold the same stages; see planner/elastic.py.
        generation: number of the new plan.
    """
    planned = made.planned
    plan = dataclasses.replace(regrouped(planned.plan, counts), generation=generation)
    setup = dataclasses.replace(made.setup, homes=plan.schedule.wiring.homes, generation=generation, addresses=())
    assert plan.spec is not None, "a plan with lanes has the specification of its schedule"
    retune = made.retune
    if retune is not None:
        retune = dataclasses.replace(retune, choice=Choice(plan.spec))
    # Rows are made on first use.
    planned = Planned(plan, planned.budgets)
    return PlanInForce(planned, setup, {}, predicted=None, predicted_step_s=0.0, flow=flow_of(plan), retune=retune)


def wanted_workers(request: Request, plan: Plan, requested: RequestedSize | None) -> int:
    """Return the number of workers that a run with several lanes should have, including lost workers; 0 with one lane.

    Args:
        requested: last requested size; None if no resize was requested.
    """
    return sum(_wanted(request, plan, requested)) if plan.schedule.wiring.lanes > 1 else 0


def _wanted(request: Request, plan: Plan, requested: RequestedSize | None) -> tuple[int, ...]:
    """Return how many workers each group (the workers of the same stages) should have, including lost workers.

    Args:
        plan: plan of this run, for the values that the request leaves to the planner.
        requested: last requested size; None if no resize was requested.
    """
    homes, stages = plan.schedule.wiring.homes, plan.partition.num_stages
    request = request if requested is None else requested.of(request)
    wanted = request.requested_stages
    if stages != wanted or not (request.replicated or requested):
        return counts_of(homes)
    by_home = dict(zip(homes, request.replicas_of(stages), strict=True))
    return tuple(by_home[group] for group in groups_in(homes))


class Plans:
    """Plans of one run: methods make later plans, and the caller sets ``made`` once the workers run a new plan.

    A group is the set of workers that hold the same stages. A generation is the number of a plan.

    Attributes:
        made: assembled plan for which the workers are configured.
        requested: last requested size; None if no resize was requested.
        first: plan with which this driver began; it fixes the micro-batches.
        limits: memory limits for later plans.
    """

    def __init__(self, blueprint: Blueprint, made: PlanInForce, requested: RequestedSize | None = None) -> None:
        self._blueprint, self.made, self.first, self.requested = blueprint, made, made.plan, requested
        self._whole: dict[int, PlanInForce] = {}  # each generation as it was planned
        self._kept(made)
        self.limits = MemoryLimits(blueprint.basis, self.first)

    def num_stages(self, generation: int) -> int:
        """Return the number of stages in the plan of this number; 0 if this driver does not have that plan."""
        return len(self._whole[generation].setup.programs) if generation in self._whole else 0

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of workers that each group should have, including lost workers; empty if none has several."""
        plan = self.made.plan
        if self.requested is None and plan.partition.num_stages == self.first.partition.num_stages:
            plan = self.first
        counts = _wanted(self._blueprint.basis.request, plan, self.requested)
        return counts if max(counts) > 1 else ()

    def planned_for(self, workers: int) -> Planned:
        """Make a plan for ``workers`` workers, without storing it; callable from any thread.

        Raises:
            PlanError: no such plan exists.
        """
        basis = self._blueprint.basis
        request = basis.request if self.requested is None else self.requested.of(basis.request)
        return later_plan(for_workers(basis, self.first, request, workers))

    def of_stages(self, num_stages: int, num_workers: int, decision: Decision | None = None) -> PlanInForce:
        """Make and assemble a plan of these sizes, with the next plan number.

        Args:
            decision: partition and schedule to use; None lets the planner decide.

        Raises:
            PlanError: no such plan exists.
        """
        cluster = None if decision is None else decision.cluster
        basis = another(
            self._blueprint.basis, self.first, num_stages=num_stages, num_workers=num_workers, cluster=cluster
        )
        planned = later_plan(basis, decision)
        return self.assembled(planned if decision is None else self.limits.capped(planned))

    def resized(self, num_stages: int, replicas: int | tuple[int, ...] | None) -> PlanInForce:
        """Make and assemble a plan with other numbers of stages and replicas, with the next plan number.

        Args:
            replicas: replicas per stage, one number for all stages or one for each; None for the configured number.

        Raises:
            PlanError: no such plan exists, or the run cannot have it; the message has the field.
        """
        basis, workers = self._blueprint.basis, None
        lanes, configured = self.first.schedule.wiring.lanes, basis.request.replicas
        if replicas is None and configured is None and lanes > 1:  # the planner chooses them
            workers = max(num_stages, self.made.setup.num_workers)
        elif replicas is None:
            replicas = configured or 1
            if isinstance(replicas, tuple) and len(replicas) != num_stages:
                raise PlanError(
                    f"num_replicas={replicas} has numbers for {len(replicas)} stages. Set it for {num_stages}, as "
                    f"in resize({num_stages}, num_replicas=1)."
                )
        basis = another(basis, self.first, num_stages=num_stages, num_workers=workers, replicas=replicas)
        return self.assembled(later_plan(basis))

    def assembled(self, planned: Planned) -> PlanInForce:
        """Assemble a plan, with the next plan number."""
        planned = replace(planned, plan=replace(planned.plan, generation=self._next))
        return self._kept(assemble(self._blueprint, planned))

    def for_fewer(self, workers: int) -> PlanInForce:
        """Assemble a plan for fewer workers: the same stages with fewer replicas if possible, else fewer stages.

        Raises:
            PlanError: no such plan exists, or the run cannot have it.
        """
        if self.made.flow is not None:
            raise PlanError(
                f"The schedule {self.first.schedule.kind!r} needs all of its replicas: with fewer, the ages of "
                "its weights and so the results would change."
            )
        if (counts := counts_for(self.replicas, workers, self.made.setup.homes)) is None:
            return self.assembled(self.planned_for(workers))
        return self._kept(regroup(self.made, counts, self._next))

    def regrouped(self, counts: tuple[int, ...]) -> PlanInForce:
        """Assemble the same stages with other numbers of replicas, under the same plan number.

        With the same number the workers' in-memory copies of their state stay valid.

        Args:
            counts: number of replicas of each group (the workers that hold the same stages).
        """
        generation = self.made.setup.generation
        made = self._whole[generation]
        return made if counts_of(made.setup.homes) == counts else regroup(made, counts, generation)

    def counted_anew(self, counts: tuple[int, ...]) -> PlanInForce:
        """Assemble the same stages with other numbers of replicas, under the next plan number.

        With another number the replicas divide their optimizer state anew.

        Args:
            counts: number of replicas of each group (the workers that hold the same stages).
        """
        return self._kept(regroup(self._whole[self.made.setup.generation], counts, self._next))

    @property
    def _next(self) -> int:
        return max(self._whole) + 1

    def _kept(self, made: PlanInForce) -> PlanInForce:
        self._whole.setdefault(made.setup.generation, made)
        return made
