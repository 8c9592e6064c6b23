"""BatchNorm with momentum=None as one operation of a graph.

It averages over all batches so far: the weight of the new one is 1 / num_batches_tracked, a number that a graph cannot
compute, because it is read out of a tensor. In here it is read when the operation runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["cumulative_norms"]

_library = torch.library.Library("raypipe", "DEF")
_library.define(
    "cumulative_batch_norm(Tensor input, Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) count, "
    "Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def _cumulative_batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    count: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    count.add_(1)
    has_value = not (count.is_meta or is_fake(count))
    factor = 1.0 / float(count) if has_value else 1.0
    return functional.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)


_library.impl("cumulative_batch_norm", _cumulative_batch_norm, "CompositeImplicitAutograd")


@contextmanager
def cumulative_norms() -> Iterator[None]:
    """While inside, modules call the operation."""
    original = _BatchNorm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return original(self, x)
        self._check_input_dim(x)
        return torch.ops.raypipe.cumulative_batch_norm(
            x, self.running_mean, self.running_var, self.num_batches_tracked, self.weight, self.bias, self.eps
        )

    _BatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
