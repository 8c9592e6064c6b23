"""Where nothing fits: how many more such devices would do, and how much more memory, as one sentence."""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device
from raypipe.ir.plan_table import human_bytes
from raypipe.planner.partition.fit import solve_within
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tune.problem import Problem
from raypipe.planner.tune.request import microbatches
from raypipe.planner.tune.resolve import memory_model
from raypipe.planner.tune.solvers import quick_cut

__all__ = ["what_would_fit"]

MOST_TIMES = 8
"""Times as many devices, or as much memory, beyond which nobody is advised."""


def what_would_fit(problem: Problem) -> str:
    """A sentence, or "" where only other changes help.

    It is about the thriftiest run: 1F1B where the schedule is open, and micro-batches as small as they may be.
    """
    request, devices = problem.request, problem.cluster.devices
    caps = [cap for d in devices if (cap := _least(d.memory_bytes, request.memory_limit_bytes)) is not None]
    if not problem.searches or not caps or request.replicated:
        return ""
    thrifty = dataclasses.replace(request, schedule="1f1b" if request.schedule == "auto" else request.schedule)
    minibatch, size, count = microbatches(request, len(devices))
    if request.num_microbatches is None:
        size = request.smallest_microbatch(minibatch)
        count = -(-minibatch // size)
    places = len(problem.profile.graph.cut_positions()) + 1
    stages = request.num_stages

    def fits(number: int, cap: int) -> bool:
        like = Device("device", 1.0, cap)
        try:
            limits = Limits(num_stages=stages, memory=memory_model(thrifty, stages or number, count, size))
            solve_within(quick_cut(request), problem.short, Cluster((like,) * number), limits)
        except PlanError:
            return False
        return True

    found = []
    most = min(MOST_TIMES * len(devices), places)
    if stages is None and (number := next((n for n in range(len(devices) + 1, most + 1) if fits(n, min(caps))), 0)):
        found.append(f"{number} workers of {human_bytes(min(caps))}")
    low, high = min(caps), MOST_TIMES * min(caps)
    if fits(len(devices), high):
        while high - low > max(1, min(caps) // 100):
            middle = (low + high) // 2
            low, high = (low, middle) if fits(len(devices), middle) else (middle, high)
        found.append(f"{len(devices)} workers of {human_bytes(high)}")
    if not found:
        return ""
    return f"The least that would do with {count} micro-batches of {size} and {thrifty.schedule}: {' or '.join(found)}."


def _least(*caps: int | None) -> int | None:
    return min((cap for cap in caps if cap is not None), default=None)
