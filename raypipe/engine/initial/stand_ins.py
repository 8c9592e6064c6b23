"""Parameters that look like those of a model on the CPU and take no memory, for as long as a model is traced.

Tracing reads shapes, strides, types and devices, never values. On the meta device the trace would not be that of the
model that stages run: `torch.arange(n, device=h.device)` would make its numbers on meta in every stage. So each
parameter gets addresses that nothing has written to, which the operating system backs by no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["empty_like_on_host", "stand_ins"]

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


def empty_like_on_host(like: torch.Tensor) -> torch.Tensor:
    """Of this shape, type and strides, on the CPU, in addresses that take no memory until they are written to."""
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = mmap.mmap(-1, count * like.dtype.itemsize, flags=_FLAGS)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, parameters of the model that are on the meta device are on the CPU; tied ones stay tied."""
    held: dict[int, nn.Parameter] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for _, _, parameter in places:
        if id(parameter) not in held:
            held[id(parameter)] = nn.Parameter(empty_like_on_host(parameter), requires_grad=parameter.requires_grad)
    try:
        for module, name, parameter in places:
            _put(module, name, held[id(parameter)])
        yield
    finally:
        for module, name, parameter in places:
            _put(module, name, parameter)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if isinstance(module, nn.RNNBase):  # which keeps a list of its weights too
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter
