"""The least that two processes can do: two halves of a model joined by shared memory, without a runtime between them.

    0   F0 F1 B0 F2 B1 F3 B2 ...       a message is copied into a slot of memory that both have, and a semaphore raised
    1      F0 B0 F1 B1 F2 B2 ...

It is a clock, not a trainer: weights are changed in place while older micro-batches are under way, so what it learns
means nothing, but every operation of a step takes place. bench/asynchronous measures it beside raypipe: what it keeps
of two processors is what two processes that wait for each other can keep of them.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from jobs.lib.processes import run_processes

__all__ = ["Half", "Mailbox", "pair_s"]

SLOTS = 4
LIMIT_S = 300.0


class Mailbox:
    """Tensors of one shape from one process to another, in order.

    Args:
        slots: float32, (slots, ...), in shared memory.
        filled, free: semaphores of 0 and of as many as there are slots.
    """

    def __init__(self, slots: torch.Tensor, filled: Any, free: Any) -> None:
        self.slots, self.filled, self.free = slots, filled, free
        self._sent = self._got = 0

    @classmethod
    def of(cls, context: Any, shape: Sequence[int]) -> Mailbox:
        """An empty one."""
        return cls(torch.zeros(SLOTS, *shape).share_memory_(), context.Semaphore(0), context.Semaphore(SLOTS))

    def put(self, tensor: torch.Tensor) -> None:
        _taken(self.free)
        self.slots[self._sent % SLOTS].copy_(tensor.detach())
        self._sent += 1
        self.filled.release()

    def get(self) -> torch.Tensor:
        """A copy, since the slot will be used again."""
        _taken(self.filled)
        found = self.slots[self._got % SLOTS].clone()
        self._got += 1
        self.free.release()
        return found


class Half(NamedTuple):
    """What both processes do.

    Attributes:
        make: (which half) -> its modules.
        optimizer: of named parameters.
        loss_fn: of the second half's output and the target.
        inputs, targets: all micro-batches of an epoch, (M, b, ...).
        per_minibatch, per_update: micro-batches of a mini-batch and of an update.
        epochs: the first one warms up.
    """

    make: Callable[[int], nn.Module]
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: torch.Tensor
    targets: torch.Tensor
    per_minibatch: int
    per_update: int
    epochs: int


def pair_s(task: Half, boundary: Sequence[int]) -> list[float]:
    """Seconds per mini-batch of every epoch but the first, from an empty pipeline to an empty one.

    Args:
        boundary: shape of a message.

    Raises:
        RuntimeError: a process failed.
    """
    context = torch.multiprocessing.get_context("spawn")
    boxes = Mailbox.of(context, boundary), Mailbox.of(context, boundary)
    with tempfile.TemporaryDirectory(prefix="bare-pair-") as folder:
        file = str(Path(folder) / "ends.json")
        processes = [context.Process(target=_run, args=(which, task, *boxes, file), daemon=True) for which in range(2)]
        run_processes(processes, LIMIT_S)
        ends_s = json.loads(Path(file).read_text())
    minibatches = len(task.inputs) // task.per_minibatch
    return [(after - before) / minibatches for before, after in itertools.pairwise(ends_s)]


def _run(which: int, task: Half, ahead: Mailbox, back: Mailbox, file: str) -> None:
    """One half; stage 0, which has the last backward, writes when every epoch ended."""
    torch.set_num_threads(1)
    net = task.make(which)
    stepper = task.optimizer(list(net.named_parameters()))
    count, ends_s = len(task.inputs), []
    for _ in range(task.epochs):
        outputs: dict[int, torch.Tensor] = {}
        for begun in range(count + 1):
            if which == 0:
                if begun < count:
                    outputs[begun] = net(task.inputs[begun])
                    ahead.put(outputs[begun])
                if begun > 0:
                    _backward(outputs.pop(begun - 1), back.get())
                    _update(task, stepper, begun)
            elif begun < count:
                received = ahead.get().requires_grad_()
                _backward(task.loss_fn(net(received), task.targets[begun]) / task.per_update, None)
                assert received.grad is not None
                back.put(received.grad)
                _update(task, stepper, begun + 1)
        ends_s.append(time.monotonic())
    if which == 0:
        Path(file).write_text(json.dumps(ends_s))


def _backward(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    torch.autograd.backward([output], [gradient])


def _update(task: Half, stepper: torch.optim.Optimizer, done: int) -> None:
    if done % task.per_update == 0:
        parameters = [p for group in stepper.param_groups for p in group["params"]]
        # Micro-batches under way have saved these; for a clock it does not matter which weights they find.
        with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
            stepper.step()
        stepper.zero_grad()


def _taken(semaphore: Any) -> None:
    if not semaphore.acquire(timeout=LIMIT_S):
        raise RuntimeError("the other process has sent nothing")
