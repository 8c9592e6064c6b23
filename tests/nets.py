"""The networks of the zoo; `tests/models.py` gives each its data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "Attention", "Backwards", "Branches", "Cnn", "DataclassOutput", "Double", "Late", "ManyOutputs", "Mlp", "Noisy",
    "Scores", "TiedLanguageModel", "Towers", "UNet", "custom_function", "dataclass_loss", "dict_loss",
    "dropout_sequential", "frozen", "sequential", "tied_sequential", "untied",
]  # fmt: skip


class Mlp(nn.Module):
    """An ordinary module, which is traced."""

    def __init__(self, widths: tuple[int, ...] = (6, 9, 8, 7, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        return self.layers[-1](x)


class Backwards(Mlp):
    """Runs its parameters in another order than named_parameters() lists them; the norm's order is the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(reversed(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = functional.gelu(layer(x))
        return x


class Cnn(nn.Module):
    """BatchNorm, ReLU in place, and a residual sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.one, self.one_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.two, self.two_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem_norm(self.stem(x)))
        y = self.one_norm(self.one(x))
        y.add_(x)
        y = self.relu(y)
        z = self.two_norm(self.two(y))
        z += y
        return self.head(self.relu(z).mean((2, 3)))


class UNet(nn.Module):
    """Nested skips: at four stages the outer one jumps over two of them."""

    def __init__(self) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        self.down1, self.down2, self.down3 = block(2, 4), block(4, 6), block(6, 8)
        self.middle = block(8, 8)
        self.up3, self.up2, self.up1 = block(16, 6), block(12, 4), block(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2))
        c = self.down3(functional.max_pool2d(b, 2))
        y = self.up3(torch.cat([self.middle(c), c], 1))
        y = self.up2(torch.cat([functional.interpolate(y, scale_factor=2), b], 1))
        return self.head(self.up1(torch.cat([functional.interpolate(y, scale_factor=2), a], 1)))


class Branches(nn.Module):
    """Inception's shape: an input that four branches read, each with statistics or draws of its own, used again later.

    Sums of four gradients round differently in another order, so this is where a wrong order shows.
    """

    def __init__(self) -> None:
        super().__init__()

        def block(i: int, o: int, size: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(i, o, size, padding=size // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
            )

        self.stem = block(3, 4, 3)
        self.one, self.three = block(4, 3, 1), nn.Sequential(block(4, 2, 1), block(2, 3, 3))
        self.five = nn.Sequential(block(4, 2, 1), block(2, 3, 5), nn.Dropout(0.2))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Dropout2d(0.1), block(4, 3, 1))
        self.join, self.head = nn.Conv2d(12, 4, 1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.join(torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1))
        return self.head((y * torch.sigmoid(x) + x).mean((2, 3)))


class Towers(nn.Module):
    """Two branches from the data itself, which meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.right = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.GELU(), nn.Linear(7, 5), nn.Dropout(0.1))
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], 1))


class Noisy(nn.Module):
    """Every way to draw: dropout of elements and channels, in attention, noise like a tensor and by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.channels, self.elements = nn.Dropout2d(0.3), nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels(torch.tanh(self.conv(x)))
        if self.training:
            x = x + 0.1 * torch.rand_like(x)
        x = x.flatten(2).transpose(1, 2)
        p = 0.25 if self.training else 0.0
        x = x + functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), dropout_p=p)
        if self.training:
            x = x + 0.1 * torch.randn(x.shape[0], 1, 4)
        return self.head(self.elements(x).mean(1))


class Double(torch.autograd.Function):
    """A custom backward that tracing would lose: it is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(self.linear(x))


def frozen(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


def custom_function() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Doubling(), nn.Tanh(), Doubling(), nn.Linear(8, 3))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 8), nn.Tanh(),
        nn.Sequential(nn.Linear(8, 7), nn.ReLU(inplace=True)), nn.Linear(7, 3),
    )  # fmt: skip


def dropout_sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 8), nn.Dropout(0.2, inplace=True),
        nn.LayerNorm(8), nn.Linear(8, 8), nn.AlphaDropout(0.1), nn.Linear(8, 3),
    )  # fmt: skip


def tied_sequential() -> nn.Module:
    shared = nn.Linear(6, 6)
    return nn.Sequential(
        shared, nn.Tanh(), nn.Linear(6, 6), shared, nn.Tanh(), nn.Linear(6, 6), shared, nn.Linear(6, 3)
    )


class TiedLanguageModel(nn.Module):
    """An embedding that is the output layer too, a position table, and a buffer that several stages read."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + torch.tanh(block(x * self.scale))
        return self.head(x)


def untied() -> nn.Module:
    return TiedLanguageModel(tied=False)


class Attention(nn.Module):
    """nn.MultiheadAttention with its own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.attention:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x)


class ManyOutputs(Mlp):
    """Returns a dict of two tensors, for a loss_fn that takes both."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = functional.gelu(self.layers[1](functional.gelu(self.layers[0](x))))
        return {"logits": self.layers[3](functional.gelu(self.layers[2](hidden))), "hidden": hidden}


def dict_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output["logits"], target) + 0.01 * output["hidden"].square().mean()


@dataclass
class Scores:
    """What DataclassOutput returns."""

    logits: torch.Tensor
    hidden: torch.Tensor


torch.export.register_dataclass(Scores)


class DataclassOutput(ManyOutputs):
    """Returns a dataclass of two tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return Scores(**super().forward(x))


def dataclass_loss(output: Scores, target: torch.Tensor) -> torch.Tensor:
    return dict_loss(vars(output), target)


class Late(nn.Module):
    """Counts forwards once the optimizer has moved its parameter, of 16 elements.

    Args:
        is_counted: in a way that torch sees.
    """

    def __init__(self, *, is_counted: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.is_counted = is_counted
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift.detach().abs().max() > 0:
            (self.count if self.is_counted else self.count.data).add_(1)
        return x * self.scale + self.shift
