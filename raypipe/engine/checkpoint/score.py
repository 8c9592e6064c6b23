"""The numbers of an evaluation join the manifest of the checkpoint that was saved before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raypipe.engine.checkpoint.find import read_manifest
from raypipe.engine.checkpoint.manifest import MANIFEST, finite, to_json
from raypipe.engine.storage import Place

__all__ = ["score"]


def score(checkpoint: Place, metrics: Mapping[str, float]) -> bool:
    """Add numbers to the manifest of a checkpoint; whether it did not have them.

    Raises:
        CheckpointError: the manifest is damaged and stays so, or the place is full, forbidden or unreachable.
    """
    found = read_manifest(checkpoint)
    known = {**found.metrics, **finite(metrics)}
    if known == found.metrics:
        return False
    checkpoint.write_bytes(MANIFEST, to_json(replace(found, metrics=known)))
    return True
