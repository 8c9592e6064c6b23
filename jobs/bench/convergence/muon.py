"""torch.optim.Muon with its Newton-Schulz iteration in float32, for matrices of one shape at once.

torch's iteration multiplies in bfloat16, one matrix at a time: thirty times the seconds of float32 on a processor
without units for bfloat16. tests/jobs/test_bench_convergence.py compares the two.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BatchedMuon"]


class BatchedMuon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) with Nesterov momentum; every learning rate is scaled by 0.2 sqrt(longer side).

    Args:
        groups: matrices, or groups of them with options such as ``lr``.
        rate: learning rate of groups that have none.
    """

    def __init__(self, groups: Any, rate: float) -> None:
        super().__init__(groups, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have gradients; ``closure`` is not called."""
        by_shape: dict[torch.Size, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append((p, group))
        for held in by_shape.values():
            updates = []
            for p, group in held:
                assert p.grad is not None
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(buffer, group["momentum"]))
            first = held[0][1]
            directions = orthogonalized(torch.stack(updates), first["ns_coefficients"], first["ns_steps"], first["eps"])
            for (p, group), direction in zip(held, directions, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonalized(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Bring the singular values of the matrices x (count, rows, columns) near one by a quintic iteration."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
