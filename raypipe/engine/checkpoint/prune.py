"""Deletes surplus checkpoints, by the rules of ray.train.CheckpointConfig.

num_to_keep=2, by loss, "min"     step 100  0.9   deleted
                                  step 200  0.3   kept, best
                                  step 300  0.5   kept, second best
                                  step 400  0.8   kept, newest
"""

from __future__ import annotations

from typing import Literal

from raypipe.engine.checkpoint.best import rank
from raypipe.engine.checkpoint.find import read_manifest
from raypipe.engine.checkpoint.manifest import MANIFEST, Manifest
from raypipe.engine.checkpoint.snapshot import clear, step_folders
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, ConfigError

__all__ = ["prune"]


def prune(
    run: Place,
    num_to_keep: int | None,
    score_attribute: str | None = None,
    score_order: Literal["max", "min"] = "max",
) -> list[str]:
    """Keep the newest checkpoint and the best ``num_to_keep``; returns the names of the deleted ones.

    Folders without a manifest that are older than the newest checkpoint are what an interrupted save or deletion
    left; they go too. A damaged manifest is left for somebody to look at.

    Args:
        num_to_keep: None keeps all.
        score_attribute: a metric in the manifests; None prefers newer ones. Without the metric a checkpoint is worst.

    Raises:
        ConfigError: num_to_keep below 1, or an unknown order.
        CheckpointError: the place failed.
    """
    if num_to_keep is None:
        return []
    if type(num_to_keep) is not int or num_to_keep < 1:
        raise ConfigError(f"num_to_keep={num_to_keep!r} is not possible: give an integer of at least 1, or None.")
    if score_order not in ("max", "min"):
        raise ConfigError(f"checkpoint_score_order={score_order!r} is not possible: give 'max' or 'min'.")
    found, leftovers = _survey(run)
    if not found:
        return []
    newest = max(found)
    ranks = {step: rank(manifest, score_attribute, score_order) for step, (_, manifest) in found.items()}
    keep = {newest, *sorted(found, key=lambda step: (ranks[step], step))[-num_to_keep:]}
    surplus = [name for step, (name, _) in found.items() if step not in keep]
    surplus += [name for step, name in leftovers if step < newest]
    for name in sorted(surplus):
        clear(run, name)
    return sorted(surplus)


def _survey(run: Place) -> tuple[dict[int, tuple[str, Manifest]], list[tuple[int, str]]]:
    """Checkpoints by step, and folders without a manifest."""
    found: dict[int, tuple[str, Manifest]] = {}
    leftovers = []
    for step, name in step_folders(run):
        if not (run / name).exists(MANIFEST):
            leftovers.append((step, name))
            continue
        try:
            found[step] = name, read_manifest(run / name)
        except CheckpointError:
            continue
    return found, leftovers
