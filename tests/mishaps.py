"""Blocks that go wrong at a chosen micro-batch, as a user's own code would; they pass their input on otherwise."""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Any

import torch
from torch import nn

__all__ = ["Crowd", "Deadlock", "Fuse", "LateWeights", "Nap", "Spoil", "chain"]


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse) -> torch.Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fuse.burn("B")
        return gradient, None


class Fuse(nn.Module):
    """Raises in the forward ("F") or backward ("B") number ``at`` of the training, counted from 0."""

    def __init__(self, phase: str, at: int) -> None:
        super().__init__()
        self.phase, self.at, self.done = phase, at, 0

    def burn(self, phase: str) -> None:
        if phase == self.phase:
            self.done += 1
            if self.done > self.at:
                raise ValueError("the user's own mistake")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_inference() and torch.is_grad_enabled():
            self.burn("F")
            return _Trip.apply(x, self)
        return x


class _Room(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, crowd: Crowd) -> torch.Tensor:
        ctx.place = crowd.take_place()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


LATE_S = 1.0


class _Place:
    """Taken as long as somebody holds what a forward keeps for its backward."""


_PLACES: dict[str, weakref.WeakSet[_Place]] = {}  # of this process; not the module's, which is copied


class Crowd(nn.Module):
    """Has memory for so many micro-batches between their forward and their backward, and raises MemoryError beyond."""

    def __init__(self, name: str, places: int) -> None:
        super().__init__()
        self.name, self.places = name, places

    def take_place(self) -> _Place:
        """Of one more micro-batch."""
        taken = _PLACES.setdefault(self.name, weakref.WeakSet())
        # A thread that sends an output holds it a moment longer than the backward, the more so on a busy machine.
        deadline_s = time.monotonic() + LATE_S
        while len(taken) >= self.places:
            if time.monotonic() > deadline_s:
                raise MemoryError(f"{self.name} has places for {self.places} micro-batches")
            time.sleep(0.001)
        place = _Place()
        taken.add(place)
        return place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Room.apply(x, self) if self.training and torch.is_grad_enabled() else x


class Nap(nn.Module):
    """Sleeps in the forward number ``at`` of the training."""

    def __init__(self, at: int, seconds: float) -> None:
        super().__init__()
        self.at, self.seconds, self.done = at, seconds, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.done += 1
            if self.done == self.at + 1:
                time.sleep(self.seconds)
        return x


class Deadlock(nn.Module):
    """Waits for ever in the forward number ``at`` of the training, and never gives Python's lock away."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.done = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.done += 1
            if self.done == self.at + 1:
                ctypes.PyDLL(None).sleep(3600)
        return x


class Spoil(nn.Module):
    """Makes nan of everything in the forward number ``at`` of the training."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.done = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.done += 1
            return x * (float("nan") if self.done == self.at + 1 else 1.0)
        return x


class LateWeights(nn.Module):
    """The gradient of its one weight takes ``seconds``, that of its input next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = _Late.apply(self.scale, self.seconds)
        return (x.reshape(-1, 1) @ scale).view_as(x)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


def chain(num_stages: int, stage: int, block: nn.Module) -> nn.Sequential:
    """Two children per stage, a Linear first; the second of ``stage`` is the block, of the others a Tanh."""
    children: list[nn.Module] = []
    for index in range(num_stages):
        children.append(nn.Linear(6, 6 if index + 1 < num_stages else 3))
        children.append(block if index == stage else nn.Tanh())
    return nn.Sequential(*children)
