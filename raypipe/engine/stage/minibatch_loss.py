"""Loss of a whole mini-batch, computed once from the outputs of all its micro-batches (loss_over="minibatch").

    outputs of F0 F1 F2 F3 --detached, joined--> outputs of the mini-batch --loss_fn, with all targets--> loss
    B0 B1 B2 B3 <---------slices of the gradient by the outputs of the mini-batch <-------------------------+

A loss that compares samples with each other, such as a contrastive one, is no weighted sum over micro-batches. From the
gradient by its outputs each micro-batch runs its own backward, so the gradients of the parameters are those of the loss
over the mini-batch (the gradient cache of Gao et al., arXiv:2101.06983). All forwards of the last stage precede its
backwards, as in the schedule "gpipe".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class WholeMinibatch:
    """Rule by which outputs of micro-batches become those of their mini-batch.

    Attributes:
        joined: by mode ("train", "eval"), for each output tensor of the model, the dimension along which micro-batches
            are joined; None for an output without samples, such as a temperature, which all micro-batches have alike.
    """

    joined: Mapping[str, tuple[int | None, ...]]

    words = "the whole mini-batch"

    def join(self, mode: str, outputs: Sequence[Sequence[torch.Tensor]]) -> Tensors:
        """Join the output tensors of micro-batches, given in their order, to those of the mini-batch."""
        by_output = zip(self.joined[mode], zip(*outputs, strict=True), strict=True)
        return tuple(parts[0] if dim is None else torch.cat(parts, dim) for dim, parts in by_output)

    def join_returned(self, returned: Sequence[Any]) -> Any:
        """Join what a model returned for micro-batches in training mode, in its own structure."""
        leaves, specs = zip(*(pytree.tree_flatten(one) for one in returned), strict=True)
        whole = iter(self.join("train", [[x for x in some if isinstance(x, torch.Tensor)] for some in leaves]))
        return pytree.tree_unflatten([next(whole) if isinstance(x, torch.Tensor) else x for x in leaves[0]], specs[0])


class MinibatchOutputs:
    """Outputs and targets of the micro-batches of one mini-batch, kept by the last stage until the loss is computed.

    Args:
        reduction: ``WholeMinibatch``; nothing is kept for any other reduction.
    """

    def __init__(self, reduction: Any) -> None:
        self._rule = reduction if isinstance(reduction, WholeMinibatch) else None
        self._outputs: list[Tensors] = []
        self._targets: list[Mapping[Any, torch.Tensor]] = []

    @property
    def used(self) -> bool:
        """True if the loss is computed over the whole mini-batch."""
        return self._rule is not None

    def __len__(self) -> int:
        return len(self._outputs)

    def clear(self) -> None:
        """Drop all micro-batches."""
        self._outputs.clear()
        self._targets.clear()

    def add(self, outputs: Tensors, targets: Mapping[Any, torch.Tensor]) -> None:
        """Keep a micro-batch's outputs, detached from their graph, and the columns that the loss reads."""
        self._outputs.append(tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs))
        self._targets.append(targets)

    def joined(self, mode: str) -> tuple[Tensors, dict[Any, torch.Tensor]]:
        """Return outputs and targets of the whole mini-batch."""
        assert self._rule is not None
        targets = {name: torch.cat([some[name] for some in self._targets]) for name in self._targets[0]}
        return self._rule.join(mode, self._outputs), targets

    def gradients(
        self, loss: torch.Tensor, scale: torch.Tensor, last: int
    ) -> list[tuple[int, tuple[torch.Tensor | None, ...]]]:
        """Compute the gradient of ``scale * loss`` by the outputs of each micro-batch.

        Args:
            last: number of the last micro-batch.

        Returns:
            (number of the micro-batch, gradients) in their order; None for an output that has no gradient or that the
            loss does not read.
        """
        leaves = [x for outputs in self._outputs for x in outputs if x.requires_grad]
        found = iter(torch.autograd.grad(loss, leaves, scale, allow_unused=True))
        grads = [tuple(next(found) if x.requires_grad else None for x in outputs) for outputs in self._outputs]
        return list(enumerate(grads, last + 1 - len(grads)))
