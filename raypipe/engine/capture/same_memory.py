"""Tensors of a model over the same memory: what one of them learns, the others show, in plain PyTorch.

    head.weight.data = embed.weight.data              two parameters, one memory
    register_buffer("first", self.table.data[:8])     a buffer that is a part of a parameter
    self.early = self.linear.weight.detach()          an attribute

Stages hold every tensor by its name, each for itself: after a step such tensors would drift apart without a word.
One parameter under two names is none of these; it is shared, and stages keep its uses together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

import torch

from raypipe.errors import CaptureError

__all__ = ["refuse_constants", "refuse_same_memory"]

Tensors = Mapping[str, torch.Tensor]


def refuse_same_memory(named: Tensors, changing: Collection[str]) -> None:
    """Refuse two tensors of a model of which one changes and the other shows it.

    Args:
        named: parameters and buffers, each once.
        changing: names of those that training changes.

    Raises:
        CaptureError: names both, and what to write.
    """
    for one, other in _overlapping(named):
        if one in changing or other in changing:
            raise CaptureError(
                f"{one!r} and {other!r} are two tensors over the same memory. Stages hold each for itself, so that "
                "what changes one would not show in the other, as it does in plain PyTorch. Make them one and the same "
                "(model.head.weight = model.embed.weight), or give one of them its own memory with clone()."
            )


def refuse_constants(constants: Collection[torch.Tensor], named: Tensors, changing: Collection[str]) -> None:
    """Refuse what a traced forward reads besides parameters and buffers, where it has the memory of one that changes.

    Raises:
        CaptureError: names the parameter or the buffer.
    """
    for constant in constants:
        for name in changing:
            if name in named and _share(constant, named[name]):
                raise CaptureError(
                    f"forward reads a tensor over the memory of {name!r} that is none of the model's parameters and "
                    f"buffers. Stages would keep it as it is now, while it follows {name!r} in plain PyTorch. Use "
                    f"{name!r} itself in forward, with detach() there if it shall not learn by it, or clone() what "
                    "shall stay as it is."
                )


def _overlapping(named: Tensors) -> Iterator[tuple[str, str]]:
    """Names of two tensors that share a place in memory."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if _has_memory(tensor):
            by_storage.setdefault(_storage(tensor), []).append(name)
    for names in by_storage.values():
        for one, other in combinations(names, 2):
            if _share(named[one], named[other]):
                yield one, other


def _has_memory(tensor: torch.Tensor) -> bool:
    """Or would have it, of a model that is built without."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    """Its address; of one on the meta device, which has no memory, what tells it from others."""
    storage = tensor.untyped_storage()
    return int(storage._cdata if tensor.is_meta else storage.data_ptr())


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some place in memory belongs to both; columns of one matrix lie between each other and share none."""
    if not (_has_memory(one) and _has_memory(other)):
        return False
    if (one.is_meta or other.is_meta) and not (one.is_meta and other.is_meta and _storage(one) == _storage(other)):
        return False
    (begin, end), (start, stop) = _span(one), _span(other)
    if end <= start or stop <= begin:
        return False
    if one.dtype != other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    size, first = one.element_size(), min(begin, start)
    marks = torch.zeros((max(end, stop) - first) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), (begin - first) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (start - first) // size).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address, and the one behind the last."""
    size = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = _storage(tensor) + int(tensor.storage_offset()) * size
    return begin, begin + (last + 1) * size
