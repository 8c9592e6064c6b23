"""Loss of a whole mini-batch, computed once from the outputs of all its micro-batches (loss_over="minibatch").

    outputs of F0 F1 F2 F3 --detached, joined--> outputs of the mini-batch --loss_fn, with all targets--> loss
    B0 B1 B2 B3 <---------slices of the gradient by the outputs of the mini-batch <-------------------------+

A loss that compares samples with each other, such as a contrastive one, is no weighted sum over micro-batches. From the
gradient by its outputs each micro-batch runs its own backward, so the gradients of the parameters are those of the loss
over the mini-batch (the gradient cache of Gao et al., arXiv:2101.06983). All forwards of the last stage precede its
backwards, as in the schedule "gpipe".

Replicas of the last stage send each other the outputs of their micro-batches, right after each forward. Every replica
computes the loss, and runs the backwards of its own micro-batches:

    replica 0   F0 F2 --outputs of 0 2-->   outputs of 0 1 2 3 -> loss -> B0 B2
    replica 1   F1 F3 <--outputs of 1 3--   outputs of 0 1 2 3 -> loss -> B1 B3

If one replica computed the loss for all, the others would wait for two transfers, of which no forward hides the second.

The loss is the user's loss_fn, or the tail of a model that returns its own loss (``LossTail``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.engine.codec import NONE
from raypipe.engine.device.device import TransferKind
from raypipe.engine.messages.channel import Channel
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.stage.stage import GraphFunction
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

Tensors = tuple[torch.Tensor, ...]


def join_blocks(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """Join the tensors of micro-batches along ``dim``, block by block.

    Each tensor consists of ``blocks`` equally long blocks, and each block has one entry for every sample of the
    micro-batch. Block i of the result joins block i of all tensors. With two views a and b of samples 0 to 3
    (``blocks=2``), a0 a1 b0 b1 and a2 a3 b2 b3 become a0 a1 a2 a3 b0 b1 b2 b3.
    """
    if blocks == 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.unflatten(dim, (blocks, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class WholeMinibatch:
    """Rule by which the outputs of micro-batches are joined to the outputs of their mini-batch.

    Attributes:
        joined: by mode ("train", "eval"), for each output tensor of the model, the dimension along which micro-batches
            are joined; None for an output without samples, such as a temperature, which all micro-batches have alike.
        blocks: by mode, for each output tensor, see ``join_blocks``; a mode that is missing has one block everywhere.
    """

    joined: Mapping[str, tuple[int | None, ...]]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    words = "the whole mini-batch"

    def join(self, mode: str, outputs: Sequence[Sequence[torch.Tensor]]) -> Tensors:
        """Join the outputs of all micro-batches, in their order, to the outputs of the mini-batch."""
        dims = self.joined[mode]
        by_output = zip(dims, self.blocks.get(mode, (1,) * len(dims)), zip(*outputs, strict=True), strict=True)
        return tuple(parts[0] if dim is None else join_blocks(parts, dim, blocks) for dim, blocks, parts in by_output)

    def join_returned(self, returned: Sequence[Any]) -> Any:
        """Join the values that a model returned for micro-batches in training mode; their structure is kept."""
        leaves, specs = zip(*(pytree.tree_flatten(one) for one in returned), strict=True)
        whole = iter(self.join("train", [[x for x in some if isinstance(x, torch.Tensor)] for some in leaves]))
        return pytree.tree_unflatten([next(whole) if isinstance(x, torch.Tensor) else x for x in leaves[0]], specs[0])


@dataclass(frozen=True, slots=True)
class LossTail:
    """Loss of a model that returns its own: the operations of its forward that mix samples, and those after them.

        forward of a micro-batch --> inputs of the tail, parameters and buffers that it reads --joined--> tail --> loss

    The last stage returns parameters and buffers of the tail among its outputs, so that they get gradients as any other
    output does.

    Attributes:
        train, eval: functions of the tail, which return the terms of the loss; ``eval`` is None if nothing is
            evaluated.
        targets: names of the data columns that they read.
        blocks: by mode, for each input of the tail, see ``join_blocks``.
    """

    train: GraphFunction
    eval: GraphFunction | None
    targets: tuple[Any, ...]
    blocks: Mapping[str, tuple[int, ...]]

    def __call__(self, outputs: Tensors, targets: Sequence[torch.Tensor]) -> torch.Tensor:
        function, columns = self.train, dict(zip(self.targets, targets, strict=True))
        names, count = held_by(function), function.num_inputs
        held = dict(zip(names, outputs[count : count + len(names)], strict=True))
        terms = function(
            [held[site.parameter] for site in function.sites],
            [held[name] for name in function.buffers],
            outputs[:count],
            [columns[name] for name in function.columns],
            None,  # type: ignore[arg-type]  # a tail draws no random numbers
        )
        return sum(terms[1:], start=terms[0])

    def in_evaluation(self) -> LossTail:
        """Return this loss for outputs of the model in evaluation mode."""
        return self if self.eval is None else replace(self, train=self.eval)

    def changed(self, change: Callable[[GraphFunction], Any]) -> LossTail:
        """Copy this loss, with ``change`` applied to its functions."""
        return replace(self, train=change(self.train), eval=None if self.eval is None else change(self.eval))


def held_by(function: GraphFunction) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a function reads, each once, in the order of its use."""
    return tuple(dict.fromkeys((*(site.parameter for site in function.sites), *function.buffers)))


