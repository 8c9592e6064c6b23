"""A checkpoint as files that others read: one safetensors file, or a folder as Hugging Face's from_pretrained wants it.

    step_0000100/  -->  model.safetensors
                   -->  DIR/model-00001-of-00002.safetensors, ..., model.safetensors.index.json, config.json

A shared tensor is stored once, under its first name; its further names stand in the file's metadata, as safetensors'
own save_model writes them: safetensors.torch.load_model and from_pretrained know what that means.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

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
    parts = _parts(state, file_bytes)
    names = [_TOGETHER] if len(parts) == 1 else [_part_name(i, len(parts)) for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _write(target / name, {key: state[key] for key in part}, {a: b for a, b in shared.items() if b in part})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(_bytes(tensor) for tensor in state.values())},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        (target / f"{_TOGETHER}.index.json").write_text(json.dumps(index, indent=2))
    if source is not None:
        shutil.copyfile(source, target / "config.json")
    return shared


def _state(checkpoint: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to store, each once, and the names that were left out for that."""
    from raypipe.engine.checkpoint import load_state_dict

    state = load_state_dict(checkpoint)
    shared = shared_names(state)
    return {name: tensor for name, tensor in state.items() if name not in shared}, shared


def _config_file(config: Path) -> Path:
    found = config / "config.json" if config.is_dir() else config
    if not found.is_file():
        raise ConfigError(f"{found} does not exist. Give the folder that the model's config.json is in.")
    return found


def _parts(state: Mapping[str, torch.Tensor], file_bytes: int) -> list[list[str]]:
    """Names by file, in order; a tensor that is larger than a file gets one of its own."""
    parts: list[list[str]] = [[]]
    held_bytes = 0
    for name, tensor in state.items():
        if parts[-1] and held_bytes + _bytes(tensor) > file_bytes:
            parts.append([])
            held_bytes = 0
        parts[-1].append(name)
        held_bytes += _bytes(tensor)
    return parts


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write(file: Path, tensors: Mapping[str, torch.Tensor], shared: Mapping[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    aside = file.with_name(f"{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # contiguous, because safetensors refuses views; "format", because Hugging Face asks for it
        packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(packed, aside, metadata={"format": "pt", **shared})
        aside.replace(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written: {error}. Give another place.") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
