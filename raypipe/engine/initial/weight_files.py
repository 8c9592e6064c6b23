"""Weights in safetensors files; every stage reads its own tensors by name, one at a time.

    model.safetensors                                        one file
    DIR/model.safetensors.index.json, model-00001-of-...     a folder of Hugging Face, with an index or one file
    runs/lm, runs/lm/checkpoints/step_0000100                a run of raypipe, or one of its checkpoints

Locating the tensors reads headers, and a few bytes of each tensor for a checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypipe.engine.io.checkpoint.find_checkpoint import Checkpoint, checkpoint_at
from raypipe.engine.io.checkpoint.tensor_file import TensorFile, TensorInfo, header_of, table_of
from raypipe.engine.io.storage import Place, Write
from raypipe.errors import CheckpointError, ConfigError

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
MOST_INDEX_BYTES = 1 << 28
SAMPLE_BYTES = 256
"""Bytes that a checksum reads at the beginning, the middle and the end of every tensor."""


class StoredTensor(NamedTuple):
    """Location of a tensor: its file, its name in the file, and its dtype, shape and position."""

    file: Place
    name: str
    info: TensorInfo

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape


@dataclass(frozen=True)
class WeightFiles:
    """StateSource of tensors in files. A worker is sent their locations, not the tensors, and reads the files itself.

    Attributes:
        tensors: location of each tensor, by its name in the model.
        like: by name, the tensor's dtype and strides in the model, to which values are converted.
        samples: by name, the checksum of some of the tensor's bytes (SAMPLE_BYTES) when the tensor was located.
    """

    tensors: Mapping[str, StoredTensor]
    like: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    samples: Mapping[str, bytes]
    title: str
    updates: int = 0

    @classmethod
    def as_stored(cls, tensors: Mapping[str, StoredTensor], title: str) -> WeightFiles:
        """Create a source, named ``title`` in messages, whose tensors keep the dtypes of the files."""
        bare = {name: torch.empty(x.info.shape, dtype=x.info.dtype, device="meta") for name, x in tensors.items()}
        return cls.like_model(tensors, bare, title)

    @classmethod
    def like_model(
        cls, tensors: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor], title: str
    ) -> WeightFiles:
        """Create a source, named ``title``, whose tensors get the dtypes and strides of the model's tensors ``own``."""
        like = {name: (own[name].dtype, own[name].stride()) for name in tensors}
        return cls(tensors, like, {name: _checksum(sample) for name, sample in _samples(tensors)}, title)

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        shape, dtype = self.tensors[name].info.shape, self.like[name][0]
        return TensorInfo(dtype, shape, 0, math.prod(shape) * dtype.itemsize)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors by name, as StateSource: file by file, each from beginning to end, one tensor at a time."""
        wanted = sorted(names, key=lambda name: (str(self.tensors[name].file), self.tensors[name].info.begin))
        with ExitStack() as stack:
            file: TensorFile | None = None
            at = ""
            for name in wanted:
                place, stored, info = self.tensors[name]
                if file is None or str(place) != at:
                    stack.close()
                    file, at = stack.enter_context(TensorFile(place)), str(place)
                if file.tensors.get(stored) != info or _checksum(_sample(file, stored)) != self.samples[name]:
                    raise CheckpointError(f"{place} changed since the run was planned: {stored!r} is another there.")
                yield name, self._as_in_model(name, file.read(stored))

    def _as_in_model(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype, strides = self.like[name]
        if tensor.stride() == strides:
            return tensor.to(dtype)
        return torch.empty_strided(tensor.shape, strides, dtype=dtype).copy_(tensor)


def is_hugging_face(folder: Place) -> bool:
    """Return True if this folder has weights as ``save_pretrained`` writes them."""
    return folder.exists(INDEX) or folder.exists(ONE_FILE)


def weights_in(place: Place, title: str) -> dict[str, StoredTensor]:
    """Return the location of every tensor, by name. A shared tensor in a checkpoint is listed under each name.

    Args:
        place: a .safetensors file, a folder of Hugging Face, a run or a checkpoint.
        title: name of the argument, for messages.

    Raises:
        ConfigError: the index and the files do not agree.
        CheckpointError: not found, or damaged.
    """
    if place.name.endswith(".safetensors"):
        return _in_file(place)
    if place.exists(INDEX):
        return _in_shards(place, title)
    if place.exists(ONE_FILE):
        return _in_file(place / ONE_FILE)
    return tensors_of(checkpoint_at(place, f", and no {ONE_FILE}"))


def sampled_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Compute a checksum of names, shapes, types, and of some bytes of every tensor."""
    total = hashlib.sha256()
    for name, sample in _samples(tensors):
        total.update(f"{name} {tensors[name].info.dtype} {list(tensors[name].info.shape)}".encode())
        total.update(sample)
    return total.hexdigest()


