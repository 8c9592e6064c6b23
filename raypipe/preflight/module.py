"""Checks of a model for properties that neither a trace nor a comparison on two micro-batches reveals.

Gradient hooks, norms in evaluation mode, gradients scaled by word frequency, and tensors that share memory would train
without an error, but to other numbers than in plain PyTorch. A model whose own train() keeps modules in evaluation mode
is accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import nn

from raypipe.capture import Capture, TracedModel
from raypipe.capture.guards import in_mode
from raypipe.errors import CaptureError

Tensors = Mapping[str, torch.Tensor]
_CURE = (
    "To keep it in evaluation mode, let the model's own train() do so: def train(self, mode=True): "
    "super().train(mode); self.get_submodule({name!r}).eval(); return self."
)


def turned_on(model: nn.Module) -> list[str]:
    """List the paths of modules that are in evaluation mode and that model.train() would switch to training mode.

    The list is empty if the model itself is in evaluation mode.
    """
    if not model.training:
        return []
    evaluating = [path for path, module in model.named_modules() if not module.training]
    with in_mode(model, training=True):
        return [path for path in evaluating if model.get_submodule(path).training]


def refuse_still_norms(model: nn.Module) -> None:
    """Raise CaptureError for a norm in evaluation mode if model.train() would let training change its statistics."""
    for path in turned_on(model):
        module = model.get_submodule(path)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise CaptureError(
                f"The module {path!r}, {type(module).__name__}, is in evaluation mode, and training puts the "
                "whole model into training mode, as model.train() does: its statistics would "
                f"change. {_CURE.format(name=path)} If they are to change, call model.train() before."
            )


def note_on_modes(paths: Sequence[str]) -> str:
    """Return the plan's note that modules in evaluation mode will train in training mode; "" without such modules.

    Args:
        paths: result of ``turned_on``.
    """
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    if not outer:
        return ""
    more = f" and {len(outer) - 1} more" if len(outer) > 1 else ""
    return (
        f"the module {outer[0]!r}{more}, which was in evaluation mode, trains in training mode, dropout included, as "
        f"after model.train(). {_CURE.format(name=outer[0])}"
    )


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError for a gradient hook of a parameter or a backward hook of a module: no stage would call it."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"The parameter {name!r} has a gradient hook, which a stage would not run; remove it.")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"The module {name!r} has a backward hook, which a stage would not run; remove it.")


def refuse_frequencies(model: nn.Module, whole: str) -> None:
    """Raise CaptureError for an embedding with scale_grad_by_freq; called if a mini-batch has several micro-batches.

    Such an embedding divides gradients by the frequency of a word in the batch, which differs in a micro-batch.

    Args:
        whole: setting that makes one micro-batch of a mini-batch, for the message.
    """
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False) is True:
            raise CaptureError(
                f"The module {name!r}, {type(module).__name__}(scale_grad_by_freq=True), divides gradients by how "
                "often a word is in the batch, and a micro-batch has other numbers than its mini-batch. Set "
                f"scale_grad_by_freq=False, or {whole}."
            )


def refuse_aliased_memory(captured: Capture) -> None:
    """Raise CaptureError if two tensors share memory and training changes one of them.

        head.weight.data = embed.weight.data              two parameters, one memory
        register_buffer("first", self.table.data[:8])     a buffer that is a part of a parameter
        self.early = self.linear.weight.detach()          an attribute that a traced forward reads

    A stage holds each of them as a separate tensor, so that they would differ after a step. A single parameter under
    two names is accepted.
    """
    named, changing = {**captured.parameters, **captured.buffers}, captured.changing
    if isinstance(captured.model, TracedModel):
        _refuse_constants(captured.model.train.traced.constants.values(), named, changing)
    for one, other in _overlapping(named):
        if one in changing or other in changing:
            raise CaptureError(
                f"{one!r} and {other!r} are two tensors over the same memory. Stages hold them separately, so that "
                "a change of one would not change the other, as it does in plain PyTorch. Make them one and the same "
                "(model.head.weight = model.embed.weight), or give one of them its own memory with clone()."
            )


def _refuse_constants(constants: Collection[torch.Tensor], named: Tensors, changing: Collection[str]) -> None:
    for constant in constants:
        for name in changing:
            if name in named and _share(constant, named[name]):
                raise CaptureError(
                    f"forward reads a tensor over the memory of {name!r} that is not a parameter or buffer. "
                    f"Stages would keep its present values, while it follows {name!r} in plain PyTorch. Read {name!r} "
                    "in forward, with detach() if it needs no gradient, or clone() the tensor."
                )


def _overlapping(named: Tensors) -> Iterator[tuple[str, str]]:
    """Yield the two names of each pair of tensors that overlap in memory."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if _has_memory(tensor):
            by_storage.setdefault(_storage(tensor), []).append(name)
    for names in by_storage.values():
        for one, other in combinations(names, 2):
            if _share(named[one], named[other]):
                yield one, other


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is strided and has elements; a tensor on the meta device counts as well."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; on the meta device, a number that identifies the storage."""
    storage = tensor.untyped_storage()
    return int(storage._cdata if tensor.is_meta else storage.data_ptr())


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have an element in common; interleaved columns of one matrix do not."""
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
    """Return the address of a tensor's first byte, and the address after its last byte."""
    size = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = _storage(tensor) + int(tensor.storage_offset()) * size
    return begin, begin + (last + 1) * size
