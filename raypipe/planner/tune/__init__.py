"""From what the user asked for to one Plan, with a reason for every choice that was left to us.

    request --+
    profile --+--> decide (number of stages, cut, micro-batches, slack) --> plan_of --> Plan with its prediction
    cluster --+
    nothing profiled: make_partition --> make_plan, the plan of equal parameters

    a run that goes on: again (workers have other speeds), lighter (one ran out of memory) --> Decision

Left out: the choice of devices among those offered beyond what the partition solvers do.
"""

from __future__ import annotations

from raypipe.planner.tune.choose import ASSUMED_LINK, decide, plan_of
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.predict import costs_of, step_of, timeline_of
from raypipe.planner.tune.profile_table import profile_table
from raypipe.planner.tune.request import DEFAULT_STAGES, Request, microbatches
from raypipe.planner.tune.rescale import seconds_by_count
from raypipe.planner.tune.resolve import build_schedule, memory_model, spec_of
from raypipe.planner.tune.solvers import make_partition
from raypipe.planner.tune.unprofiled import make_plan
from raypipe.planner.tune.weights import weight_policy, weight_reason

__all__ = [
    "ASSUMED_LINK",
    "DEFAULT_STAGES",
    "Decision",
    "Request",
    "build_schedule",
    "costs_of",
    "decide",
    "make_partition",
    "make_plan",
    "memory_model",
    "microbatches",
    "plan_of",
    "profile_table",
    "seconds_by_count",
    "spec_of",
    "step_of",
    "timeline_of",
    "weight_policy",
    "weight_reason",
]
