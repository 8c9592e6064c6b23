"""Copies of a user's modules, for this process or to be sent to another one.

The old weight_norm and spectral_norm keep the weight as a plain attribute that a hook recomputes before every forward.
Such a weight has an autograd history, which copy.deepcopy refuses, or shares the memory of a parameter, which a
skeleton (copy on the meta device) must not contain. torch.nn.utils.parametrize replaces a module's class by one that
exists in this process only; the original class is sent instead.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

M = TypeVar("M", bound=nn.Module)


def copy_of(model: M) -> M:
    """Deep-copy a module. Tensors with an autograd history are copied without their history."""
    memo = {id(tensor): tensor.detach().clone() for tensor in _attributes(model) if not tensor.is_leaf}
    return copy.deepcopy(model, memo | _described(model))


def skeleton_of(model: M) -> M:
    """Deep-copy a module to the meta device: parameters, buffers, and attributes computed from them have no memory."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    memo = {
        id(tensor): torch.empty_like(tensor, device="meta")
        for tensor in _attributes(model)
        if not tensor.is_leaf or (not tensor.is_meta and tensor.untyped_storage().data_ptr() in held)
    }
    with torch.no_grad():  # a buffer that requires a gradient would get an autograd history
        return copy.deepcopy(model, memo | _described(model)).to("meta")


def made_by_hooks(module: nn.Module) -> set[str]:
    """Return the names of a module's attributes that weight_norm or spectral_norm recomputes before every forward."""
    hooks = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}


def _described(model: nn.Module) -> dict[int, torch.Tensor]:
    """Copy the 4-bit weights on the meta device, at which bitsandbytes' own __deepcopy__ fails; return copies by id."""
    weights = (p for p in model.parameters() if p.is_meta and hasattr(p, "quant_state"))
    return {id(p): type(p)(p.data, p.requires_grad, **vars(p)) for p in weights}


def _attributes(model: nn.Module) -> list[torch.Tensor]:
    """List the tensor attributes that are neither parameters nor buffers."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]


def portable(model: nn.Module) -> nn.Module:
    """Return a module that can be pickled: a copy with the original classes if parametrized, else the given module."""
    if not any(parametrize.is_parametrized(module) for module in model.modules()):
        return model
    packed = copy.deepcopy(model)
    for module in packed.modules():
        if parametrize.is_parametrized(module):
            module.__class__ = type(module).__bases__[0]
            module._load_state_dict_pre_hooks.clear()  # local functions, and no stage loads a state_dict
    return packed


def unpacked(model: nn.Module) -> nn.Module:
    """Restore, in place, the classes of parametrized modules that `portable` replaced; return the module."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize._inject_new_class(module)
            for name in module.parametrizations:  # type: ignore[union-attr]
                parametrize._inject_property(module, name)
    return model
