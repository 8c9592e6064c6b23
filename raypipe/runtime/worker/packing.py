"""Transfer of tensors through Ray's object store as plain bytes: numpy views that workers read without a copy.

    tensors by name --parcels--> [a b c] [d e] [f ...]       objects of about PARCEL_BYTES, each put once
    worker          <--StoredTensors.read(names)             fetches only the parcels that hold these names

A parcel does not depend on the plan, so that tensors can be packed before the stages of each worker are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from raypipe.engine.io.checkpoint import GivenTensors, StateSource, TensorInfo
from raypipe.run.evaluations import ListOutputs

PARCEL_BYTES = 64 << 20
"""Bytes of tensors in one object; a larger tensor has an object of its own."""


class PackedTensor(NamedTuple):
    """Tensor as plain data.

    Attributes:
        dtype: name of the dtype ("float32").
        shape: shape.
        data: uint8 array of the bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Parcel(NamedTuple):
    """Several tensors in one object of the store: their names, and the reference to a mapping of PackedTensors."""

    names: tuple[str, ...]
    ref: Any


def pack(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, PackedTensor]:
    """Pack the named tensors; contiguous tensors on the CPU become views of their memory."""
    packed = {}
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        packed[name] = PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return packed


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Copy packed tensors into new torch tensors, by name."""
    tensors = {}
    for name, (dtype, shape, data) in packed.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
        tensors[name] = tensor
    return tensors


def packed_in_parcels(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, PackedTensor]]:
    """Pack all tensors in their order; yield parcels of at most PARCEL_BYTES, or of one larger tensor."""
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
    """Put tensors into the object store, in parcels, and return a source that reads them from there.

    Args:
        initial: tensors by name, or sources of tensors. Only tensors of GivenTensors are put into the store; other
            sources, such as files, become sources of the result.
        put: called with each parcel; returns a reference to it.
    """
    sources = [GivenTensors(initial)] if isinstance(initial, Mapping) else initial
    tensors = {name: x for source in sources if isinstance(source, GivenTensors) for name, x in source.tensors.items()}
    elsewhere = tuple(source for source in sources if not isinstance(source, GivenTensors))
    return StoredTensors([Parcel(tuple(packed), put(packed)) for packed in packed_in_parcels(tensors)], elsewhere)


class StoredTensors:
    """Tensors in the object store, as a StateSource.

    An object of this class contains only references to parcels. Ray does not resolve references inside an object, so
    that a process can forward it without fetching tensors.

    Args:
        parcels: the tensors in the store.
        elsewhere: sources of tensors that are in no parcel, such as files; they are read where ``read`` is called.
    """

    title = "What the run began with"
    updates = 0

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
        """Yield (name, tensor) of the named tensors, see StateSource; fetch only the parcels that have any of them."""
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

    def let_go(self, saved: Collection[str]) -> None:
        """Drop parcels whose tensors are all in ``saved``, the names in checkpoints, so that Ray frees them."""
        self._parcels[:] = [parcel for parcel in self._parcels if not set(parcel.names) <= set(saved)]


HAND_OVER_TIMEOUT_S = 300.0


class ActorOutputs:
    """Collector of an evaluation's outputs, in an actor of its own.

    The last stage calls ``give`` with each output; ``take`` returns all outputs.
    """

    def __init__(self) -> None:
        self._actor: Any = ray.remote(num_cpus=0, max_restarts=0)(ListOutputs).remote()
        self.give = partial(_give, self._actor)

    def take(self) -> list[Any]:
        outputs: list[Any] = ray.get(self._actor.take.remote(), timeout=HAND_OVER_TIMEOUT_S)
        return outputs

    def close(self) -> None:
        ray.kill(self._actor, no_restart=True)


def _give(actor: Any, output: Any) -> torch.Tensor:
    """Send an output of the last stage to the collecting actor; return its answer, a scalar in place of the loss."""
    # One at a time, so that at most one output waits in memory and they arrive in order.
    answer: torch.Tensor = ray.get(actor.give.remote(output), timeout=HAND_OVER_TIMEOUT_S)
    return answer
