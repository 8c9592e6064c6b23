"""The controller: measure the links while training runs, and turn the schedule when that pays.

    executors' spans ---> StageSample --+
    frames' headers ----> LinkSample  --+--> StepDone --> Controller.handle --> [ControllerDecision, ...]
                                                              |                    |
         Observer:   FIFO model of each link, medians of      |                    +--> events.jsonl, metrics
                     workers                                  |                    +--> choice: rows of the next flush
         transition: one of four states, one step on          |
         search:     k, r, codecs that fit, run on the        |
                     measured messages; the quickest          |
         Comparison: predicted against achieved gain          +--> to_json, for a driver that comes back

Pure: no clock, no thread, no socket, no chance. The driver feeds it and carries out what it says; nothing is rebuilt
for it, a retune exchanges rows of actions. Its model is ``planner.simulate``'s, with a time of its own for every
message.

Replicas of a stage are workers with links of their own (``planner.search.routes``); codecs and slack are those of all
links of a hop.

Left out: links that share one wire, the processor time that a codec takes from a stage, and what replicas take to sum
their gradients, which is the same for all candidates but for what hides it.
"""

from __future__ import annotations

from raypipe.planner.control.choice import NO_CODEC, Choice, CodecCost
from raypipe.planner.control.config import ControllerConfig
from raypipe.planner.control.controller import Controller
from raypipe.planner.control.events import ControllerDecision, StepDone, Verdict
from raypipe.planner.control.links import LinkEstimator
from raypipe.planner.control.measured import Measured, predicted_s
from raypipe.planner.control.memory_budget import (
    UNKNOWN_IN_FLIGHT,
    MemoryBudget,
    budgets_of,
    fits,
    unknown_budgets,
    why_not,
)
from raypipe.planner.control.search import Found, Scored, search

__all__ = [
    "NO_CODEC",
    "UNKNOWN_IN_FLIGHT",
    "Choice",
    "CodecCost",
    "Controller",
    "ControllerConfig",
    "ControllerDecision",
    "Found",
    "LinkEstimator",
    "Measured",
    "MemoryBudget",
    "Scored",
    "StepDone",
    "Verdict",
    "budgets_of",
    "fits",
    "predicted_s",
    "search",
    "unknown_budgets",
    "why_not",
]
