"""The controller's state as JSON values, for a driver that comes back."""

from __future__ import annotations

from typing import Any

from raypipe.planner.control.choice import Choice
from raypipe.planner.control.comparison import Comparison
from raypipe.planner.control.memory_budget import MemoryBudget
from raypipe.planner.control.peaks import PeakMemory
from raypipe.planner.control.states import Confirm, Known, Measure, Quiet, State, Trial
from raypipe.planner.control.uncompressed import UncompressedTimes

__all__ = ["state_from_dict", "state_to_dict"]

_STATES = {kind.__name__: kind for kind in (Measure, Confirm, Trial, Quiet)}
_NUMBERS = ("step", "steps", "search_at", "failed")


def state_to_dict(state: State) -> dict[str, Any]:
    """For JSON."""
    known = state.known
    found: dict[str, Any] = {
        "state": type(state).__name__,
        "wanted": known.wanted.to_dict(),
        "extra_bytes": [budget.extra_bytes for budget in known.memory.budgets],
        "fullest_bytes": known.memory.fullest_bytes,
        "uncompressed": [known.uncompressed.seconds, known.uncompressed.num_microbatches, known.uncompressed.until],
        "recent": known.recent,
        "news_searches": known.news_searches,
        **{name: getattr(known, name) for name in _NUMBERS},
    }
    match state:
        case Trial(_, comparison):
            found["comparison"] = comparison.to_dict()
        case Quiet(_, since, until):
            found |= {"since": since, "until": until}
    return found


def state_from_dict(found: dict[str, Any], budgets: tuple[MemoryBudget, ...]) -> State:
    """Inverse of ``state_to_dict``, as JSON keeps it.

    Args:
        budgets: of the run, before anything was measured.

    Raises:
        KeyError, TypeError, ValueError: it is no such state.
    """
    seconds, count, until = found["uncompressed"]
    known = Known(
        Choice.from_dict(found["wanted"]),
        PeakMemory(budgets, tuple(found["fullest_bytes"])).with_extra(found["extra_bytes"]),
        UncompressedTimes(tuple(seconds), count, until),
        tuple((step, step_s) for step, step_s in found["recent"]),
        news_searches=tuple(found["news_searches"]),
        **{name: found[name] for name in _NUMBERS},
    )
    kind = _STATES[found["state"]]
    if kind is Trial:
        return Trial(known, Comparison.from_dict(found["comparison"]))
    if kind is Quiet:
        return Quiet(known, found["since"], found["until"])
    return Confirm(known) if kind is Confirm else Measure(known)
