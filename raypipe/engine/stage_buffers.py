"""The buffers of a stage, by mode: those of training as they are, and copies for what an evaluation would change.

training    average --F0--> average --F1--> average ............................. --F2--> average
                                               |  copied where it begins            the same
evaluation                                     +--> average --F--> average    (dropped)

Evaluation mode changes no statistics of a BatchNorm, but a module may count or average in every forward. An evaluation
is as one of plain PyTorch on a copy of the model: what its forwards change counts for those behind, and then no more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raypipe.engine.stage import StageFunction
from raypipe.errors import StageError

__all__ = ["StageBuffers", "same_bits"]


class StageBuffers:
    """Of one stage.

    Args:
        modes: "train", and "eval" where there is one.
        held: all buffers of the stage by name; they stay the same tensors.
    """

    def __init__(self, modes: Mapping[str, StageFunction], held: Mapping[str, torch.Tensor]) -> None:
        self._held = {mode: {name: held[name] for name in of.buffers} for mode, of in modes.items()}
        self._changing = modes["eval"].changing_buffers if "eval" in modes else ()
        self._names = modes["train"].changing_buffers
        self._trained = [held[name] for name in self._names]
        self._before: list[torch.Tensor] = []
        self._constant = frozenset(modes["train"].tried_constant)
        self._evaluation: dict[str, torch.Tensor] | None = None

    def begin(self, *, training: bool, anew: bool) -> None:
        """Of a segment.

        Args:
            anew: an evaluation begins with it.
        """
        if training:
            self._evaluation = None
        elif anew or self._evaluation is None:
            held = self._held["eval"]
            self._evaluation = held | {name: held[name].detach().clone() for name in self._changing}

    def keep(self) -> None:
        """A step begins that may be begun anew."""
        if not self._before:
            self._before = [x.detach().clone() for x in self._trained]
        else:
            for kept, x in zip(self._before, self._trained, strict=True):
                kept.copy_(x)

    def bring_back(self) -> None:
        """What they were at the last ``keep``."""
        for kept, x in zip(self._before, self._trained, strict=bool(self._before)):
            x.copy_(kept)

    def check(self, stage: int) -> None:
        """After a step that began with ``keep``, of a stage with replicas: each would go on with its own buffers.

        Raises:
            StageError: a forward changed a buffer that none changed when the model was tried.
        """
        for name, x, kept in zip(self._names, self._trained, self._before, strict=True):
            if name in self._constant and not same_bits(x, kept):
                raise StageError(
                    f"Stage {stage} changed {name!r} in this step and not when the model was tried, so that its "
                    "replicas came to differ, each by the micro-batches that it saw. Give the stage one worker "
                    "(num_replicas takes a list, one number per stage), or set replicated_buffers=True, with which "
                    "each replica keeps its own."
                )

    def of(self, *, training: bool) -> dict[str, torch.Tensor]:
        """For a forward, which may change them."""
        return self._held["train"] if training or self._evaluation is None else self._evaluation


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type are equal, NaN as any other value."""
    return torch.equal(one, two) or torch.equal(_bits(one), _bits(two))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1).view(torch.uint8)
