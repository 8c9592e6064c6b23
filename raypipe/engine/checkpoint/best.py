"""Which of a run's checkpoints is the best by one of the numbers in their manifests.

    step 100  eval_accuracy 0.91
    step 200  eval_accuracy 0.94      the best by ("eval_accuracy", "max")
    step 300  eval_accuracy 0.92      the newest

Manifests alone are read; whether a checkpoint's files are good is found out when it is loaded.
"""

from __future__ import annotations

import difflib
from contextlib import suppress

from raypipe.engine.checkpoint.find import read_manifest
from raypipe.engine.checkpoint.manifest import Manifest
from raypipe.engine.checkpoint.snapshot import step_folders
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, ConfigError

__all__ = ["best_checkpoint", "rank"]


def rank(manifest: Manifest, metric: str | None, mode: str) -> float:
    """The better, the larger; a checkpoint without the number is worst.

    Args:
        mode: "max" or "min".
    """
    score = manifest.metrics.get(metric) if metric else None
    if score is None:
        return float("-inf")
    return score if mode == "max" else -score


def best_checkpoint(run: Place, metric: str, mode: str) -> str:
    """The folder of the best checkpoint of a run; of equal ones the newest, as ``prune`` keeps it.

    Args:
        metric: "loss", "grad_norm", "eval_loss" or "eval_<name>" of a metric.
        mode: "max" or "min".

    Raises:
        ConfigError: another mode, or a number that no checkpoint has; says which there are.
        CheckpointError: there is no checkpoint.
    """
    if mode not in ("max", "min"):
        raise ConfigError(f"mode={mode!r} is not possible: give 'max' or 'min'.")
    found = _complete(run)
    scored = [(folder, manifest) for folder, manifest in found if metric in _numbers(manifest)]
    if not scored:
        known = sorted({name for _, manifest in found for name in _numbers(manifest)})
        close = difflib.get_close_matches(metric, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"they have {', '.join(known)}."
        raise ConfigError(
            f"No checkpoint of {run} has a number {metric!r}: {hint} A checkpoint has those of an evaluation where one "
            "was made at its step: let eval_interval_steps and checkpoint_interval_steps meet, or name the number in "
            "CheckpointConfig(checkpoint_score_attribute=...)."
        )
    return max(scored, key=lambda one: (rank(one[1], metric, mode), one[1].step))[0]


def _complete(run: Place) -> list[tuple[str, Manifest]]:
    found = []
    for _, name in step_folders(run):
        with suppress(CheckpointError):  # being saved, or damaged
            found.append((str(run / name), read_manifest(run / name)))
    if not found:
        raise CheckpointError(f"{run} has no complete checkpoint. Give the folder of a run that has saved one.")
    return found


def _numbers(manifest: Manifest) -> dict[str, float]:
    return {name: value for name, value in manifest.metrics.items() if value is not None}