class OutputExchange:
    """Exchange of outputs between the replicas of the last stage, in messages that are named by its forwards.

    Args:
        stage: number of the last stage.
        channels: channels to the other replicas, by worker; no codec applies to their messages.
        transfer: transfers tensors between the stage's device and host memory.
        timeout_s: longest wait for a message.
    """

    def __init__(self, stage: int, channels: Mapping[int, Channel], transfer: DeviceTransfer, timeout_s: float) -> None:
        self._stage, self._channels, self._transfer, self._timeout_s = stage, channels, transfer, timeout_s
        self.waiting = False
        """True while ``receive`` waits."""

    def send(self, worker: int, microbatch: int, tensors: Sequence[torch.Tensor | None]) -> int:
        """Begin to send ``worker`` the outputs of a micro-batch; return their bytes."""
        action, channel = Action(self._stage, Op.F, microbatch), self._channels[worker]
        on_device = channel.on_device
        channel.send(action, self._transfer.outgoing(action, tensors, TransferKind.OUTPUTS, NONE, on_device=on_device))
        return sum(x.nbytes for x in tensors if x is not None)

    def receive(self, worker: int, microbatch: int) -> Sequence[torch.Tensor | None]:
        """Wait for the outputs of a micro-batch that ``worker`` computes.

        Raises:
            LinkError: they did not come in time, or the link failed.
        """
        action, self.waiting = Action(self._stage, Op.F, microbatch), True
        try:
            message = self._channels[worker].recv(action, self._timeout_s)
        except LinkError as error:
            raise type(error)(f"Stage {self._stage} in {action.label}: {error}") from error
        finally:
            self.waiting = False
        return self._transfer.message(message, TransferKind.INPUTS)


