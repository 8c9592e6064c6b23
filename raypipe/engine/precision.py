"""A precision in torch: where autocast holds, what is converted, and a user's model in it.

    plain PyTorch                                    here
    model.to(torch.bfloat16)(x.to(torch.bfloat16))   leaves, buffers and float columns of a stage are converted
    with torch.autocast("cpu", torch.bfloat16): ...  around a stage's forward, and around the loss

A stage function knows its precision, so that whoever calls it computes the same. A weight that a forward uses several
times is converted at each use, as with torch.autocast(cache_enabled=False): the cache is one for all threads of a
process, so that with it the bits would depend on what other threads do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.errors import CaptureError
from raypipe.ir.precision import FP32, Precision

__all__ = ["computing", "converted", "leaf_dtype", "model_converted", "model_in", "refuse_other_types", "uncast"]


def computing(precision: Precision, tensors: Sequence[torch.Tensor | None] = ()) -> AbstractContextManager[object]:
    """Around a forward: torch.autocast where the precision asks for it.

    Args:
        tensors: that it reads, which are all on one device; a CPU where there are none.
    """
    if not precision.autocast:
        return nullcontext()
    device_type = next((x.device.type for x in tensors if x is not None and not (x.is_cpu or x.is_meta)), "cpu")
    return torch.autocast(device_type, dtype=getattr(torch, precision.autocast), cache_enabled=False)


def uncast(kind: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operation of a region in which the model switches autocast off, as models do around rotary angles and routers.

    Args:
        kind: type of the device that the region names. "cpu", where models are captured, stands for the device of the
            tensors, which is where such code takes it from.
    """
    device_type = next((x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), kind)
    if device_type == "meta" or kind not in ("cpu", device_type):
        return operation(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return operation(*args, **kwargs)


def leaf_dtype(precision: Precision) -> torch.dtype | None:
    """Of the leaves that have storage of their own; None where the parameters are the leaves."""
    found: torch.dtype | None = getattr(torch, precision.leaves) if precision.leaves else None
    return found


def converted(tensors: Sequence[torch.Tensor], precision: Precision) -> Sequence[torch.Tensor]:
    """Floating-point ones in the type of the leaves, the others as they are; the same where there is none."""
    dtype = leaf_dtype(precision)
    if dtype is None:
        return tensors
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


@contextmanager
def model_in(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """The user's module as it is in this precision: its forward inside is the one that stages compute."""
    with model_converted(model, precision), computing(precision):
        yield


@contextmanager
def model_converted(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """The user's module with parameters converted to this precision; autocast is not switched on.

    Its tensors are put back afterwards, not converted back, so that they lose nothing.
    """
    dtype = leaf_dtype(precision)
    named = () if dtype is None else (*model.parameters(), *model.buffers())
    held = [(tensor, tensor.data) for tensor in named if tensor.is_floating_point()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()] if held else []
    for parameter, _ in gradients:
        parameter.grad = None  # torch wants it in the type of its parameter
    try:
        for tensor, data in held:
            tensor.data = data.to(dtype)
        yield
    finally:
        for parameter, _ in gradients:
            parameter.grad = None
        for tensor, data in held:
            tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient


def refuse_other_types(model: torch.nn.Module, precision: Precision) -> None:
    """Any precision but fp32 is defined for a model that was built in fp32; under autocast, for what trains of it.

    Raises:
        CaptureError: names the first parameter or buffer of another floating-point type.
    """
    if precision == FP32:
        return
    trains = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, tensor in trains if precision.autocast else (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype is not torch.float32:
            raise CaptureError(
                f"precision={precision.name!r} keeps parameters in fp32, but {name!r} is of {tensor.dtype}. Build the "
                "model in fp32 (model.float()), or leave precision out to train it in the types that it has."
            )
