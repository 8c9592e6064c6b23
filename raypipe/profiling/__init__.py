"""Profiling: seconds and bytes of every operation of a captured model, measured or estimated.

    capture --> steps.py: one operation at a time --> operations.py: seconds  --> measure.py: Profile, within a budget
                                                      workspace.py: bytes     --^
                                                      FLOPs and bytes         --> estimate.py: Profile, without a run
    rates.py: speed of a device ------------------------------------------------^

A measurement runs micro-batches on one CPU thread, in this process. It takes the seconds of the forward, of the
backward for inputs and of the backward for parameters with the sums of their gradients, and the bytes that autograd
keeps between forward and backward.
"""

from __future__ import annotations

from raypipe.profiling.estimate import estimate_graph, in_seconds_of
from raypipe.profiling.measure import PROFILE_BUDGET_S, Progress, powers_of_two, profile_graph
from raypipe.profiling.rates import Rates, measure_rates

__all__ = [
    "PROFILE_BUDGET_S",
    "Progress",
    "Rates",
    "estimate_graph",
    "in_seconds_of",
    "measure_rates",
    "powers_of_two",
    "profile_graph",
]
