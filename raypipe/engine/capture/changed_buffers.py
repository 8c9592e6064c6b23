"""Which buffers a forward changes, where no graph tells: seen by trying.

Torch counts what is written in place, but neither what a batch norm does to its statistics nor what is written through
``.data``; so values are compared as well, to the bit. On the meta device there are none, and of norms their type tells.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator

import torch
from torch import nn

from raypipe.engine.copies import copy_of
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.stage_buffers import same_bits

__all__ = ["BuffersBefore", "changed_buffers", "without_weights"]


class BuffersBefore:
    """The buffers of a module as they are now.

    Args:
        module: what its forward changes is asked for later.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            name: (id(held), held._version, None if held.is_meta else held.clone())
            for name, held in module.named_buffers()
        }

    def changed(self) -> Iterator[str]:
        """Local names of those that were replaced, written to, or hold other values."""
        statistics = _statistics(self._module, training=True)
        for name, held in self._module.named_buffers():
            known, version, value = self._before[name]
            written = (id(held), held._version) != (known, version)
            if written or (name in statistics if value is None else not same_bits(held, value)):
                yield name


def without_weights(model: nn.Module) -> bool:
    """Whether it has parameters on the meta device: then its children are run there, for shapes."""
    return any(parameter.is_meta for parameter in model.parameters())


def changed_buffers(model: nn.Module, example: torch.Tensor) -> set[str]:
    """Names of the buffers that are others after a forward in training; by value, which says more than torch counts."""
    if not any(buffer.is_floating_point() for buffer in model.buffers()):
        return set()
    if without_weights(model):
        return _statistics(model)
    trial = copy_of(model).train()
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    with torch.no_grad(), KeyedRandomness(RandomKey(0, 0, 0)):
        contextvars.copy_context().run(trial, example.clone())
    return {name for name, buffer in trial.named_buffers() if not torch.equal(buffer, before[name])}


def _statistics(model: nn.Module, *, training: bool = False) -> set[str]:
    """Names of what norms keep of the batches that they see: all that can be told without values.

    Args:
        training: only of those that are in training mode.
    """
    norms = [(path, x) for path, x in model.named_modules() if isinstance(x, nn.modules.batchnorm._NormBase)]
    return {
        f"{path}.{name}".lstrip(".")
        for path, norm in norms
        if norm.training or not training
        for name, _ in norm.named_buffers()
    }
