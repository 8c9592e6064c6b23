"""Emulated accelerators: stages that sleep for given seconds, trained by PipelineTrainer, over links that may be held.

A block sleeps while an accelerator would compute, and returns a boundary tensor of 16 KiB. Besides its sleep a block
takes about half a millisecond, for Python and autograd on a core that was idle. The gradient of a block's weight is 1
for every micro-batch, so that the final weights show if every stage has computed every micro-batch.

A ``Hold`` is passed as the optimizer factory, so that every stage calls it once in its own process. There it delays the
messages that the links send: a message waits before it is sent, and later messages wait behind it. The delay depends
only on hop, direction, step and micro-batch, so that a run can be repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from raypipe.engine.messages import frame
from raypipe.ir.schedule import Op
from raypipe.runtime.transport.socket_channel import SocketChannel

__all__ = ["CPU_SHARE", "Block", "Delay", "Hold", "check_trained", "loss_of", "moving", "trainer_of"]

WIDTH = 4096  # float32; a micro-batch is one sample
LEARNING_RATE = 0.0078125  # a power of two: its products with small whole numbers are exact
CPU_SHARE = 0.1
"""Ray's CPUs per stage: stages that sleep can share processors."""

Delay = Callable[[int, bool, int, int], float]
"""(hop, forward, step, micro-batch of the step) -> seconds."""


class _Sleep(torch.autograd.Function):
    """Operation that sleeps and returns constant tensors, in place of an accelerator's results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        time.sleep(block.forward_s)
        return block.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        time.sleep(ctx.block.backward_s)
        return ctx.block.of_x if ctx.needs_input_grad[0] else None, ctx.block.of_weight, None


class Block(nn.Module):
    """Stage that sleeps instead of computing.

    Args:
        forward_s, backward_s: seconds to sleep per micro-batch.
        last: True for the last stage, whose output has one feature instead of ``width``.
    """

    def __init__(self, forward_s: float, backward_s: float, *, last: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.width = 1 if last else width
        self.weight = nn.Parameter(torch.zeros(1))
        self.output, self.of_x, self.of_weight = torch.zeros(1, self.width), torch.zeros(1, width), torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute a loss in one operation; its value does not matter."""
    return output.sum()


def trainer_of(
    blocks: Sequence[Block], num_microbatches: int, num_steps: int, optimizer: Any, folder: str, **pipeline: Any
) -> raypipe.PipelineTrainer:
    """Make a trainer with a block per stage, a sample per micro-batch, and data for ``num_steps`` steps.

    Args:
        optimizer: function of named parameters that makes an optimizer.
        folder: parent of the run's folder, which gets the same name; each run needs another one.
        pipeline: further fields of PipelineConfig.
    """
    count = num_microbatches * num_steps
    return raypipe.PipelineTrainer(
        nn.Sequential(*blocks),
        loss_fn=loss_of,
        optimizer=optimizer,
        train_data=TensorDataset(torch.ones(count, 1), torch.ones(count, 1)),
        pipeline=raypipe.PipelineConfig(
            num_stages=len(blocks),
            minibatch_size=num_microbatches,
            num_microbatches=num_microbatches,
            partitioner=tuple(str(stage) for stage in range(1, len(blocks))),
            **pipeline,
        ),
        scaling_config=SimpleNamespace(num_workers=len(blocks), resources_per_worker={"CPU": CPU_SHARE}),
        run_config=SimpleNamespace(name=Path(folder).name, storage_path=folder),
    )


def check_trained(weights: Mapping[str, torch.Tensor], num_stages: int, done: int) -> None:
    """Check that every stage has computed ``done`` micro-batches, each of which has a gradient of 1.

    Raises:
        RuntimeError: a stage's weight shows another number.
    """
    for stage in range(num_stages):
        weight = weights[f"{stage}.weight"].item()
        if abs(weight + LEARNING_RATE * done) > 1e-4 * LEARNING_RATE * done:
            raise RuntimeError(
                f"Stage {stage} trained to {weight}, but the micro-batches of all steps make {-LEARNING_RATE * done}: "
                "what was measured is not what was planned."
            )


@dataclass
class Hold:
    """Optimizer factory that, in every other process than its own, delays the messages that the process sends.

    Args:
        delay: seconds by message, see Delay; must be picklable.
        num_microbatches: number of micro-batches of a step.
    """

    delay: Delay
    num_microbatches: int

    def __post_init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        if os.getpid() != self.home:
            _delay_messages(SocketChannel, self)
        return torch.optim.SGD([parameter for _, parameter in named], lr=LEARNING_RATE)


def _delay_messages(channel: type[SocketChannel], hold: Hold) -> None:
    plain = channel.transmit
    if getattr(plain, "holds", False):
        return

    def transmit(self: SocketChannel, message: frame.Frame) -> None:
        head = frame.parse(message.header, self.form)
        stage, op, microbatch = head.action
        if op in (Op.SEND_F, Op.SEND_B):
            forward = op is Op.SEND_F
            step, place = divmod(microbatch, hold.num_microbatches)
            time.sleep(hold.delay(stage if forward else stage - 1, forward, step, place))
        plain(self, message)

    transmit.holds = True  # type: ignore[attr-defined]
    channel.transmit = transmit  # type: ignore[method-assign]


def _moving(
    phases: tuple[tuple[int, int | None], ...], seconds: float, hop: int, forward: bool, step: int, m: int
) -> float:
    taken = None
    for begin, where in phases:
        if step >= begin:
            taken = where
    return seconds if hop == taken else 0.0


def moving(phases: tuple[tuple[int, int | None], ...], seconds: float) -> Delay:
    """Make a Delay that slows one hop at a time.

    Args:
        phases: (first step of the phase, slow hop, or None for no slow hop), ascending.
        seconds: delay of a message on the slow hop.
    """
    return partial(_moving, phases, seconds)
