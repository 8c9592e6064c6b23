"""How far a worker has come with the steps of a run, after it was stopped somewhere.

    F F B B REDUCE_GRAD | REDUCE_NORM | STEP      |        0 made        1 made
    0 made              | 0 made, ready           | 1 made

A synchronous step is made by all workers or by none that is left. A norm of the whole model is known only when every
worker has all its gradients: leaders wait for theirs before they tell their norms, and replicas tell the one that leads
when they are ready (``reduction``). So once any worker has made a step, all others have made it too or are ready, and
make it when they are told the norm. Where no worker has, it is begun anew on parameters that nobody has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Reached", "Scalar", "newest"]


class Scalar(NamedTuple):
    """A tensor of one element, to travel in a report: every value of its type is a float too.

    Attributes:
        dtype: by its name in torch.
    """

    value: float
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Scalar:
        return cls(float(tensor), str(tensor.dtype).removeprefix("torch."))

    def tensor(self, place: torch.device | None = None) -> torch.Tensor:
        """The same bits again."""
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype), device=place)


class Reached(NamedTuple):
    """Of one worker.

    Attributes:
        made: optimizer steps of the run that it has made, skipped ones included; None where it has begun none since it
            was given its state.
        ready: it has all its gradients of the next one.
        totals: gradient norm of the whole model and loss of the step that it made last.
        flows: other steps are begun before one is made, or stages take their norms alone; or only some of its stages
            have made the step in progress, or it was stopped while it did steps again alone.
    """

    made: int | None = None
    ready: bool = False
    totals: tuple[Scalar, Scalar] | None = None
    flows: bool = False


def newest(workers: Sequence[Reached], step: int) -> tuple[int, tuple[Scalar, Scalar] | None] | None:
    """(steps that all of them can have made, totals of the last one) without losing any; None where they cannot.

    Args:
        step: that those are at who have begun none.
    """
    if any(one.flows for one in workers):
        return None
    made = [step if one.made is None else one.made for one in workers]
    most = max(made)
    totals = next((one.totals for one, count in zip(workers, made, strict=True) if count == most and one.totals), None)
    for one, count in zip(workers, made, strict=True):
        if count < most and not (count == most - 1 and one.ready and totals is not None):
            return None
    return most, totals
