"""Nets whose plans and costs are checked against real runs: VGG-16, ResNet-18 and 50, DenseNet-121 and GPT-2.

The vision nets are those of torchvision, layer by layer and with its parameter counts, but need nothing besides
torch; ``width`` makes them thinner for tests, with every layer still there. GPT-2 is that of transformers, from a small
configuration. Sources: Simonyan and Zisserman, ICLR 2015, table 1 D; He et al., CVPR 2016, table 1; Huang et al.,
CVPR 2017, table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["Repeated", "densenet121", "gpt2", "images", "resnet18", "resnet50", "sentences", "vgg16"]

VGG16 = (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M")
"""Channels in units of the width; "M" halves the image."""


def vgg16(classes: int = 10, width: int = 64) -> nn.Module:
    """Make VGG-16 with dropout: images (samples, 3, side, side), side at least 32."""
    layers: list[nn.Module] = []
    channels = 3
    for found in VGG16:
        if isinstance(found, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, found * width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = found * width
    hidden = 64 * width
    return _Vgg(
        nn.Sequential(*layers),
        nn.Sequential(
            nn.Linear(channels * 49, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, classes),
        ),
    )  # fmt: skip


class _Vgg(nn.Module):
    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier
        for layer in self.modules():  # without batch norm, activations would vanish over 16 layers of torch's default
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.adaptive_avg_pool2d(self.features(x), 7)
        return self.classifier(torch.flatten(x, 1))


def resnet50(classes: int = 10, width: int = 64) -> nn.Module:
    """Make ResNet-50: images (samples, 3, side, side), side at least 32."""
    return _ResNet(classes, width)


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """Make ResNet-18 for small images (samples, 3, side, side), side at least 8: its stem keeps their size."""
    blocks, channels = [], width
    for place in range(4):
        for index in range(2):
            blocks.append(_Basic(channels, width << place, stride=2 if place and not index else 1))
            channels = width << place
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes),
    )  # fmt: skip


class _Basic(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 3, stride, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != inner:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, inner, 1, stride, bias=False), nn.BatchNorm2d(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class _ResNet(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        blocks, channels = [], width
        for place, count in enumerate((3, 4, 6, 3)):
            for index in range(count):
                inner = width << place
                blocks.append(_Bottleneck(channels, inner, stride=2 if place and not index else 1))
                channels = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * inner:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * inner, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


def densenet121(classes: int = 10, width: int = 64) -> nn.Module:
    """Make DenseNet-121 with growth ``width / 2``: images (samples, 3, side, side), side at least 32."""
    return _DenseNet(classes, width)


class _DenseNet(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        growth, channels = width // 2, width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        for place, count in enumerate((6, 12, 24, 16)):
            for _ in range(count):
                blocks.append(_DenseLayer(channels, growth))
                channels += growth
            if place < 3:
                blocks.append(_transition(channels))
                channels //= 2
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for block in self.blocks:
            if isinstance(block, _DenseLayer):
                features.append(block(features))
            else:
                features = [block(torch.cat(features, 1))]
        x = functional.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu(self.norm1(torch.cat(list(features), 1))))
        return self.conv2(self.relu(self.norm2(x)))


def _transition(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )  # fmt: skip


def gpt2(tied: bool = True, width: int = 256, layers: int = 6, words: int = 1024, context: int = 128) -> nn.Module:
    """Make GPT-2 of transformers, which computes its own loss of input_ids and labels, both (samples, context)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_head=max(2, width // 64), n_embd=width, vocab_size=words, n_positions=context,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


class Repeated(Dataset[Any]):
    """A few samples again and again, so that data takes neither memory nor time."""

    def __init__(self, items: Sequence[Any], count: int) -> None:
        self.items, self.count = list(items), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.items[index % len(self.items)]


def images(side: int, count: int, classes: int = 10, distinct: int = 16) -> Repeated:
    """Draw random images (3, side, side) with labels."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(distinct, 3, side, side, generator=drawn)
    y = torch.randint(0, classes, (distinct,), generator=drawn)
    return Repeated(list(zip(x, y, strict=True)), count)


def sentences(length: int, count: int, words: int = 1024, distinct: int = 16) -> Repeated:
    """Draw random token ids (length,) that are their own labels."""
    drawn = torch.Generator().manual_seed(2)
    rows = torch.randint(0, words, (distinct, length), generator=drawn)
    return Repeated([{"input_ids": row, "labels": row.clone()} for row in rows], count)
