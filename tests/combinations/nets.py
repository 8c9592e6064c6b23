"""Models for combinations: small, with data and a loss, and with what plain PyTorch must know to weigh that loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.emulators.nets import NETS as LISTS
from tests.models import CASES, Records
from tests.operation_nets import checkpointed_sequential

__all__ = ["NETS", "Net"]

Terms = list[tuple[torch.Tensor, float]]
WORDS = 11


@dataclass(frozen=True)
class Net:
    """A model for trials.

    Attributes:
        build: makes it.
        data: number of samples -> dataset.
        loss_fn: None where the model returns its own loss.
        items: of a target, how many the loss averages over; None where the loss adds up.
        terms: of a model that returns its own loss: (model, columns) -> each term with the items it averages over.
        children: it is an nn.Sequential of so many children; 0 for a module that is traced.
        rounds: why gradients differ from plain PyTorch's in their last bits; "" where they do not.
        tied: parameters are used on several stages.
        statistics: forwards change buffers.
        follows_statistics: in training too, outputs depend on them.
        fp32_only: it draws numbers in fp32, which layers of 16 bits do not take; autocast does.
        least: samples that a micro-batch must have.
        trains_last: the last layers learn, so that a loss scale shows there.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    items: Callable[[torch.Tensor], float] | None = len
    terms: Callable[[nn.Module, Any], Terms] | None = None
    children: int = 0
    rounds: str = ""
    tied: bool = False
    statistics: bool = False
    follows_statistics: bool = False
    fp32_only: bool = False
    least: int = 1
    trains_last: bool = True

    def model(self) -> nn.Module:
        """The same initial weights each time."""
        torch.manual_seed(5)
        return self.build()


def valid(target: torch.Tensor) -> float:
    return float((target != -100).sum())


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, CLASS_WEIGHTS.to(output.dtype))


def sum_of_weights(target: torch.Tensor) -> float:
    return float(CLASS_WEIGHTS.double()[target].sum())


def added_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 7), nn.LayerNorm(7),
        nn.Tanh(), nn.Linear(7, 3),
    )  # fmt: skip


def frozen_below() -> nn.Sequential:
    made = perceptron()
    made[:3].requires_grad_(requires_grad=False)
    return made


def frozen_on_top() -> nn.Sequential:
    made = perceptron()
    made[5:].requires_grad_(requires_grad=False)
    return made


def batch_normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )


class Averaging(nn.Module):
    """Two buffers: an average that every forward moves, and a table that is in no state_dict."""

    average: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x) * self.table)
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        h = torch.tanh(self.two(self.dropout(h - self.average)))
        return self.three(h * self.table)


class Speaking(nn.Module):
    """A language model that returns its own loss: an average over labels, and one over samples beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def both(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        spread = x.float().square().mean()
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten()), spread

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        words, spread = self.both(ids, labels)
        return {"loss": words + 0.1 * spread}


def speaking_terms(model: nn.Module, columns: Any) -> Terms:
    words, spread = model.both(columns["ids"], columns["labels"])  # type: ignore[operator]
    return [(words, valid(columns["labels"])), (0.1 * spread, float(len(columns["ids"])))]


class Recurrent(nn.Module):
    """Two layers with dropout between them, and a mask that is data and read by the last layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(7, 3)
        self.layers = nn.LSTM(6, 7, 2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(7)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layers(self.embed(ids))[0])
        return self.head((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


def with_masks(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(11)
    ids = torch.randint(0, WORDS, (count, 5), generator=drawn)
    mask = (torch.rand(count, 5, generator=drawn) < 0.7).float()
    mask[:, 0] = 1.0
    return TensorDataset(ids, mask, torch.randint(0, 3, (count,), generator=drawn))


def _masked(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, of which three in ten do not count, but always the first."""
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(0, WORDS, (count, 6), generator=drawn)
    labels = ids[:, 1:].masked_fill(torch.rand(count, 5, generator=drawn) < 0.3, -100)
    labels[:, 0] = ids[:, 1]
    return ids[:, :-1].clone(), labels


def sentences(count: int) -> Records:
    ids, labels = _masked(count)
    return Records([{"ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)])


def masked(count: int) -> TensorDataset:
    return TensorDataset(*_masked(count))


def _of_case(name: str, **more: Any) -> Net:
    found = CASES[name]
    return Net(found.build, found.data, found.loss_fn, **more)


_TIED = "a weight with several uses"
_VECTORS = CASES["mlp"].data
_ENTROPY = functional.cross_entropy

NETS: dict[str, Net] = {
    "perceptron": Net(perceptron, _VECTORS, _ENTROPY, children=9),
    "traced": _of_case("mlp"),
    "unet": _of_case("unet", statistics=True),
    "noisy": _of_case("noisy", fp32_only=True),
    "batch norm": Net(batch_normed, _VECTORS, _ENTROPY, children=7, statistics=True, least=2),
    "gpt": Net(LISTS["transformer"].build, masked, token_loss, valid, children=5),
    "tied words": _of_case("tied-lm", rounds=_TIED, tied=True),
    "one layer three times": _of_case("tied-sequential", rounds=_TIED, tied=True, children=8),
    "own loss": Net(
        Speaking, sentences, None, None, speaking_terms, rounds="two terms, whose gradients are added up in the end"
    ),
    "averaging": Net(Averaging, _VECTORS, _ENTROPY, statistics=True, follows_statistics=True),
    "frozen below": Net(frozen_below, _VECTORS, _ENTROPY, children=9),
    "frozen on top": Net(frozen_on_top, _VECTORS, _ENTROPY, children=9, trains_last=False),
    "class weights": Net(perceptron, _VECTORS, weighted_loss, sum_of_weights, children=9),
    "sum": Net(perceptron, _VECTORS, added_up, None, children=9),
    "recurrent": Net(Recurrent, with_masks, _ENTROPY),
    "checkpointed": Net(partial(checkpointed_sequential, reentrant=False), _VECTORS, _ENTROPY, children=5),
}
