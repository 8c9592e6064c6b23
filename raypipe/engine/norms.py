"""The gradient norm of the whole model, from those of its parameters: the same bits however it is cut.

torch takes the norm of the stacked norms in the order of the user's ``named_parameters()``. Stages that wait for each
other exchange theirs before the optimizer's step (``reduction``); those that do not tell them with their reports, and
whoever has all of them makes the total.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.ir.report import Norms

__all__ = ["norm_of", "norms_told", "total_norm"]


def total_norm(places: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Scalar, of norms at these places among all parameters."""
    return torch.linalg.vector_norm(norms[torch.argsort(places)])


def norms_told(places: torch.Tensor, norms: torch.Tensor) -> Norms:
    """For a report; ``norm_of`` has the same bits."""
    return Norms(tuple(places.tolist()), tuple(norms.tolist()), str(norms.dtype).removeprefix("torch."))


def norm_of(parts: Sequence[Norms]) -> float:
    """Of the whole model, from what its stages told."""
    places = torch.tensor([place for part in parts for place in part.places], dtype=torch.int64)
    norms = [torch.tensor(part.norms, dtype=getattr(torch, part.dtype)) for part in parts]
    return float(total_norm(places, torch.cat(norms)))
