"""Parameters in a list, tuple or dict of a module, which torch does not take for parameters of the model.

self.scales = [nn.Parameter(...)]        none of model.parameters(): computed with, never trained, in no checkpoint
self.scales = nn.ParameterList([...])    what was meant
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["note_on_unregistered"]


def note_on_unregistered(model: nn.Module) -> str:
    """What a plan says of them; empty of none."""
    known = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, list | tuple | Mapping):
                continue
            kind, has = ("Dict", "a dict") if isinstance(value, Mapping) else ("List", f"a {type(value).__name__}")
            for item in value.values() if isinstance(value, Mapping) else value:
                found = next((x for x in _tensors(item) if x.requires_grad and id(x) not in known), None)
                if found is not None:
                    where = f"{path}.{name}" if path else name
                    whole = f"nn.{'Module' if isinstance(item, nn.Module) else 'Parameter'}{kind}"
                    return (
                        f"{where!r} of the model is {has} with a parameter of shape {tuple(found.shape)}, which is "
                        "none of model.parameters(): nothing trains it, in plain PyTorch neither, and no checkpoint "
                        f"has it. Make that {whole}(...), or call requires_grad_(False) on what shall stay as it is."
                    )
    return ""


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, nn.Module):
        yield from item.parameters()
    elif isinstance(item, nn.Parameter):
        yield item
