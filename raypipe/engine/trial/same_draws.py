"""Draws of an optimizer's step on trial, so that one of a stage can be compared with one of the whole model.

Every draw of a shape gives the same numbers, in whatever order parameters come. How many were drawn is counted: one
number for all parameters would be another one on each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.randomness import draws_randomness

__all__ = ["SameDraws"]


class SameDraws(TorchDispatchMode):
    """Within it draws follow from their shape and from the seed alone.

    Attributes:
        seed: set by whoever steps, before each step.
        count: numbers that were drawn so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.count = 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        drawing = draws_randomness(op, args, given)
        if drawing:
            torch.manual_seed(self.seed)
        made = op(*args, **given)
        if drawing:
            self.count += (made[0] if isinstance(made, tuple) else made).numel()
        return made
