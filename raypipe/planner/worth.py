"""Whether another plan pays: what its steps gain until the run ends, against the pause in which the layers move."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Gain", "pays", "rest_steps"]

SURE = 2.0
"""A move must earn its pause this many times: the model leaves things out, and what was measured may not last."""
MOST_PAUSED = 0.05
"""Share of a run's time that moves of its own accord may take, however often what they answer changes."""


class Gain(NamedTuple):
    """What is known of a move.

    Attributes:
        before_s, after_s: seconds of one step, without and with it.
        steps_left: of the run.
        pause_s: for which nothing trains while it is made.
    """

    before_s: float
    after_s: float
    steps_left: int
    pause_s: float

    @property
    def share(self) -> float:
        """Of a step's seconds that is gained; below 0 where steps would take longer."""
        return 1.0 - self.after_s / self.before_s if self.before_s > 0 else 0.0


def pays(gain: Gain, min_gain: float) -> bool:
    """Whether the move is worth it.

    Args:
        min_gain: share of a step's seconds below which nothing is moved.
    """
    earned_s = (gain.before_s - gain.after_s) * gain.steps_left
    return gain.share >= min_gain and earned_s > 0 and earned_s >= SURE * gain.pause_s


def rest_steps(pause_s: float, step_s: float) -> int:
    """Steps until another move may follow one that paused the run for so long."""
    return int(pause_s / MOST_PAUSED / step_s) + 1 if step_s > 0 else 0
