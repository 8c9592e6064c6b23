"""Tensors through Ray's object store as plain bytes: numpy views that workers read without a copy.

    tensors by name --parcels--> [a b c] [d e] [f ...]       objects of about PARCEL_BYTES, each put once
    worker          <--StoredTensors.read(names)             fetches the parcels that hold what it asks for

Whoever packs need not know which worker will hold what: that is for the plan to say, which is made elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from raypipe.engine.checkpoint import GivenTensors, Kept, StateSource, TensorInfo

__all__ = ["PackedTensor", "Parcel", "StoredTensors", "pack", "packed_in_parcels", "stored", "unpack"]

PARCEL_BYTES = 64 << 20
"""Of parameters in one object; a larger one has an object of its own."""


class PackedTensor(NamedTuple):
    """dtype by torch's name, shape, and the bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Parcel(NamedTuple):
    """Some tensors in the object store: their names, and the reference to a mapping of PackedTensors."""

    names: tuple[str, ...]
    ref: Any


def pack(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, PackedTensor]:
    """The named tensors; views of their memory where it is contiguous."""
    packed = {}
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        packed[name] = PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return packed


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Tensors with memory of their own."""
    tensors = {}
    for name, (dtype, shape, data) in packed.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
        tensors[name] = tensor
    return tensors


def packed_in_parcels(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, PackedTensor]]:
    """All of them in their order, a parcel's worth at a time."""
    names: list[str] = []
    size_bytes = 0
    for name, tensor in tensors.items():
        if names and size_bytes + tensor.nbytes > PARCEL_BYTES:
            yield pack(tensors, names)
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor.nbytes
    if names:
        yield pack(tensors, names)


def stored(
    initial: Mapping[str, torch.Tensor] | Sequence[StateSource], put: Callable[[Any], Any] = ray.put
) -> StoredTensors:
    """These tensors in the object store, in parcels that ``put`` puts there.

    Args:
        initial: or where they are: tensors of this process are put, other sources travel as they are.
    """
    sources = [GivenTensors(initial)] if isinstance(initial, Mapping) else initial
    tensors = {name: x for source in sources if isinstance(source, GivenTensors) for name, x in source.tensors.items()}
    elsewhere = tuple(source for source in sources if not isinstance(source, GivenTensors))
    return StoredTensors([Parcel(tuple(packed), put(packed)) for packed in packed_in_parcels(tensors)], elsewhere)


class StoredTensors:
    """Tensors that lie in the object store, as a StateSource. This travels, the tensors do not travel with it.

    References inside of a value are passed on by Ray as they are, so that a process which hands this on resolves none.

    Args:
        elsewhere: what has tensors that are in no parcel: files, say. Whoever reads them reads them there.
    """

    title = "What the run began with"
    updates = 0
    groups = None

    def __init__(self, parcels: list[Parcel], elsewhere: tuple[StateSource, ...] = ()) -> None:
        self._parcels, self._elsewhere = parcels, elsewhere

    @property
    def names(self) -> set[str]:
        packed = {name for parcel in self._parcels for name in parcel.names}
        return packed.union(*(source.names for source in self._elsewhere))

    def info(self, name: str) -> TensorInfo:
        for source in self._elsewhere:
            if name in source.names:
                return source.info(name)
        packed = next(ray.get(parcel.ref)[name] for parcel in self._parcels if name in parcel.names)
        return TensorInfo(getattr(torch, packed.dtype), packed.shape, 0, packed.data.nbytes)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See StateSource. Parcels are fetched one after the other, those with none of these names not at all."""
        wanted = set(names)
        for source in self._elsewhere:
            here = wanted.intersection(source.names)
            yield from source.read(here)
            wanted -= here
        for parcel in self._parcels:
            here = wanted.intersection(parcel.names)
            if here:
                packed = ray.get(parcel.ref)
                yield from unpack({name: packed[name] for name in parcel.names if name in here}).items()

    def kept(self, trained: Collection[str]) -> Kept:
        return {}

    def let_go(self, saved: Collection[str]) -> None:
        """Forget the parcels of which every tensor is in checkpoints too; the store frees what nobody refers to."""
        self._parcels[:] = [parcel for parcel in self._parcels if not set(parcel.names) <= set(saved)]
