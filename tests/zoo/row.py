"""A row of the zoo: a model, its data and its loss, and the verdict that its training must show."""

from __future__ import annotations

import re
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
        message: the whole of it; ``{line}`` stands for a file with a line (``x.py:12``), ``{number}`` for a number, and
            ``{gradients}`` for what is said of gradients.
        note: what is wrong, in a few words.
    """

    message: str
    note: str
    word = "refused"

    def fits(self, message: str) -> bool:
        """Whether that is the message, from its first to its last letter."""
        pattern = (
            re.escape(self.message).replace(r"\{line\}", r"\S+\.py:\d+").replace(r"\{number\}", r"(?:[-+.e\d]*\d|nan)")
        )
        pattern = pattern.replace(r"\{gradients\}", r"(?:Gradients are off by [-+.\w %]+\. )?")
        return re.fullmatch(pattern, message) is not None


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
        microbatches: numbers that a mini-batch is cut into, one run each.
        evaluated: samples of the evaluation.
        twin: what plain PyTorch trains in place of the model: the same without recomputation, whose second forward
            would draw other numbers under the keys that make draws comparable.
        whole: plain PyTorch trains on whole mini-batches, because it cannot weigh the terms of a loss one by one.
        by_word: loss_reduction="per_microbatch": micro-batches have losses of their own, and the whole another one.
        needs: a package that the model is made with, and without which the row is skipped.
        older: the least torch with which the verdict holds for any number of micro-batches, and the verdict of older
            ones on the most micro-batches.
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
    evaluated: int = 10
    twin: Callable[[], nn.Module] | None = None
    whole: bool = False
    by_word: bool = False
    needs: str = ""
    older: tuple[str, Verdict] | None = None

    @property
    def name(self) -> str:
        """Unique in the zoo."""
        return f"{self.model} | {self.loss} | {self.data}"

    @property
    def runs(self) -> list[tuple[int, Verdict]]:
        """Numbers of micro-batches, the largest first, and the verdict of each with the torch that is here."""
        if self.older is not None and torch.__version__ < self.older[0]:
            return [(max(self.microbatches), self.older[1])]
        return [(count, self.verdict) for count in sorted(self.microbatches, reverse=True)]

    def made(self, build: Callable[[], nn.Module] | None = None) -> nn.Module:
        """The same initial weights each time, of the model or what else is to be built."""
        torch.manual_seed(1)
        return (build or self.build)()
