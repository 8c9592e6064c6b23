"""Between which micro-batches a pipeline drains: at the end of an epoch, and around what does not fit.

    11 samples, mini-batches of 4 in micro-batches of 2     [2 2 2 2]  [2 1]   [2 2 2 2]  [2 1] ...
                                                             a fill    alone    epoch 1

A mini-batch that is shorter than the others is a synchronous step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["Fill", "Sample", "fills_of"]

Sample = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Fill:
    """What goes through the pipeline between two drains.

    Attributes:
        microbatches: (inputs, targets) in order, of whole mini-batches.
        synchronous: one update after the last of them, whatever the mode.
    """

    microbatches: list[Sample]
    synchronous: bool = False


def fills_of(
    epoch_data: Callable[[int], Sample],
    minibatch: int,
    microbatch: int,
    num_minibatches: int,
    drain_every: int | None = None,
) -> Iterator[Fill]:
    """A run of so many mini-batches.

    Args:
        epoch_data: epoch -> all its inputs and targets in the order of training, shape (samples, ...).
        minibatch, microbatch: samples; the last micro-batch of a mini-batch may be smaller.
        drain_every: mini-batches after which the pipeline drains, for a checkpoint.
    """
    done = epoch = 0
    while done < num_minibatches:
        inputs, targets = epoch_data(epoch)
        fill: list[Sample] = []
        for x, y in zip(inputs.split(minibatch), targets.split(minibatch), strict=True):
            if done == num_minibatches:
                break
            parts = list(zip(x.split(microbatch), y.split(microbatch), strict=True))
            done += 1
            if len(x) < minibatch:
                yield from [Fill(fill)] if fill else []
                yield Fill(parts, synchronous=True)
                fill = []
                continue
            fill += parts
            if drain_every is not None and done % drain_every == 0:
                yield Fill(fill)
                fill = []
        yield from [Fill(fill)] if fill else []
        epoch += 1
