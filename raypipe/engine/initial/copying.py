"""Tensors of files into another safetensors file, a few megabytes at a time: nothing is ever held whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from raypipe.engine.checkpoint.tensor_file import TensorFile
from raypipe.engine.checkpoint.tensor_table import METADATA, table_of
from raypipe.engine.initial.files import StoredTensor
from raypipe.engine.storage import Write

__all__ = ["copy_tensors"]


def copy_tensors(write: Write, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file's bytes one after the other.

    Args:
        tensors: by the names that they have in the new file.
        metadata: of the new file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    bare = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors.items()}
    table = table_of(bare)
    text = json.dumps({METADATA: dict(metadata), **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little"))
    write(text)
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name in table:
            stored = tensors[name]
            key = str(stored.file)
            if key not in files:
                files[key] = stack.enter_context(TensorFile(stored.file))
            for piece in files[key].pieces(stored.name):
                write(piece)
