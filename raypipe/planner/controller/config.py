"""Configuration of a run's controller: the settings that it may change, and its thresholds.

A choice (``Choice``) is one schedule together with the codecs of all hops.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from raypipe.errors import PlanError
from raypipe.ir.communication import CodecCost
from raypipe.planner.controller.events import Choice
from raypipe.planner.controller.memory_budget import MemoryBudget
from raypipe.planner.cost.tolerance import MIN_GAIN

LINK_DRIFT_THRESHOLD = 0.25
"""Default of ``ControllerConfig.link_drift_threshold``."""


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Permissions and thresholds of the controller.

    Attributes:
        mode: the requested schedule, which decides what may change: slack (r) and the splitting of backwards with
            "auto", the group size (k) with "kfkb", slack with "slack" and "zb-h1". Codecs, and M, the number of
            micro-batches, may change with any.
        choice: initial choice.
        budgets: memory budget of each stage.
        forward_codecs, backward_codecs: codecs that may be used besides "none", the one with the least loss first.
        microbatch_seconds: if M may change (retune_microbatches), (M, seconds of one micro-batch) for every permitted
            M; else empty. Only the ratios of the seconds are used.
        retune_interval_steps: most steps between two searches; they are more frequent at the beginning of a run.
        link_drift_threshold: relative change of a link, or of a stage, that causes a search at once.
        min_gain: relative gain in step time that is worth a switch.
        frozen: True to search and report, but never switch, as a baseline for benchmarks.
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
        # The memory of these schedules is not modelled, so no budget could be enforced.
        self.choice.memory_model()

    @property
    def lossless(self) -> ControllerConfig:
        """Copy with fewer permissions, for a switch whose effect the controller does not check afterwards.

        Codecs and the number of micro-batches may not change, and with mode "auto" backwards are not split.
        """
        mode = "slack" if self.mode == "auto" else self.mode
        return replace(self, mode=mode, forward_codecs=(), backward_codecs=(), microbatch_seconds=())

    @property
    def identity(self) -> str:
        """Text that is saved with the controller's state; only a run with the same text can restore the state."""
        codecs = [[codec.name for codec in codecs] for codecs in (self.forward_codecs, self.backward_codecs)]
        budgets = [asdict(budget) for budget in self.budgets]
        counts = [count for count, _ in self.microbatch_seconds]
        return json.dumps([self.mode, asdict(self.choice), budgets, codecs, counts])

    def name(self, choice: Choice) -> str:
        """Describe a choice, with its number of micro-batches if that may change."""
        return f"{choice}, M={choice.num_microbatches}" if self.microbatch_seconds else str(choice)
