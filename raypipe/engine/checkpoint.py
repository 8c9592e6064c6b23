"""State by parameter name, never by rank: each stage writes what it owns, a manifest says that all is there.

    checkpoints/step_0000100/stage_0.safetensors, stage_1.safetensors, ..., manifest.json

The manifest is written last, so a folder without one is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from raypipe.errors import CheckpointError

__all__ = ["checkpoint_folder", "load_state_dict", "save_shard", "write_manifest"]

MANIFEST = "manifest.json"


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return run_folder / "checkpoints" / f"step_{step:07d}"


def save_shard(folder: Path, stage: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write one stage's tensors; returns its entry in the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage_{stage}.safetensors"
    # contiguous, because safetensors refuses views; clones, because it refuses shared memory too
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path)
    return {"file": path.name, "sha256": _digest(path), "names": list(tensors)}


def write_manifest(folder: Path, step: int, shards: list[dict[str, Any]], aliases: Mapping[str, str]) -> None:
    """Complete a checkpoint: from now on it counts.

    Args:
        aliases: further names of shared tensors, and the names that they are stored under.
    """
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"format": 1, "step": step, "shards": shards, "aliases": dict(aliases)}, indent=2))
    partial.replace(folder / MANIFEST)


def load_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Plain {original name: tensor} of a checkpoint, whatever the number of stages was.

    Args:
        path: a folder ``step_...``, or a run's folder for its newest checkpoint.

    Raises:
        CheckpointError: nothing there, incomplete or damaged; names the file.
    """
    folder = Path(path)
    if not (folder / MANIFEST).exists():
        complete = sorted((folder / "checkpoints").glob(f"step_*/{MANIFEST}"), key=lambda file: file.stat().st_mtime_ns)
        if not complete:
            raise CheckpointError(
                f"{folder} holds no complete checkpoint. Give a run folder or one of its checkpoints/step_* folders."
            )
        folder = complete[-1].parent
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state: dict[str, torch.Tensor] = {}
        for shard in manifest["shards"]:
            file = folder / shard["file"]
            if _digest(file) != shard["sha256"]:
                raise CheckpointError(f"{file} is not what was written: its checksum differs. Use an older checkpoint.")
            for name, tensor in load_file(file).items():
                state.setdefault(name, tensor)
        state |= {alias: state[name] for alias, name in manifest["aliases"].items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}. Use an older one.") from error
    return state


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
