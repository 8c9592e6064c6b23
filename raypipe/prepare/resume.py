"""What a run takes from its storage before it begins: a free name, and micro-batches and lanes that are kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["free_name", "kept_lanes", "kept_microbatches", "kept_plan"]


def free_name(storage: Place, name: str) -> str:
    """The name itself, or ``<name>-2``, ``<name>-3`` and so on: the first that has no folder."""
    found = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in found if not storage.exists(candidate))


def kept_plan(place: Place) -> Mapping[str, Any]:
    """The plan of the run in this folder, as JSON has it; empty where there is no checkpoint to go on from."""
    try:
        found, _ = find_checkpoint(place)
        plan = json.loads(place.read_bytes("plan.json")) if found is not None else {}
    except (CheckpointError, ValueError):
        return {}  # what is wrong with the folder is told when the run goes back to its checkpoint
    return plan if isinstance(plan, dict) else {}


def kept_microbatches(plan: Mapping[str, Any], minibatch_size: int | str) -> int | None:
    """Micro-batches per mini-batch of a plan from ``kept_plan``; None where there is none to go on with.

    Args:
        minibatch_size: of the run that is being planned; "auto" for any. With another one there is nothing to keep.
    """
    try:
        return int(plan["num_microbatches"]) if minibatch_size in ("auto", plan["minibatch_size"]) else None
    except (KeyError, TypeError, ValueError):
        return None


def kept_lanes(plan: Mapping[str, Any]) -> int | None:
    """Lanes that gradients are summed in, of a plan from ``kept_plan``; None where there is none to go on with."""
    try:
        return int(plan["schedule"]["wiring"].get("lanes", 1))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
