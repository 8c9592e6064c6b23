"""The zoo: tiny models that between them have everything that has broken a pipeline somewhere.

Each `Case` builds a fresh model and its data from fixed seeds. Hugging Face's models are in
`tests/hugging_face.py`, so that nothing else needs transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tests import nets

__all__ = ["CASES", "FAST", "TIED", "Case", "Paced", "Records", "case", "tokens", "vectors"]


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        build: makes the model.
        data: number of samples -> dataset.
        loss_fn: None where the model returns its own loss.
        tied: parameters are used more than once, so that plain PyTorch adds up in another order.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    tied: bool = False

    def model(self) -> nn.Module:
        """The same initial weights each time."""
        torch.manual_seed(1)
        return self.build()


class Records(Dataset):
    """A list of dicts as a map-style dataset."""

    def __init__(self, items: list[dict[str, torch.Tensor]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.items[index]


class Paced(Dataset):
    """Samples that take a while to read, for a run that shall not be over before a test has done something to it."""

    def __init__(self, samples: Any, seconds: float) -> None:
        self._samples, self._seconds = samples, seconds

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._samples[index]


def vectors(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def _images(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def _masks(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(count, 2, 8, 8, generator=drawn), torch.randint(0, 2, (count, 8, 8), generator=drawn)
    )


def tokens(count: int, length: int = 6, words: int = 11) -> TensorDataset:
    """Token ids and next tokens, shape (count, length) each."""
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(0, words, (count, length + 1), generator=drawn)
    return TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone())


def masked_tokens(count: int) -> TensorDataset:
    """Half of the samples have no valid target, the others some."""
    ids, targets = tokens(count).tensors
    drawn = torch.Generator().manual_seed(7)
    hidden = torch.rand(targets.shape, generator=drawn) < 0.3
    hidden[torch.rand(count, generator=drawn) < 0.5] = True
    return TensorDataset(ids, targets.masked_fill(hidden, -100))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_CROSS_ENTROPY = functional.cross_entropy

CASES: dict[str, Case] = {
    found.name: found
    for found in (
        Case("sequential", nets.sequential, vectors, _CROSS_ENTROPY),
        Case("mlp", nets.Mlp, vectors, _CROSS_ENTROPY),
        Case("backwards", nets.Backwards, vectors, _CROSS_ENTROPY),
        Case("cnn", nets.Cnn, _images, _CROSS_ENTROPY),
        Case("unet", nets.UNet, _masks, _CROSS_ENTROPY),
        Case("noisy", nets.Noisy, _images, _CROSS_ENTROPY),
        Case("dropout-sequential", nets.dropout_sequential, vectors, _CROSS_ENTROPY),
        Case("frozen-below", lambda: nets.frozen(nets.Mlp(), "layers.0", "layers.1"), vectors, _CROSS_ENTROPY),
        Case("frozen-middle", lambda: nets.frozen(nets.sequential(), "2", "4"), vectors, _CROSS_ENTROPY),
        Case("frozen-top", lambda: nets.frozen(nets.Mlp(), "layers.2", "layers.3"), vectors, _CROSS_ENTROPY),
        Case("tied-sequential", nets.tied_sequential, vectors, _CROSS_ENTROPY, tied=True),
        Case("tied-lm", nets.TiedLanguageModel, tokens, token_loss, tied=True),
        Case("buffers", nets.untied, tokens, token_loss),
        Case("masked", nets.untied, masked_tokens, token_loss),
        Case("attention", nets.Attention, tokens, token_loss),
        Case(
            "custom-function",
            nets.custom_function,
            vectors,
            _CROSS_ENTROPY,
        ),
        Case("dict-output", nets.ManyOutputs, vectors, nets.dict_loss),
        Case("dataclass-output", nets.DataclassOutput, vectors, nets.dataclass_loss),
    )
}
"""Every model that needs torch only."""

TIED = tuple(name for name, found in CASES.items() if found.tied)
FAST = ("sequential", "mlp")
"""Cheap enough for the full matrix."""


def case(name: str) -> Case:
    """A case by name, those of operations and Hugging Face's too (skips the test where transformers is missing)."""
    from tests.operations import OPERATIONS

    if name in CASES or name in OPERATIONS:
        return (CASES | OPERATIONS)[name]
    from tests.hugging_face import hugging_face

    return hugging_face(name)
