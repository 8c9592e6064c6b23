"""A stage's functions where it computes: what they hold, and what they make, on the device instead of in host memory.

    captured    arange(8, device=device(type='cpu')), a constant of the model, a loss with weights of classes
    placed      the same source, in which the CPU stands for the device; copies of the constant and of the weights

An nn.Sequential runs the user's modules as they are: what they make in host memory they would in plain PyTorch too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from raypipe.engine.crossing import Crossing
from raypipe.engine.device import Crosses
from raypipe.engine.stage import GraphFunction, StageFunction

__all__ = ["placed", "placed_loss"]

Loss = Callable[..., Any]


def placed(function: StageFunction, crossing: Crossing) -> StageFunction:
    """The function on the device of ``crossing``; itself on one that computes in host memory at once."""
    if crossing.device.immediate or not isinstance(function, GraphFunction):
        return function
    constants = crossing.named(dict(enumerate(function.constants)), Crosses.CONSTANTS)
    return replace(function, constants=tuple(constants.values()), place=crossing.device.place, _function=None)


def placed_loss(loss: Loss | None, crossing: Crossing) -> Loss | None:
    """The loss of a last stage, with what it holds on the device: tensors of a module, such as weights of classes."""
    loss_fn = getattr(loss, "loss_fn", None)
    if crossing.device.immediate or not is_dataclass(loss) or not isinstance(loss_fn, torch.nn.Module):
        return loss
    return replace(loss, loss_fn=_module_on(loss_fn, crossing))  # type: ignore[type-var]


def _module_on(module: torch.nn.Module, crossing: Crossing) -> torch.nn.Module:
    """A copy of a module, whose parameters and buffers lie on the device."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        held = {name: tensor for name, tensor in part._parameters.items() if tensor is not None}
        for name, tensor in crossing.named(held, Crosses.CONSTANTS).items():
            part._parameters[name] = torch.nn.Parameter(tensor.detach(), held[name].requires_grad)
        buffers = {name: tensor for name, tensor in part._buffers.items() if tensor is not None}
        part._buffers.update(crossing.named(buffers, Crosses.CONSTANTS))
    return copied
