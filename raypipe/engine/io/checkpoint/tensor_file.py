"""safetensors files, written piece by piece and read tensor by tensor, on any file system.

    8 bytes: length of the header | header, JSON | the bytes of the tensors
    header: {"layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

The library safetensors is not used, because it writes to local paths only or needs the whole file in memory. It can
read files of ``write_tensors``, and ``TensorFile`` can read its files. In-memory copies of state have the same table.

JSON is read strictly: a value of the wrong type is an error that names the field. Small values of an optimizer are
stored exactly:

    0.001 <-> 0.001      (0.9, 0.95) <-> [0.9, 0.95]      inf <-> {"float": "inf"}
    tensor(0.001) <-> {"tensor": 0.001, "dtype": "F32"}    (of one element and no dimension)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from raypipe.engine.io.storage import Place
from raypipe.engine.messages.record import raw_bytes, span
from raypipe.errors import CheckpointError
from raypipe.ir.from_plain import from_plain

T = TypeVar("T")

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def refuse(what: str, wanted: str, value: Any) -> CheckpointError:
    """Create the error for a field of a manifest.

    Args:
        what: name of the field.
        wanted: description of a correct value.
        value: value of the field.
    """
    return CheckpointError(f"{what}: {str(value)[:80]!r} is not {wanted}. The manifest is damaged; use an older one.")


def read_strictly(kind: type[T], value: Any, what: str) -> T:
    """Build a dataclass from parsed JSON with exactly its fields; ``what`` names the JSON in the message.

    Raises:
        CheckpointError: a field is missing, unknown or of another type; names the field.
    """
    try:
        return cast(T, from_plain(kind, value))
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}. The file is damaged; use an older checkpoint.") from None


_ODD_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, what: str) -> Any:
    """Encode a value of an optimizer as JSON; ``what`` names the value in the message.

    Raises:
        CheckpointError: the value is no number, text, None or tensor without dimensions, and no sequence of these.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (list, tuple)):
        return [encode(item, what) for item in value]
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in NAMES and not value.is_complex():
        return {"tensor": encode(value.item(), what), "dtype": NAMES[value.dtype]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, numbers, texts, None and "
        "sequences of these. Use an optimizer that keeps its state in tensors and numbers."
    )


def decode(value: Any, what: str) -> Any:
    """Decode a value that ``encode`` has encoded; sequences are returned as tuples.

    Raises:
        CheckpointError: ``encode`` cannot have written the value; ``what`` names it in the message.
    """
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, list):
        return tuple(decode(item, what) for item in value)
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in tuple(_ODD_FLOATS):
            return _ODD_FLOATS[value["float"]]
        number = decode(value["tensor"], what) if value.keys() == {"tensor", "dtype"} else None
        if isinstance(number, (bool, int, float)) and value["dtype"] in tuple(DTYPES):
            try:
                return torch.tensor(number, dtype=DTYPES[value["dtype"]])
            except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(f"{what} is not a {value['dtype']}: {error}") from error
    raise CheckpointError(f"{what} is {str(value)[:80]!r}, which no checkpoint holds.")


def parse_json(data: bytes, what: str) -> Any:
    """Parse strict JSON, which has no NaN, no infinity (such as 1e999), and no name twice in one object.

    Raises:
        CheckpointError: ``data`` is not strict JSON; ``what`` names it in the message.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:200]}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return unique


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype, shape and position of a tensor.

    Attributes:
        begin: first byte of the tensor, from the end of a file's header, or from the beginning of a copy's memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError, which names the tensor, if the format cannot hold the tensor."""
    if tensor.layout is not torch.strided or tensor.dtype not in NAMES or name == METADATA:
        raise CheckpointError(
            f"The tensor {name!r} ({str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}) cannot be saved: a "
            f"checkpoint holds dense tensors of {', '.join(sorted(NAMES.values()))}, under other names than "
            f"{METADATA!r}. Convert it."
        )


def table_of(tensors: Mapping[str, torch.Tensor], begin: int = 0) -> dict[str, Any]:
    """Create the table of a safetensors header, {name: dtype, shape, data_offsets}, in the order of the tensors' bytes.

    Dtypes with large elements come first, as in the library safetensors, so that every tensor is aligned.

    Args:
        begin: offset of the first tensor in bytes.

    Raises:
        CheckpointError: a tensor cannot be stored; names the tensor.
    """
    table = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        check_storable(name, tensor)
        end = begin + tensor.numel() * tensor.dtype.itemsize
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    return table


def read_table(table: Any, size_bytes: int) -> dict[str, TensorInfo]:
    """Parse a table as ``table_of`` creates it; its tensors must fill ``size_bytes`` without gaps or overlaps.

    Raises:
        ValueError: the table is not valid; the message is the reason, without the name of the file.
    """
    if not isinstance(table, dict):
        raise ValueError("its header is not an object")
    tensors = {name: _info(name, entry) for name, entry in table.items()}
    end = 0
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.size_bytes)):
        if info.begin != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = info.end
    if end != size_bytes:
        raise ValueError(f"its tensors have {size_bytes} bytes, its header describes {end}")
    return tensors


def _info(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} has an unknown dtype")
    if not _are_counts(shape) or len(shape) > 64 or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has no valid shape and offsets")
    if span(tuple(shape)) * DTYPES[dtype].itemsize >= 1 << 62:
        raise ValueError(f"{name!r} has an impossible shape")
    size_bytes = DTYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != size_bytes:
        raise ValueError(f"{name!r} has another number of bytes than its shape")
    return TensorInfo(DTYPES[dtype], tuple(shape), offsets[0], size_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


CHUNK_BYTES = 1 << 23
MOST_HEADER_BYTES = 100_000_000  # the library's own limit


def header_of(table: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a safetensors file: the length of the header, and the header with table and metadata."""
    text = json.dumps({METADATA: dict(metadata), **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(write: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write a safetensors file piece by piece; return (size of the file in bytes, SHA-256 of the file in hexadecimal).

    Args:
        write: function that writes bytes; called with pieces of at most CHUNK_BYTES.
        tensors: tensors in host memory, by name. Tensors that are not contiguous are copied, one at a time.
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
    put(header_of(table, {"format": "pt"}))
    for name in table:
        packed = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
        put(raw_bytes(packed, packed.numel() * packed.dtype.itemsize).cast("B"))
    return size_bytes, digest.hexdigest()


class TensorFile(AbstractContextManager["TensorFile"]):
    """Opened safetensors file; a context manager.

    Attributes:
        tensors: dtype, shape and position of each tensor, by name.

    Raises:
        CheckpointError: the header is not valid, or does not describe exactly the bytes that follow.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = place.open_input()
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into new memory."""
        return self.read_at(self.tensors[name])

    def read_at(self, info: TensorInfo) -> torch.Tensor:
        """Read the tensor with this dtype and shape at ``info.begin``; it may be a part of a stored tensor."""
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self._fill(raw_bytes(tensor, info.size_bytes).cast("B"), self._data + info.begin)
        return tensor

    def read_bytes(self, name: str, begin: int, size: int) -> bytes:
        """Read ``size`` bytes of one tensor, from its byte ``begin`` on."""
        target = bytearray(size)
        self._fill(memoryview(target), self._data + self.tensors[name].begin + begin)
        return bytes(target)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor, in pieces of at most CHUNK_BYTES."""
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
        return CheckpointError(f"{self._place} is not a valid safetensors file: {reason}. Use an older checkpoint.")
