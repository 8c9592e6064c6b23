"""safetensors files, written piece by piece to any place and read tensor by tensor from any place.

    8 bytes: length of the header | header, JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes

The library of that name writes to local paths only, or wants the whole file in memory. Its reader takes our
files, and ours takes its.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from raypipe.engine.checkpoint.tensor_table import METADATA, TensorInfo, read_table, table_of
from raypipe.engine.checkpoint.values import parse_json
from raypipe.engine.messages.layout import raw_bytes
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["TensorFile", "write_tensors"]

CHUNK_BYTES = 1 << 23
MOST_HEADER_BYTES = 100_000_000  # the library's own limit


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

    table = table_of(tensors)
    text = json.dumps({METADATA: {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    put(len(text).to_bytes(8, "little"))
    put(text)
    for name in table:
        packed = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
        put(raw_bytes(packed, packed.numel() * packed.dtype.itemsize).cast("B"))
    return size_bytes, digest.hexdigest()


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
        self._fill(raw_bytes(tensor, info.size_bytes).cast("B"), self._data + info.begin)
        return tensor

    def read_bytes(self, name: str, begin: int, size: int) -> bytes:
        """So many bytes of one tensor, counted from its beginning."""
        found = bytearray(size)
        self._fill(memoryview(found), self._data + self.tensors[name].begin + begin)
        return bytes(found)

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor, a few megabytes at a time."""
        total = self.tensors[name].size_bytes
        for begin in range(0, total, CHUNK_BYTES):
            yield self.read_bytes(name, begin, min(CHUNK_BYTES, total - begin))

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
        self._data = 8 + header_bytes
        if isinstance(header, dict):
            header.pop(METADATA, None)
        try:
            return read_table(header, size_bytes - self._data)
        except ValueError as error:
            raise self._broken(str(error)) from None

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._place} is no valid safetensors file: {reason}. Use an older checkpoint.")
