"""A decision's sentence and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypipe.ir.plan_table import human_s
from raypipe.planner.control.choice import Choice
from raypipe.planner.control.comparison import Comparison, typical_s
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.search import Found

__all__ = ["gains", "numbers_of", "outcome", "sentence", "why"]

Name = Callable[[Choice], str]
"""A choice in words."""


def why(found: Found, gain: float, who: str, name: Name) -> str:
    """What a search has found, for people.

    Args:
        gain: of the best over what runs, relative.
        who: caused the search; "" for nobody.
    """
    occasion = f"{who} changed: " if who else ""
    best, current = name(found.best.choice), name(found.current.choice)
    if found.best.choice == found.current.choice:
        text = f"{occasion}{current} stays, no other is faster than its {human_s(found.current.seconds)} a step"
    else:
        text = (
            f"{occasion}{best} would take {human_s(found.best.seconds)} a step, {current} "
            f"takes {human_s(found.current.seconds)}: a gain of {gain:.1%}"
        )
    if found.best.choice.lossy:
        text += f"; without codecs the best is {name(found.lossless.choice)} with {human_s(found.lossless.seconds)}"
    if found.limit:
        text += f"; {found.limit}"
    return sentence(f"{text}.")


def sentence(text: str) -> str:
    """With a capital."""
    return f"{text[0].upper()}{text[1:]}"


def numbers_of(found: Found, measured: Measured, gain: float, measured_s: float, name: Name) -> dict[str, Any]:
    """What a search has found, for programs; links by hop and direction, of several the slowest."""
    return {
        "current": name(found.current.choice),
        "best": name(found.best.choice),
        "current_s": found.current.seconds,
        "predicted_s": found.best.seconds,
        "measured_s": measured_s,
        "gain": gain,
        "candidates": found.tried,
        "link_s": measured.slowest_s(lambda link: link.transfer_s),
        "link_p90_s": measured.slowest_s(lambda link: link.p90_s),
        "limit": found.limit,
    }


def outcome(trial: Comparison, name: Name) -> str:
    """What a switch was expected to bring, and what it brought; without a full stop."""
    return (
        f"{name(trial.after)} takes {human_s(typical_s(trial.after_s))} a step, {name(trial.before)} took "
        f"{human_s(typical_s(trial.before_s))}: a gain of {trial.achieved_gain:.1%}, where {trial.predicted_gain:.1%} "
        "was predicted"
    )


def gains(trial: Comparison, name: Name) -> dict[str, Any]:
    """Predicted and achieved, for programs."""
    return {
        "before": name(trial.before),
        "after": name(trial.after),
        "before_s": typical_s(trial.before_s),
        "after_s": typical_s(trial.after_s),
        "predicted_gain": trial.predicted_gain,
        "achieved_gain": trial.achieved_gain,
    }
