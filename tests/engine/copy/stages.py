"""A stage that needs no forward: its gradients and buffers follow from the number of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from raypipe.engine.copy import CopyPiece, StageCopies, copy_source, views_of
from raypipe.engine.io.checkpoint import load_stage
from raypipe.engine.io.checkpoint.state_source import StoredState
from raypipe.engine.messages.record import raw_bytes
from raypipe.engine.optim.state import StageState
from tests.engine.rings import program_of
from tests.exactness import same_bits

__all__ = ["OPTIMIZERS", "Stage", "parcels_of", "piece_of", "same", "source_of"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1),
    "fused": lambda named: torch.optim.AdamW(named, lr=0.1, fused=True),
    "tensor-lr": lambda named: torch.optim.Adam(named, lr=torch.tensor(0.1)),
    "adafactor": lambda named: torch.optim.Adafactor(named, lr=0.1),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "asgd": lambda named: torch.optim.ASGD(named, lr=0.1),
}


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


class Stage:
    """With a tensor without dimensions, and buffers of several types.

    Args:
        size: rows of its matrix.
    """

    def __init__(self, optimizer: str, dtype: torch.dtype = torch.float32, trained: bool = True, size: int = 5) -> None:
        drawn = torch.Generator().manual_seed(7)
        tensors = {
            "w": torch.randn(size, 3, generator=drawn).to(dtype),
            "scale": torch.randn((), generator=drawn).to(dtype),
            "mean": torch.randn(3, generator=drawn),
            "count": torch.tensor(4),
            "mask": torch.tensor([True, False, True]),
        }
        made = {name: torch.nn.Parameter(tensors[name], requires_grad=trained) for name in ("w", "scale")}
        self.program = replace(program_of((), made), buffers=("mean", "count", "mask"))
        self.make = OPTIMIZERS[optimizer], halving
        self.state = StageState(self.program, tensors, *self.make)

    def step(self) -> None:
        state = self.state
        for number, parameter in enumerate(state.parameters.values()):
            drawn = torch.Generator().manual_seed(100 * state.updates + number)
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
        for name, buffer in state.buffers.items():
            torch.logical_not(buffer, out=buffer) if name == "mask" else buffer.add_(state.updates + 1)
        state.wait_until_read()
        if state.optimizer is not None:
            state.optimizer.step()
            state.scheduler.step()
        state.updates += 1

    def all(self) -> dict[str, torch.Tensor]:
        """All that a step depends on, copied."""
        found = {
            name: tensor.detach().clone() for name, tensor in {**self.state.parameters, **self.state.buffers}.items()
        }
        optimizer = self.state.optimizer
        for group in optimizer.param_groups if optimizer else ():
            for key in group.keys() - {"params", "param_names"}:
                found[key] = _tensor(group[key])
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
                    found[f"{key} of {name}"] = _tensor(value)
        return found

    def copies(self) -> StageCopies:
        return StageCopies(self.program, self.state)

    def back(self, source: Any) -> None:
        self.state.renew(*self.make)
        load_stage(source, self.program, self.state)


def _tensor(value: Any) -> torch.Tensor:
    """A copy of the tensor, or what else it is, to the bit."""
    return value.clone() if isinstance(value, torch.Tensor) else torch.tensor(list(repr(value).encode()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def piece_of(copies: StageCopies, step: int, piece: int = 0) -> CopyPiece:
    header, block = copies.copy(step, piece)
    return CopyPiece(header, views_of(block))


def parcels_of(block: torch.Tensor, parcel_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """A block as parcels (offset, bytes); the bytes are views of its memory."""
    data = raw_bytes(block, block.nbytes).cast("B")
    for offset in range(0, len(data), parcel_bytes):
        yield offset, data[offset : offset + parcel_bytes]


def source_of(copies: StageCopies, step: int) -> StoredState:
    return copy_source([piece_of(copies, step)])
