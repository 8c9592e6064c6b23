"""The controller: it measures links and stages during training, and changes the schedule if that shortens steps.

    executors' spans ---> StageSample --+
    frames' headers ----> LinkSample  --+--> StepDone --> Controller.handle --> [ControllerDecision, ...]
                                                              |                    |
         Observer:   estimates of each link and worker        |                    +--> events.jsonl, metrics
         after:      the next of the four states              |                    +--> choice: rows of the next flush
         search:     the quickest k, r and codecs that fit,   |
                     replayed on the measured messages        |
         Comparison: predicted against achieved gain          +--> to_json, for a restarted driver

It has no clock, thread, socket or randomness: the driver passes events in and applies decisions. A new choice replaces
rows of actions, and nothing is rebuilt. Steps are modelled as in ``planner.simulator``, but every message has its own
seconds.

Each replica of a stage is a worker with links of its own (``planner.replay``). Codecs and slack are chosen by hop, for
all of its links.

Left out: links that share one wire, the processor time that a codec takes from a stage, and the summing of gradients
between replicas, which differs between candidates only by how much of it overlaps with computing.
"""

from __future__ import annotations

from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.planner.controller.config import ControllerConfig
from raypipe.planner.controller.controller import Controller
from raypipe.planner.controller.events import Choice, ControllerDecision, StepDone, Verdict
from raypipe.planner.controller.links import LinkEstimator
from raypipe.planner.controller.measured import Measured, predicted_s
from raypipe.planner.controller.memory_budget import (
    UNKNOWN_IN_FLIGHT,
    MemoryBudget,
    budgets_of,
    fits,
    unknown_budgets,
    why_not,
)
from raypipe.planner.controller.retuning import Scored, SearchResult, search

__all__ = [
    "NO_CODEC", "UNKNOWN_IN_FLIGHT", "Choice", "CodecCost", "Controller", "ControllerConfig", "ControllerDecision",
    "LinkEstimator", "Measured", "MemoryBudget", "Scored", "SearchResult", "StepDone", "Verdict", "budgets_of", "fits",
    "predicted_s", "search", "unknown_budgets", "why_not",
]  # fmt: skip
