"""One backward without ceremony.

torch.autograd.grad checks its arguments in Python for 60 to 90 us, which counts when an accelerator's stage
launches a backward every few milliseconds. The engine takes the same tensors; its entry point has an underscore,
so it is looked up once, and the public function stands in where it is missing.

Gradients are taken as autograd makes them, not from ``leaf.grad``: that one is laid out like the leaf, and a
convolution below a cut, whose sums follow the layout of its gradient, would round differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

__all__ = ["gradients"]

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run = getattr(_engine, "run_backward", None)


def gradients(
    roots: Sequence[torch.Tensor | GradientEdge],
    output_grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor | GradientEdge],
) -> Sequence[torch.Tensor | None]:
    """Gradients of sum(roots * output_grads) with respect to ``leaves``, None for those that the roots do not reach.

    Args:
        roots, leaves: tensors, or places in the graph where gradients enter and are taken.
        output_grads: one per root, of its shape and dtype. The roots' graph is freed.
    """
    if _run is None:
        return torch.autograd.grad(list(roots), list(leaves), list(output_grads), allow_unused=True)  # type: ignore[arg-type]
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    found: Sequence[torch.Tensor | None] = _run(
        tuple(roots), tuple(output_grads), False, False, tuple(leaves), True, False
    )
    return found
