"""Export of a checkpoint for other libraries: one safetensors file, or a folder for Hugging Face's from_pretrained.

    step_0000100/  -->  model.safetensors
                   -->  DIR/model-00001-of-00002.safetensors, ..., model.safetensors.index.json, config.json

A shared tensor is stored once, under its first name. The file's metadata maps its further names to that name, in the
form that save_model and load_model of safetensors.torch use, and from_pretrained reads. Bytes are copied from file to
file, a few megabytes at a time, so that a model larger than this machine's memory can be exported too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from raypipe.engine.initial.weight_files import StoredTensor
    from raypipe.engine.io.storage import Place


FILE_BYTES = 5_000_000_000
"""Default maximum of bytes of tensors in one file of a Hugging Face folder, as in Hugging Face's own tools."""

_TOGETHER = "model.safetensors"


def shared_names(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find tensors that occur several times in a state_dict; map their further names to their first names.

    Two entries are one tensor if memory address, shape, strides and dtype agree. Empty tensors are ignored.
    """
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, tensor in state.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            owner = first.setdefault(place, name)
            if owner != name:
                shared[name] = owner
    return shared


def export_safetensors(checkpoint: str | Path, file: str | Path) -> dict[str, str]:
    """Write a checkpoint to one safetensors file, under the original parameter names.

    Args:
        checkpoint: a path as for ``raypipe.load_state_dict``.
        file: path or URI of the output. Its folder is created if necessary. A local file is replaced only once all
            bytes are written.

    Returns:
        Further names of shared tensors -> names under which they are stored.

    Raises:
        CheckpointError: there is no checkpoint, or the file cannot be written.
    """
    from raypipe.engine.io.storage import Place

    state, shared = _state(checkpoint)
    _write(Place.of(file), state, shared)
    return shared


def export_hugging_face(
    checkpoint: str | Path, folder: str | Path, config: str | Path | None = None, file_bytes: int = FILE_BYTES
) -> dict[str, str]:
    """Write a checkpoint to a folder that ``AutoModel.from_pretrained(folder)`` loads.

    Args:
        checkpoint: a path as for ``raypipe.load_state_dict``.
        folder: path or URI of the output, which must be new or empty, so that it has no file of another model.
        config: config.json of the model, or the folder that has it; the file is copied. None writes no config.json.
        file_bytes: maximum bytes of tensors in one file; if there are several files, an index is written too.

    Returns:
        Further names of shared tensors -> names under which they are stored.

    Raises:
        ConfigError: the folder is not empty, or ``config`` has no config.json.
        CheckpointError: there is no checkpoint, or a file cannot be written.
    """
    from raypipe.engine.io.storage import Place

    target = Place.of(folder)
    source = None if config is None else _config_file(Path(config))
    if target.size_bytes() is not None or target.list():
        raise ConfigError(f"{target} is there already. Give the path of a new or empty folder.")
    state, shared = _state(checkpoint)
    parts = _parts({name: tensor.info.size_bytes for name, tensor in state.items()}, file_bytes)
    count = len(parts)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [_TOGETHER]
    for name, part in zip(names, parts, strict=True):
        _write(target / name, {key: state[key] for key in part}, {a: b for a, b in shared.items() if b in part})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.info.size_bytes for tensor in state.values())},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        target.write_bytes(f"{_TOGETHER}.index.json", json.dumps(index, indent=2).encode())
    if source is not None:
        target.write_bytes("config.json", source.read_bytes())
    return shared


def _state(checkpoint: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a checkpoint and their aliases.

    Returns:
        ({name: tensor}, each tensor once; {further name of a shared tensor: its name in the first dict}).
    """
    from raypipe.engine.initial.weight_files import tensors_of
    from raypipe.engine.io.checkpoint.find_checkpoint import checkpoint_at
    from raypipe.engine.io.storage import Place

    state = tensors_of(checkpoint_at(Place.of(checkpoint)))
    first: dict[tuple[str, str], str] = {}
    shared = {}
    for name, tensor in state.items():
        owner = first.setdefault((str(tensor.file), tensor.name), name)
        if owner != name:
            shared[name] = owner
    return {name: tensor for name, tensor in state.items() if name not in shared}, shared


def _config_file(config: Path) -> Path:
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise ConfigError(f"{file} does not exist. Give the folder that the model's config.json is in.")
    return file


def _parts(sizes_bytes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Distribute tensors over files in their order; return the names of the tensors of each file.

    A tensor of more than ``file_bytes`` gets a file of its own.
    """
    parts: list[list[str]] = [[]]
    held_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if parts[-1] and held_bytes + size_bytes > file_bytes:
            parts.append([])
            held_bytes = 0
        parts[-1].append(name)
        held_bytes += size_bytes
    return parts


def _write(file: Place, tensors: Mapping[str, StoredTensor], shared: Mapping[str, str]) -> None:
    """Write a safetensors file with tensors by name, and with the further names ``shared`` in its metadata.

    An error leaves an existing file unchanged.
    """
    from raypipe.engine.initial.weight_files import copy_tensors
    from raypipe.engine.io.storage import PlaceError

    try:
        with file.writer() as write:
            copy_tensors(write, tensors, {"format": "pt", **shared})
    except PlaceError as error:
        raise CheckpointError(f"{file} cannot be written: {error.__cause__ or error}. Give another path.") from None
