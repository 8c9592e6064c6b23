"""What a run takes from its storage before it begins: a name that is free, and micro-batches that are to be kept."""

from __future__ import annotations

import itertools
import json

from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["free_name", "kept_microbatches"]


def free_name(storage: Place, name: str) -> str:
    """The name itself, or ``<name>-2``, ``<name>-3`` and so on: the first that has no folder."""
    found = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in found if not storage.exists(candidate))


def kept_microbatches(place: Place, minibatch_size: int | str) -> int | None:
    """Micro-batches per mini-batch of the run in this folder; None where there is none to go on with.

    Args:
        minibatch_size: of the run that is being planned; "auto" for any. With another one there is nothing to keep.
    """
    try:
        found, _ = find_checkpoint(place)
        if found is None:
            return None
        plan = json.loads(place.read_bytes("plan.json"))
        same = minibatch_size in ("auto", plan["minibatch_size"])
        return int(plan["num_microbatches"]) if same else None
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None  # what is wrong with the folder is told when the run goes back to its checkpoint
