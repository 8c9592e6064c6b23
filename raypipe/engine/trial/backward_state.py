"""Buffers that a backward changes: a pipeline has its backwards in another order, and recomputation makes more of them.

    plain PyTorch    F0 B0 F1 B1        a stage of 1F1B    F0 F1 B0 F2 B1 ...

What only forwards change is the same there, for they keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raypipe.engine.stage_buffers import same_bits
from raypipe.errors import CaptureError

__all__ = ["refuse_changed_by_backward"]


def refuse_changed_by_backward(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Compare buffers by name: what they held when the forward had ended, and when the backward had.

    Raises:
        CaptureError: one of them has changed.
    """
    changed = next((name for name, buffer in before.items() if not same_bits(buffer, after[name])), None)
    if changed is not None:
        raise CaptureError(
            f"The backward changes the buffer {changed!r} of the model. In a pipeline backwards come in another order, "
            "so that it would hold other numbers than in plain PyTorch. If torch.utils.checkpoint is around its "
            "module, whose forward then runs twice, take that out and set recompute='always', with which it changes "
            "once; else let the forward change it."
        )
