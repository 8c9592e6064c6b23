"""Seconds and bytes of every operation of a captured model.

    capture --> steps.py: one operation at a time --> observe.py: what happens in it  --> measure.py: Profile
                                                                 within a budget      --> within.py: Profile
                                                                 FLOPs and bytes      --> estimate.py: Profile
    rates.py: what a device can do, gpus.py: kinds of GPUs --------------------------------^

What is measured is one micro-batch on one CPU thread, in this process: forward, backward for inputs, backward for
parameters with the sums of their gradients, and the bytes that autograd keeps in between.
"""

from __future__ import annotations

from raypipe.engine.profiling.estimate import estimate_graph, in_seconds_of
from raypipe.engine.profiling.measure import Progress, powers_of_two, profile_graph
from raypipe.engine.profiling.rates import Rates, measure_rates
from raypipe.engine.profiling.within import PROFILE_BUDGET_S, profile_within

__all__ = [
    "PROFILE_BUDGET_S",
    "Progress",
    "Rates",
    "estimate_graph",
    "in_seconds_of",
    "measure_rates",
    "powers_of_two",
    "profile_graph",
    "profile_within",
]
