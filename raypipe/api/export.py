"""A checkpoint as files that others read: one safetensors file, or a folder as Hugging Face's from_pretrained wants it.

    step_0000100/  -->  model.safetensors
                   -->  DIR/model-00001-of-00002.safetensors, ..., model.safetensors.index.json, config.json

A shared tensor is stored once, under its first name; its further names stand in the file's metadata, as safetensors'
own save_model writes them: safetensors.torch.load_model and from_pretrained know what that means. Bytes go from file to
file, a few megabytes at a time, so that a model larger than this machine can be exported too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from raypipe.engine.initial.files import StoredTensor

__all__ = ["export_hugging_face", "export_safetensors", "shared_names"]

FILE_BYTES = 5_000_000_000
"""Largest file of a Hugging Face folder, as their own tools make them."""

_TOGETHER = "model.safetensors"


def shared_names(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further names of tensors that stand twice in a state -> their first names."""
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, tensor in state.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            owner = first.setdefault(place, name)
            if owner != name:
                found[name] = owner
    return found


def export_safetensors(checkpoint: str | Path, file: str | Path) -> dict[str, str]:
    """Write one file with the original parameter names.

    Args:
        checkpoint: what ``raypipe.load_state_dict`` takes.
        file: is replaced as a whole; its folder is made.

    Returns:
        Further names of shared tensors -> the names that they are stored under.

    Raises:
        CheckpointError: no checkpoint there, or the file cannot be written.
    """
    state, shared = _state(checkpoint)
    _write(Path(file), state, shared)
    return shared


def export_hugging_face(
    checkpoint: str | Path, folder: str | Path, config: str | Path | None = None, file_bytes: int = FILE_BYTES
) -> dict[str, str]:
    """Write a folder that ``AutoModel.from_pretrained(folder)`` loads.

    Args:
        folder: must be new or empty, so that no file of another model is left in it.
        config: folder with the model's config.json (or that file), which is copied.
        file_bytes: of tensors in one file; more than one file comes with an index.

    Returns:
        Further names of shared tensors -> the names that they are stored under.

    Raises:
        ConfigError: the folder has files in it, or there is no config.json in ``config``.
        CheckpointError: no checkpoint there, or a file cannot be written.
    """
    target = Path(folder)
    source = None if config is None else _config_file(Path(config))
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"{target} is there already. Give the path of a new or empty folder.")
    state, shared = _state(checkpoint)
    parts = _parts({name: tensor.info.size_bytes for name, tensor in state.items()}, file_bytes)
    names = [_TOGETHER] if len(parts) == 1 else [_part_name(i, len(parts)) for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _write(target / name, {key: state[key] for key in part}, {a: b for a, b in shared.items() if b in part})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.info.size_bytes for tensor in state.values())},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        (target / f"{_TOGETHER}.index.json").write_text(json.dumps(index, indent=2))
    if source is not None:
        shutil.copyfile(source, target / "config.json")
    return shared


def _state(checkpoint: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Where the tensors to store are, each once, and the names that were left out for that."""
    from raypipe.engine.initial.files import checkpoint_tensors
    from raypipe.engine.storage import Place

    state = checkpoint_tensors(Place.of(checkpoint))
    first: dict[tuple[str, str], str] = {}
    shared = {}
    for name, tensor in state.items():
        owner = first.setdefault((str(tensor.file), tensor.name), name)
        if owner != name:
            shared[name] = owner
    return {name: tensor for name, tensor in state.items() if name not in shared}, shared


def _config_file(config: Path) -> Path:
    found = config / "config.json" if config.is_dir() else config
    if not found.is_file():
        raise ConfigError(f"{found} does not exist. Give the folder that the model's config.json is in.")
    return found


def _parts(sizes_bytes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Names by file, in order; a tensor that is larger than a file gets one of its own."""
    parts: list[list[str]] = [[]]
    held_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if parts[-1] and held_bytes + size_bytes > file_bytes:
            parts.append([])
            held_bytes = 0
        parts[-1].append(name)
        held_bytes += size_bytes
    return parts


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write(file: Path, tensors: Mapping[str, StoredTensor], shared: Mapping[str, str]) -> None:
    """Whole or not at all."""
    from raypipe.engine.initial.copying import copy_tensors
    from raypipe.engine.storage import Place, PlaceError

    try:
        with Place.of(file).writer() as write:
            copy_tensors(write, tensors, {"format": "pt", **shared})
    except PlaceError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from None
