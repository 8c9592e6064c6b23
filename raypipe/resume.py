"""What a run that goes on takes from its folder before it is planned anew."""

from __future__ import annotations

import json

from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["kept_microbatches"]


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
