"""Networks whose operations draw more than once, decide by values, or carry torch's own machinery in the graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Checkpointed", "CheckpointedBlock", "Choosing", "ChoosingBlock", "Cumulative", "Masked", "Nested", "NonZero",
    "Normed", "Recurrent", "RecurrentBlock", "Vmapped", "checkpointed_sequential", "normed", "recurrent_sequential",
]  # fmt: skip


class Recurrent(nn.Module):
    """Sequences (b, 5, 6) through a recurrent network of any kind, between linear layers that a cut can part."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, *, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 7)
        self.recurrent = kind(7, 5, batch_first=batch_first, **options)
        self.batch_first = batch_first
        width = options.get("proj_size", 0) or 5
        self.noise = nn.Dropout(0.2)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.recurrent(x)[0]
        return self.head(self.noise(x[:, -1] if self.batch_first else x[-1]))


class RecurrentBlock(nn.Module):
    """One child of an nn.Sequential, which is not traced."""

    def __init__(self, kind: type[nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(width, width, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


def recurrent_sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), RecurrentBlock(nn.LSTM, 5, num_layers=2, dropout=0.3),
        RecurrentBlock(nn.GRU, 5), Last(), nn.Dropout(0.1), nn.Linear(5, 3),
    )  # fmt: skip


class Cumulative(nn.Module):
    """BatchNorm that averages over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.plain = nn.BatchNorm1d(3, momentum=None, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.two(functional.gelu(self.norm(self.one(x)))))


class Way(nn.Module):
    """One way of a torch.cond. A module, as torch's compiler now and then takes a fresh lambda for one of numpy's."""

    def __init__(self, kind: str, *linears: nn.Module) -> None:
        super().__init__()
        self.kind, self.linears = kind, nn.ModuleList(linears)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.kind == "sine":
            return torch.sin(self.linears[0](x))
        if self.kind == "residual":
            return x + torch.cos(self.linears[0](x)) + self.linears[1](x)
        if self.kind == "nested":
            return torch.cond(x[0, 0] > 0, *self.linears, (x,))
        return x * x if y is None else x * y


class Choosing(nn.Module):
    """torch.cond between two ways with parameters of their own, and without."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.small, self.large, self.middle, self.last = (nn.Linear(6, 6) for _ in range(5))
        self.head = nn.Linear(6, 3)
        self.one, self.other = Way("sine", self.small), Way("residual", self.large, self.small)
        self.square, self.again = Way("square"), Way("square")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.cond(x.sum() > 0, self.one, self.other, (x,))
        x = torch.tanh(self.last(torch.tanh(self.middle(x))))
        with torch.no_grad():
            scale = x.abs().mean(1, keepdim=True)
        return self.head(torch.cond(x.max() > 0.4, self.square, self.again, (x, scale)))


class Nested(Choosing):
    """A way chooses again."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Way("nested", self.one, self.other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.cond(x.sum() > 0, self.again, self.square, (x,))
        return self.head(torch.tanh(self.last(torch.tanh(self.middle(x)))))


class ChoosingBlock(nn.Module):
    """The same way, or none, as the child of an nn.Sequential, which is not traced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = Way("sine", nn.Linear(width, width)), Way("square")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


class Masked(nn.Module):
    """Only the elements of a boolean mask go on; how many is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        kept = x[x > 0]
        x = torch.tanh(self.middle(x)) * kept.square().mean()
        return self.last(functional.gelu(self.head(x)))


class NonZero(Masked):
    """Rows are picked by number, worked on and put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        picked = torch.tanh(self.middle(x[rows]))
        x = x.index_add(0, rows, picked)
        return self.last(functional.gelu(self.head(x)))


class Vmapped(nn.Module):
    """torch.func.vmap inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))

        def of_one(row: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.middle(row)) * row.sum()

        return self.head(torch.func.vmap(of_one)(x))


def normed() -> nn.Module:
    """Weight and spectral norm, in their old form by hooks and in the new one by parametrization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3),
        )  # fmt: skip


class Normed(nn.Module):
    """The same in a model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class CheckpointedBlock(nn.Module):
    """Computed again in the backward, dropout included; or not, where reentrant is None."""

    def __init__(self, width: int, *, reentrant: bool | None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.noise = nn.Dropout(0.3)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(torch.tanh(self.two(self.noise(torch.relu(self.one(x))))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Checkpointed(nn.Module):
    """Reentrant blocks, and a no_grad region behind one."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.one, self.two = (CheckpointedBlock(6, reentrant=reentrant) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(torch.tanh(self.stem(x)))
        with torch.no_grad():
            scale = x.abs().mean(1, keepdim=True)
        return self.head(self.two(x / scale))


def checkpointed_sequential(*, reentrant: bool | None) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), CheckpointedBlock(6, reentrant=reentrant), nn.Dropout(0.1),
        CheckpointedBlock(6, reentrant=reentrant), nn.Linear(6, 3),
    )  # fmt: skip
