"""Copies of a user's modules, here and in another process, whatever makes their weights.

The old weight_norm and spectral_norm keep the weight as a plain attribute that a hook makes anew before every forward.
It has a history, which copy.deepcopy refuses, or the memory of a parameter, which a skeleton must not carry along.
torch.nn.utils.parametrize gives a module a class that exists in one process only; it travels as its own class.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["copy_of", "made_by_hooks", "portable", "skeleton_of", "unpacked"]

M = TypeVar("M", bound=nn.Module)


def copy_of(model: M) -> M:
    """A deep copy; tensors that an operation made are copied without their history."""
    memo = {id(tensor): tensor.detach().clone() for tensor in _attributes(model) if not tensor.is_leaf}
    return copy.deepcopy(model, memo)


def skeleton_of(model: M) -> M:
    """A copy whose parameters, buffers, and what was made of them, are on the meta device."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    memo = {
        id(tensor): torch.empty_like(tensor, device="meta")
        for tensor in _attributes(model)
        if not tensor.is_leaf or (not tensor.is_meta and tensor.untyped_storage().data_ptr() in held)
    }
    return copy.deepcopy(model, memo).to("meta")


def made_by_hooks(module: nn.Module) -> set[str]:
    """Attributes that a hook makes anew before every forward, so that nothing reads what was in them."""
    hooks = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}


def _attributes(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that are neither parameters nor buffers."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]


def portable(model: nn.Module) -> nn.Module:
    """The module, or a copy of it that can be pickled."""
    if not any(parametrize.is_parametrized(module) for module in model.modules()):
        return model
    packed = copy.deepcopy(model)
    for module in packed.modules():
        if parametrize.is_parametrized(module):
            module.__class__ = type(module).__bases__[0]
            module._load_state_dict_pre_hooks.clear()  # local functions, and no stage loads a state_dict
    return packed


def unpacked(model: nn.Module) -> nn.Module:
    """The same module with what `portable` left out of it."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize._inject_new_class(module)
            for name in module.parametrizations:  # type: ignore[union-attr]
                parametrize._inject_property(module, name)
    return model