def _samples(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, some bytes from the beginning, middle and end) of each tensor, for a checksum."""
    by_file: dict[str, list[str]] = {}
    for name in sorted(tensors):
        by_file.setdefault(str(tensors[name].file), []).append(name)
    for names in by_file.values():
        with TensorFile(tensors[names[0]].file) as file:
            yield from ((name, _sample(file, tensors[name].name)) for name in names)


def _checksum(sample: bytes) -> bytes:
    return hashlib.sha256(sample).digest()


def _sample(file: TensorFile, name: str) -> bytes:
    whole = file.tensors[name].size_bytes
    size = min(SAMPLE_BYTES, whole)
    return b"".join(file.read_bytes(name, begin, size) for begin in (0, (whole - size) // 2, whole - size))


def equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two stored tensors have equal dtypes, shapes and bytes; they are read piece by piece."""
    if (one.info.dtype, one.info.shape) != (other.info.dtype, other.info.shape):
        return False
    with TensorFile(one.file) as a, TensorFile(other.file) as b:
        return all(x == y for x, y in zip(a.pieces(one.name), b.pieces(other.name), strict=True))


def _in_file(file: Place) -> dict[str, StoredTensor]:
    with TensorFile(file) as opened:
        return {name: StoredTensor(file, name, info) for name, info in opened.tensors.items()}


def _in_shards(folder: Place, title: str) -> dict[str, StoredTensor]:
    listed = _index(folder, title)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(listed.values())):
        tensors |= _in_file(folder / file)
    wrong = [name for name in listed if name not in tensors or tensors[name].file.name != listed[name]]
    if wrong:
        raise ConfigError(
            f"{title}: {folder / INDEX} lists {wrong[0]!r} in {listed[wrong[0]]}, but it is not there"
            f"{f', nor {len(wrong) - 1} others where they should be' if wrong[1:] else ''}. Fetch the files again."
        )
    return tensors


def _index(folder: Place, title: str) -> dict[str, str]:
    """Read the index of a folder: name of each tensor -> file in the folder."""
    try:
        listed = json.loads(folder.read_bytes(INDEX, MOST_INDEX_BYTES))["weight_map"]
        good = all(isinstance(n, str) and isinstance(f, str) and "/" not in f for n, f in listed.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good or not listed:
        raise ConfigError(
            f"{title}: {folder / INDEX} is no index of safetensors files: it must be JSON with a weight_map of names "
            "to files of that folder."
        )
    files: dict[str, str] = listed
    return files


def tensors_of(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the location of each tensor in a checkpoint's manifest, by name.

    Raises:
        CheckpointError: a file has changed since it was checked.
    """
    tensors: dict[str, StoredTensor] = {}
    for entry in checkpoint.manifest.stages:
        file = checkpoint.files / entry.tensors.file
        there = _in_file(file)
        for name in entry.tensors.names:
            if name not in there:
                raise CheckpointError(f"{file} changed while it was read.")
            tensors.setdefault(name, there[name])
    return tensors | {alias: tensors[name] for alias, name in checkpoint.manifest.aliases.items()}


def copy_tensors(write: Write, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of these tensors, piece by piece.

    Args:
        tensors: tensors by their names in the new file.
        metadata: metadata of the new file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    bare = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors.items()}
    table = table_of(bare)
    write(header_of(table, metadata))
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name in table:
            stored = tensors[name]
            key = str(stored.file)
            if key not in files:
                files[key] = stack.enter_context(TensorFile(stored.file))
            for piece in files[key].pieces(stored.name):
                write(piece)
