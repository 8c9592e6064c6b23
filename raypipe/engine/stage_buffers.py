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

__all__ = ["StageBuffers"]


class StageBuffers:
    """Of one stage.

    Args:
        modes: "train", and "eval" where there is one.
        held: all buffers of the stage by name; they stay the same tensors.
    """

    def __init__(self, modes: Mapping[str, StageFunction], held: Mapping[str, torch.Tensor]) -> None:
        self._held = {mode: {name: held[name] for name in of.buffers} for mode, of in modes.items()}
        self._changing = modes["eval"].changing_buffers if "eval" in modes else ()
        self._trained = [held[name] for name in modes["train"].changing_buffers]
        self._before: list[torch.Tensor] = []
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

    def of(self, *, training: bool) -> dict[str, torch.Tensor]:
        """For a forward, which may change them."""
        return self._held["train"] if training or self._evaluation is None else self._evaluation
