"""Mixed precision in torch: autocast regions, conversion of tensors, and a user's model in a precision.

    plain PyTorch                                    here
    model.to(torch.bfloat16)(x.to(torch.bfloat16))   leaves, buffers and float columns of a stage are converted
    with torch.autocast("cpu", torch.bfloat16): ...  around a stage's forward, and around the loss

A stage function has its precision as an attribute, so that every caller computes the same. A weight that a forward uses
several times is converted at each use, as with torch.autocast(cache_enabled=False): torch has one cache for all threads
of a process, so that with it the results would depend on other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.errors import CaptureError
from raypipe.ir.precision import FP32, Precision


def computing(precision: Precision, tensors: Sequence[torch.Tensor | None] = ()) -> AbstractContextManager[object]:
    """Return the context of a forward: torch.autocast if the precision has it, for the device of ``tensors``."""
    if not precision.autocast:
        return nullcontext()
    device_type = next((x.device.type for x in tensors if x is not None and not (x.is_cpu or x.is_meta)), "cpu")
    return torch.autocast(device_type, dtype=getattr(torch, precision.autocast), cache_enabled=False)


def uncast(kind: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operation without autocast, as the model does in a region autocast(kind, enabled=False).

    Args:
        kind: device type of the region. "cpu", on which models are traced, means the device of the operation's tensors.
            If the tensors are on another type of device than ``kind``, autocast stays enabled.
    """
    device_type = next((x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), kind)
    if device_type == "meta" or kind not in ("cpu", device_type):
        return operation(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return operation(*args, **kwargs)


def leaf_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype to which parameters are converted for forwards; None if they are used as they are."""
    dtype: torch.dtype | None = getattr(torch, precision.leaves) if precision.leaves else None
    return dtype


def converted(tensors: Sequence[torch.Tensor], precision: Precision) -> Sequence[torch.Tensor]:
    """Convert floating-point tensors to ``leaf_dtype``; return ``tensors`` itself if there is nothing to convert."""
    dtype = leaf_dtype(precision)
    if dtype is None:
        return tensors
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


@contextmanager
def model_in(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """Let the user's module compute in this precision inside the context, with converted tensors and autocast."""
    with model_converted(model, precision), computing(precision):
        yield


@contextmanager
def model_converted(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """Convert the tensors of the user's module to this precision inside the context, without autocast.

    The original tensors are restored afterwards, not converted back, so that no bits are lost.
    """
    dtype = leaf_dtype(precision)
    named = () if dtype is None else (*model.parameters(), *model.buffers())
    held = [(tensor, tensor.data) for tensor in named if tensor.is_floating_point()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()] if held else []
    for parameter, _ in gradients:
        parameter.grad = None  # torch requires the dtype of the parameter
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
    """Refuse a model that was not built in fp32, unless the precision is FP32.

    If the precision uses autocast, only trained parameters are checked.

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
