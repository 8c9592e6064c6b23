"""safetensors files, written piece by piece to any place and read tensor by tensor from any place.

    8 bytes: length of the header | header, JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes

The library of that name writes to local paths only, or wants the whole file in memory. Its reader takes our
files, and ours takes its.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.checkpoint.dtypes import DTYPES, NAMES
from raypipe.engine.checkpoint.values import parse_json
from raypipe.engine.layout import raw_bytes, span
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["TensorFile", "TensorInfo", "check_storable", "write_tensors"]

CHUNK_BYTES = 1 << 23
MOST_HEADER_BYTES = 100_000_000  # the library's own limit
_METADATA = "__metadata__"


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what the format cannot hold.

    Raises:
        CheckpointError: names the tensor.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in NAMES or name == _METADATA:
        raise CheckpointError(
            f"The tensor {name!r} ({str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}) cannot be saved: a "
            f"checkpoint holds dense tensors of {', '.join(sorted(NAMES.values()))}, under other names than "
            f"{_METADATA!r}. Convert it."
        )


def write_tensors(write: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write a file's bytes one after the other; returns their number and SHA-256.

    Args:
        tensors: on the host; at most one of them is copied at a time, and only if it is not contiguous.
    """
    digest, size_bytes = hashlib.sha256(), 0

    def put(data: bytes | memoryview) -> None:
        nonlocal size_bytes
        for start in range(0, len(data), CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            digest.update(piece)
            write(piece)
        size_bytes += len(data)

    # Large elements first, as the library orders them: then every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name in names:
        check_storable(name, tensors[name])
        begin, end = end, end + tensors[name].numel() * tensors[name].dtype.itemsize
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    put(len(text).to_bytes(8, "little"))
    put(text)
    for name in names:
        packed = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
        put(raw_bytes(packed, packed.numel() * packed.dtype.itemsize).cast("B"))
    return size_bytes, digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class TensorFile:
    """An opened safetensors file; a context manager.

    Attributes:
        tensors: what is in it, by name.

    Raises:
        CheckpointError: it is no such file: the header does not describe exactly the bytes that follow it.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = place.open_input()
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own; nothing else is read."""
        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self._fill(raw_bytes(tensor, info.size_bytes).cast("B"), info.begin)
        return tensor

    def _fill(self, target: memoryview, begin: int) -> None:
        with self._place.reading():
            self._file.seek(begin)
            at = 0
            while at < len(target):
                count = self._file.readinto(target[at : at + CHUNK_BYTES])
                if not count:
                    raise CheckpointError(f"{self._place} ends too early. Use an older checkpoint.")
                at += count

    def _read_header(self) -> dict[str, TensorInfo]:
        with self._place.reading():
            size_bytes = self._file.size()
        if size_bytes < 8:
            raise self._broken("it is shorter than its header")
        length = bytearray(8)
        self._fill(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(size_bytes - 8, MOST_HEADER_BYTES):
            raise self._broken(f"its header claims {header_bytes} bytes")
        text = bytearray(header_bytes)
        self._fill(memoryview(text), 8)
        header = parse_json(bytes(text), f"The header of {self._place}")
        if not isinstance(header, dict):
            raise self._broken("its header is no object")
        header.pop(_METADATA, None)
        data = 8 + header_bytes
        found = {name: self._info(name, entry, data) for name, entry in header.items()}
        end = data
        for info in sorted(found.values(), key=lambda info: (info.begin, info.size_bytes)):
            if info.begin != end:
                raise self._broken("its tensors overlap or leave gaps")
            end += info.size_bytes
        if end != size_bytes:
            raise self._broken(f"it has {size_bytes} bytes, its header describes {end}")
        return found

    def _info(self, name: str, entry: Any, data: int) -> TensorInfo:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._broken(f"{name!r} is not described by dtype, shape and offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._broken(f"{name!r} has an unknown dtype")
        if not _are_counts(shape) or len(shape) > 64 or not _are_counts(offsets) or len(offsets) != 2:
            raise self._broken(f"{name!r} has no valid shape and offsets")
        if span(tuple(shape)) * DTYPES[dtype].itemsize >= 1 << 62:
            raise self._broken(f"{name!r} has an impossible shape")
        size_bytes = DTYPES[dtype].itemsize if 0 not in shape else 0
        for count in shape:
            size_bytes *= count
        if offsets[1] - offsets[0] != size_bytes:
            raise self._broken(f"{name!r} has another number of bytes than its shape")
        return TensorInfo(DTYPES[dtype], tuple(shape), data + offsets[0], size_bytes)

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._place} is no valid safetensors file: {reason}. Use an older checkpoint.")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
