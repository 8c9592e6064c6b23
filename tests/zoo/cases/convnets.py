"""Networks of convolutions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests import nets
from tests.zoo.row import Row
from tests.zoo.samples import images, masks, thirds

__all__ = ["ROWS"]


class Residual(nn.Module):
    """ResNet's bottleneck with a projection where it strides."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x), inplace=True)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1),
        Residual(6, 8), Residual(8, 10, 2), Residual(10, 12, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class ConvNext(nn.Module):
    """LayerNorm over channels, layer scale, and whole samples that skip a block at random."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 2, 2)
        self.depth = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1, groups=6) for _ in range(3))
        self.norm = nn.ModuleList(nn.LayerNorm(6, eps=1e-6) for _ in range(3))
        self.up, self.down = (nn.ModuleList(nn.Linear(i, o) for _ in range(3)) for i, o in ((6, 12), (12, 6)))
        self.scale = nn.ParameterList(torch.full((6,), 0.1) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i in range(3):
            y = self.norm[i](self.depth[i](x).permute(0, 2, 3, 1))
            y = (self.scale[i] * self.down[i](functional.gelu(self.up[i](y)))).permute(0, 3, 1, 2)
            if self.training:
                y = y * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.8) / 0.8
            x = x + y
        return self.head(x.mean((2, 3)))


class TimedBlock(nn.Module):
    """DDPM's residual block: GroupNorm, SiLU, and the time added in the middle."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm_one, self.norm_two = nn.GroupNorm(2, width), nn.GroupNorm(2, out)
        self.time, self.skip, self.drop = nn.Linear(8, out), nn.Conv2d(width, out, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.one(functional.silu(self.norm_one(x))) + self.time(time)[:, :, None, None]
        return self.two(self.drop(functional.silu(self.norm_two(y)))) + self.skip(x)


class Diffusion(nn.Module):
    """A DDPM U-Net that makes its own loss: time and noise are drawn in forward, the noise is what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down, self.shrink = TimedBlock(4, 6), nn.Conv2d(6, 6, 3, 2, 1)
        self.middle, self.norm, self.qkv = TimedBlock(6, 6), nn.GroupNorm(2, 6), nn.Conv2d(6, 18, 1)
        self.up, self.head = TimedBlock(12, 4), nn.Conv2d(4, 3, 3, padding=1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        return x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        times = torch.randint(0, 10, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[times][:, None, None, None]
        angles = times[:, None] * torch.exp(torch.arange(4) * (-math.log(1e4) / 3))
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        first = self.stem(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        left = self.down(first, time)
        x = self.attention(self.middle(self.shrink(left), time))
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return functional.mse_loss(self.head(self.up(torch.cat([x, left], 1), time)), noise)


row = partial(Row, "convolutions")
_CROSS = (functional.cross_entropy, "cross_entropy", "images")
ROWS = (
    row("ResNet, bottlenecks", resnet, images, *_CROSS, stages=3),
    row("residuals in place", nets.Cnn, thirds(images), *_CROSS, stages=3),
    row("Inception's branches", nets.Branches, thirds(images), *_CROSS, stages=3),
    row("ConvNeXt, stochastic depth", ConvNext, images, *_CROSS, stages=3),
    row("U-Net", nets.UNet, masks, functional.cross_entropy, "cross_entropy per pixel", "masks", stages=3),
    row("DDPM U-Net", Diffusion, images, None, "mse to the noise, its own", "images", stages=3),
    row("every way to draw", nets.Noisy, thirds(images), *_CROSS),
)  # fmt: skip
"""Convolutions."""
