"""What a run with replicas is started with anew when some of them are lost or come back; programs stay as they are."""

from __future__ import annotations

import dataclasses

from raypipe.planner.control import Choice
from raypipe.planner.regroup import regrouped
from raypipe.planner.rows import flow_of
from raypipe.runtime.run.blueprint import Assembled
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.spec import PlanInForce

__all__ = ["regroup"]


def regroup(planned: Planned, made: Assembled, counts: tuple[int, ...], generation: int) -> tuple[Planned, Assembled]:
    """The same stages with so many replicas each.

    Args:
        planned, made: of any plan of these stages.
        counts: replicas by group, see planner/regroup.py.
        generation: of the plan that it becomes.
    """
    plan = dataclasses.replace(regrouped(planned.plan, counts), generation=generation)
    setup = dataclasses.replace(made.setup, homes=plan.schedule.wiring.homes, generation=generation, addresses=())
    assert plan.spec is not None, "a plan with lanes says what its schedule was made from"
    retune = made.plan.retune
    if retune is not None:
        retune = dataclasses.replace(retune, choice=Choice(plan.spec))
    # Rows are made when they are wanted first.
    force = PlanInForce(plan, {}, predicted=None, predicted_step_s=0.0, flow=flow_of(plan), retune=retune)
    return Planned(plan, planned.budgets), Assembled(made.run, setup, force)
