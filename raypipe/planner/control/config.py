"""What the controller of a run may turn, and how patient it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from raypipe.errors import PlanError
from raypipe.planner.control.choice import Choice, CodecCost
from raypipe.planner.control.memory_budget import MemoryBudget

__all__ = ["LINK_DRIFT_THRESHOLD", "MIN_GAIN", "ControllerConfig"]

LINK_DRIFT_THRESHOLD, MIN_GAIN = 0.25, 0.03
"""Where nobody says; see ControllerConfig."""


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """What the controller may do, and how patient it is.

    Attributes:
        mode: the schedule asked for; "auto" turns r and whether backwards are split, "kfkb" k, "slack" and
            "zb-h1" r, any other only codecs and M.
        choice: what the run begins with.
        budgets: memory by stage.
        forward_codecs, backward_codecs: allowed besides "none", the mildest first.
        microbatch_seconds: (M, seconds of one micro-batch, on any stage or on all: their ratios count) where M may
            change (retune_microbatches); empty where it stays.
        retune_interval_steps: most steps between two looks; a young run is looked at sooner.
        link_drift_threshold: relative change of a link, or of a stage, that is looked at at once.
        min_gain: relative gain in step time that is worth a switch.
        frozen: look and tell, but never switch: what a benchmark compares with.
    """

    mode: str
    choice: Choice
    budgets: tuple[MemoryBudget, ...]
    forward_codecs: tuple[CodecCost, ...] = ()
    backward_codecs: tuple[CodecCost, ...] = ()
    microbatch_seconds: tuple[tuple[int, float], ...] = ()
    retune_interval_steps: int = 20
    link_drift_threshold: float = LINK_DRIFT_THRESHOLD
    min_gain: float = MIN_GAIN
    frozen: bool = False

    def __post_init__(self) -> None:
        if not self.budgets:
            raise PlanError("The controller has no budgets: give one MemoryBudget per stage.")
        if self.retune_interval_steps < 1 or not min(self.link_drift_threshold, self.min_gain) > 0:
            raise PlanError(
                f"retune_interval_steps={self.retune_interval_steps}, "
                f"link_drift_threshold={self.link_drift_threshold}, min_gain={self.min_gain}: "
                "give at least 1 step and numbers above 0."
            )
        # Whose memory the planner does not know cannot be kept within it.
        self.choice.memory_model()

    @property
    def identity(self) -> str:
        """What a controller's state belongs to: its measurements and its choice mean nothing to another plan."""
        codecs = [[codec.name for codec in codecs] for codecs in (self.forward_codecs, self.backward_codecs)]
        budgets = [asdict(budget) for budget in self.budgets]
        counts = [count for count, _ in self.microbatch_seconds]
        return json.dumps([self.mode, asdict(self.choice), budgets, codecs, counts])

    def name(self, choice: Choice) -> str:
        """A choice in words, with its micro-batches where their number may change."""
        return f"{choice}, M={choice.num_microbatches}" if self.microbatch_seconds else str(choice)
