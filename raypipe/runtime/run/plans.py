"""The plans that a run has had, by generation, and the making of later ones: the same mini-batches, other workers."""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import groups_in
from raypipe.planner.regroup import counts_for, counts_of
from raypipe.planner.tune import Decision, Request
from raypipe.runtime.run.blueprint import Assembled, Blueprint, assemble
from raypipe.runtime.run.later import another, for_workers, later_plan
from raypipe.runtime.run.memory_limits import MemoryLimits
from raypipe.runtime.run.planned import Asked, Planned
from raypipe.runtime.run.regroup import regroup

__all__ = ["Plans", "wanted_workers"]


def wanted_workers(request: Request, plan: Plan, asked: Asked | None) -> int:
    """Workers that a run in lanes is to have, also while some of them are lost; 0 of any other run.

    Args:
        plan, asked: see ``_wanted``.
    """
    return sum(_wanted(request, plan, asked)) if plan.schedule.wiring.lanes > 1 else 0


def _wanted(request: Request, plan: Plan, asked: Asked | None) -> tuple[int, ...]:
    """Workers by group that a run is to have, also while some of them are lost.

    Args:
        plan: of this run. What was left to the planner is as this plan has it.
        asked: the size that somebody asked for last.
    """
    homes, stages = plan.schedule.wiring.homes, plan.partition.num_stages
    request = request if asked is None else asked.of(request)
    wanted = request.asked_stages
    if stages != wanted or not (request.replicated or asked):
        return counts_of(homes)
    by_home = dict(zip(homes, request.replicas_of(stages), strict=True))
    return tuple(by_home[group] for group in groups_in(homes))


class Plans:
    """Of one run.

    Args:
        planned, made: what its workers are configured for.

    Attributes:
        made: in force.
        asked: the size that somebody asked for last; None where nobody has.
        first: that this driver began with, which says how mini-batches are parted.
        limits: that later plans keep to.
    """

    def __init__(self, blueprint: Blueprint, planned: Planned, made: Assembled, asked: Asked | None = None) -> None:
        self._blueprint, self.made, self.first, self.asked = blueprint, made, made.plan.plan, asked
        self._planned: dict[int, Planned] = {}
        self._num_stages: dict[int, int] = {}
        self._whole: dict[int, tuple[Planned, Assembled]] = {}  # each generation as it was planned
        self._kept(planned, made)
        self.limits = MemoryLimits(blueprint.basis, self.first)

    @property
    def planned(self) -> Planned:
        """In force."""
        return self._planned[self.made.setup.generation]

    def planned_of(self, made: Assembled) -> Planned:
        """What was made of this one."""
        return self._planned[made.setup.generation]

    def num_stages(self, generation: int) -> int:
        """Of the plan of a generation; 0 where this driver knows none."""
        return self._num_stages.get(generation, 0)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers by group that the run is to have; empty where no stage has several."""
        plan = self.made.plan.plan
        if self.asked is None and plan.partition.num_stages == self.first.partition.num_stages:
            plan = self.first
        found = _wanted(self._blueprint.basis.request, plan, self.asked)
        return found if max(found) > 1 else ()

    def planned_for(self, workers: int) -> Planned:
        """A plan for so many workers. It changes nothing, from any thread.

        Raises:
            PlanError: there is none.
        """
        basis = self._blueprint.basis
        request = basis.request if self.asked is None else self.asked.of(basis.request)
        return later_plan(for_workers(basis, self.first, request, workers))

    def of_stages(self, num_stages: int, num_workers: int, decision: Decision | None = None) -> Assembled:
        """With so many stages, on one worker each or sharing them.

        Raises:
            PlanError: there is none.
        """
        cluster = None if decision is None else decision.cluster
        basis = another(
            self._blueprint.basis, self.first, num_stages=num_stages, num_workers=num_workers, cluster=cluster
        )
        planned = later_plan(basis, decision)
        return self.assembled(planned if decision is None else self.limits.capped(planned))

    def resized(self, num_stages: int, replicas: int | tuple[int, ...] | None) -> Assembled:
        """With so many stages, and so many replicas of each; None for as many as the run was configured with.

        Raises:
            PlanError: there is no such plan, or the run cannot have it; names the field.
        """
        basis, workers = self._blueprint.basis, None
        lanes, configured = self.first.schedule.wiring.lanes, basis.request.replicas
        if replicas is None and configured is None and lanes > 1:  # of the workers that it has
            workers = max(num_stages, self.made.setup.num_workers)
        elif replicas is None:
            replicas = configured or 1
            if isinstance(replicas, tuple) and len(replicas) != num_stages:
                raise PlanError(
                    f"num_replicas={replicas} speaks of {len(replicas)} stages. Say what it is for {num_stages}, as in "
                    f"resize({num_stages}, num_replicas=1)."
                )
        found = another(basis, self.first, num_stages=num_stages, num_workers=workers, replicas=replicas)
        return self.assembled(later_plan(found))

    def assembled(self, planned: Planned) -> Assembled:
        """The run's next plan, with a generation of its own."""
        planned = replace(planned, plan=replace(planned.plan, generation=self._next))
        return self._kept(planned, assemble(self._blueprint, planned))

    def for_fewer(self, workers: int) -> Assembled:
        """The same stages with as many of their replicas as there are workers for; fewer stages for fewer than those.

        Raises:
            PlanError: there is no such plan, or the run cannot have it.
        """
        if self.made.plan.flow is not None:
            raise PlanError(
                f"The schedule {self.first.schedule.kind!r} needs all of its replicas: with fewer its weights would "
                "have other ages, and the run other bits."
            )
        if (counts := counts_for(self.replicas, workers, self.made.setup.homes)) is None:
            return self.assembled(self.planned_for(workers))
        return self._kept(*regroup(self.planned, self.made, counts, self._next))

    def regrouped(self, counts: tuple[int, ...]) -> Assembled:
        """The same stages with other numbers of replicas, whose workers keep their copies: of the same generation.

        Args:
            counts: by group.
        """
        generation = self.made.setup.generation
        planned, made = self._whole[generation]
        if counts_of(made.setup.homes) == counts:
            return self._kept(planned, made)
        return self._kept(*regroup(planned, made, counts, generation))

    def counted_anew(self, counts: tuple[int, ...]) -> Assembled:
        """The same, of the next generation: replicas share out anew what their optimizers keep.

        Args:
            counts: by group.
        """
        planned, made = self._whole[self.made.setup.generation]
        return self._kept(*regroup(planned, made, counts, self._next))

    @property
    def _next(self) -> int:
        return max(self._num_stages) + 1

    def _kept(self, planned: Planned, made: Assembled) -> Assembled:
        self._planned[made.setup.generation] = planned
        self._num_stages[made.setup.generation] = len(made.setup.programs)
        self._whole.setdefault(made.setup.generation, (planned, made))
        return made
