"""Planning: from a request to one Plan, with a reason for every choice that the user left open.

    request --+
    profile --+--> decide (number of stages, cut, micro-batches, slack) --> plan_of --> Plan with its prediction
    cluster --+
    without a profile: make_partition --> make_plan, a plan whose stages have about equal numbers of parameters

Left out: a choice among the offered devices, except where a partition solver makes one.
"""

from __future__ import annotations

from raypipe.planner.search.choose import ASSUMED_LINK, decide, plan_of
from raypipe.planner.search.make_plan import make_partition, make_plan
from raypipe.planner.search.predict import costs_of, step_of, timeline_of
from raypipe.planner.search.problem import Decision, seconds_by_count
from raypipe.planner.search.reasons import profile_table
from raypipe.planner.search.request import DEFAULT_STAGES, Request, microbatches
from raypipe.planner.search.schedule_settings import build_schedule, memory_model, spec_of, weight_policy, weight_reason

__all__ = [
    "ASSUMED_LINK", "DEFAULT_STAGES", "Decision", "Request", "build_schedule", "costs_of", "decide", "make_partition",
    "make_plan", "memory_model", "microbatches", "plan_of", "profile_table", "seconds_by_count", "spec_of", "step_of",
    "timeline_of", "weight_policy", "weight_reason",
]  # fmt: skip
