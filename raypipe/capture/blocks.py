"""Blocks of a model: the layers of its longest list, and which of them a trace comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest nn.ModuleList or nn.Sequential of a model; [] if it has none.

    Lists inside of another list, such as the experts of each layer, do not count.
    """
    lists = [list(children) for children in _outermost_lists(model)]
    return max(lists, key=len, default=[])


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from _outermost_lists(child)


@contextmanager
def watched_blocks(model: nn.Module, begins: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``begins(number of the block, number of blocks)`` before each forward of a block of the model.

    Blocks are counted from 1. The hook is registered for all modules of torch, because some modules (such as torch's
    nn.TransformerEncoderLayer) compute in another way if they have a hook of their own.
    """
    blocks = blocks_of(model)
    numbers = {id(block): number for number, block in enumerate(blocks, 1)}

    def before_forward(module: nn.Module, _args: object) -> None:
        if torch.compiler.is_dynamo_compiling():  # in a branch of torch.cond
            return
        if number := numbers.get(id(module)):
            begins(number, len(blocks))

    hook = register_module_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        hook.remove()