class MinibatchOutputs:
    """Outputs and targets of the micro-batches of one mini-batch, kept by the last stage until the loss is computed.

    Args:
        reduction: ``WholeMinibatch``; nothing is kept for any other reduction.
        worker: number of this worker, one of the replicas of the last stage.
        exchange: exchanges outputs with the other replicas.
    """

    def __init__(self, reduction: Any, worker: int, exchange: OutputExchange) -> None:
        self._rule = reduction if isinstance(reduction, WholeMinibatch) else None
        self._worker, self._exchange = worker, exchange
        self._homes: Mapping[int, int] = {}
        self._own: list[int] = []
        self._outputs: dict[int, Tensors] = {}
        self._targets: dict[int, Mapping[Any, torch.Tensor]] = {}

    @property
    def used(self) -> bool:
        """True if the loss is computed over the whole mini-batch."""
        return self._rule is not None

    @property
    def waiting(self) -> bool:
        """True while this replica waits for outputs of others."""
        return self._exchange.waiting

    @property
    def complete(self) -> bool:
        """True if all micro-batches of this worker were added."""
        return len(self._outputs) == len(self._own)

    @property
    def counts(self) -> bool:
        """True if this worker reports the loss: it computes the first micro-batch."""
        return self._worker == self._homes[min(self._homes)]

    def begin(self, homes: Mapping[int, int]) -> None:
        """Begin a mini-batch.

        Args:
            homes: for each of its micro-batches, in their order, the worker that computes it.
        """
        self.clear()
        self._homes = homes
        self._own = [microbatch for microbatch, home in homes.items() if home == self._worker]

    def clear(self) -> None:
        """Drop all micro-batches."""
        self._outputs.clear()
        self._targets.clear()

    def add(self, mode: str, microbatch: int, outputs: Tensors, targets: Mapping[Any, torch.Tensor]) -> int:
        """Keep a micro-batch's outputs, detached from their graph, and the columns that the loss reads.

        Outputs with samples are sent to all replicas that compute other micro-batches.

        Returns:
            number of bytes sent.
        """
        assert self._rule is not None
        kept = tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs)
        self._outputs[microbatch], self._targets[microbatch] = kept, targets
        sent = [None if dim is None else x for dim, x in zip(self._rule.joined[mode], kept, strict=True)]
        others = set(self._homes.values()) - {self._worker}
        return sum(self._exchange.send(other, microbatch, sent) for other in sorted(others))

    def gather(self, targets: Callable[[int], Mapping[Any, torch.Tensor]]) -> float:
        """Wait for the outputs of all micro-batches that other replicas compute.

        Args:
            targets: (index of a micro-batch in the mini-batch) -> columns that the loss reads.

        Returns:
            seconds of waiting.

        Raises:
            LinkError: outputs did not come.
        """
        first, begin_s = self._outputs[self._own[0]], time.monotonic()
        for index, (microbatch, home) in enumerate(self._homes.items()):
            if home == self._worker:
                continue
            theirs = self._exchange.receive(home, microbatch)
            # An output without samples is alike everywhere. Its gradient counts on the first micro-batch's worker only.
            self._outputs[microbatch] = tuple(
                x.detach().requires_grad_(x.requires_grad) if there is None else there
                for x, there in zip(first, theirs, strict=True)
            )
            self._targets[microbatch] = targets(index)
        return time.monotonic() - begin_s

    def joined(self, mode: str) -> tuple[Tensors, dict[Any, torch.Tensor]]:
        """Return outputs and targets of the whole mini-batch."""
        assert self._rule is not None
        targets = [self._targets[microbatch] for microbatch in self._homes]
        whole = {name: torch.cat([some[name] for some in targets]) for name in targets[0]}
        return self._rule.join(mode, [self._outputs[microbatch] for microbatch in self._homes]), whole

    def gradients(self, loss: torch.Tensor, scale: torch.Tensor) -> list[tuple[int, tuple[torch.Tensor | None, ...]]]:
        """Compute the gradient of ``scale * loss`` by the outputs of each micro-batch of this worker.

        Returns:
            (number of the micro-batch, gradients) in their order; None for an output that has no gradient or that the
            loss does not read.
        """
        own = [(microbatch, self._outputs[microbatch]) for microbatch in self._own]
        leaves = [x for _, outputs in own for x in outputs if x.requires_grad]
        found = iter(torch.autograd.grad(loss, leaves, scale, allow_unused=True))
        return [(number, tuple(next(found) if x.requires_grad else None for x in outputs)) for number, outputs in own]
