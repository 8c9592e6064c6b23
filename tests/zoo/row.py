"""A row of the zoo: a model, its data and its loss, and the verdict that its training must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["EQUAL", "Equal", "Refused", "Rounding", "Row", "Verdict"]


@dataclass(frozen=True)
class Equal:
    """To the bit."""

    word = "equal"
    note = ""


@dataclass(frozen=True)
class Rounding:
    """Not to the bit.

    Attributes:
        why: in words.
        bound: largest difference, as a part of the largest entry; see training.py.
    """

    why: str
    bound: float = 1e-5
    word = "rounding"

    @property
    def note(self) -> str:
        return f"within {self.bound:g}: {self.why}"


@dataclass(frozen=True)
class Refused:
    """Before the first step.

    Attributes:
        message: the whole of it; ``{line}`` stands for a file of this folder with a line, as in ``x.py:12``.
        note: what is wrong, in a few words.
    """

    message: str
    note: str
    word = "refused"


Verdict = Equal | Rounding | Refused
EQUAL = Equal()


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        family, model, loss, data: the words of the table; the model, the loss and the data name the row.
        build: makes the model; always with the same seed.
        make_data: number of samples -> dataset.
        loss_fn: None where the model returns its own loss.
        note: a sentence for the table, besides the verdict's.
        stages: of the pipeline.
        microbatches: numbers that a mini-batch of 8 samples is cut into, one run each.
        needs: a package that is not required to develop raypipe; without it the row's test is skipped.
        pending: why the verdict is not yet true.
    """

    family: str
    model: str
    build: Callable[[], nn.Module]
    make_data: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    loss: str
    data: str
    verdict: Verdict = EQUAL
    note: str = ""
    stages: int = 2
    microbatches: tuple[int, ...] = (1, 4)
    pending: str = ""

    @property
    def name(self) -> str:
        """Unique in the zoo."""
        return f"{self.model} | {self.loss} | {self.data}"

    def made(self) -> nn.Module:
        """The same initial weights each time."""
        torch.manual_seed(1)
        return self.build()
