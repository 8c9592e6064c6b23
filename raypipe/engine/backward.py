"""One backward without ceremony: gradients accumulate in the leaves, as autograd itself adds them.

torch.autograd.backward checks its arguments in Python for 60 to 90 us, which counts when an accelerator's stage
launches a backward every few milliseconds. The engine takes the same tensors; its entry point has an underscore,
so it is looked up once, and the public function stands in where it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["accumulate"]

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run = getattr(_engine, "run_backward", None)


def accumulate(roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Add the gradients of sum(roots * seeds) to ``leaf.grad``; a leaf that the roots do not reach is left alone.

    Args:
        seeds: one per root, of its shape and dtype. The roots' graph is freed.
    """
    if _run is None:
        torch.autograd.backward(list(roots), list(seeds), inputs=list(leaves))
        return
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    _run(tuple(roots), tuple(seeds), False, False, tuple(leaves), True, True)
