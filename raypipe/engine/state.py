"""What a stage owns, and what the user decided for good: both outlive every re-plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.replicas.slices import Slices, checked
from raypipe.engine.stage import StageProgram
from raypipe.errors import StageError

__all__ = ["MakeOptimizer", "MakeScheduler", "Settings", "StageState", "new_optimizer", "owned_tensors"]

MakeOptimizer = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


READ_TIMEOUT_S = 120.0
"""How long a step waits for a copy of what it is about to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user decided, and what no re-plan changes.

    Attributes:
        seed: of randomness and of the data's order.
        loss_reduction: see PipelineConfig.
        max_grad_norm: clip the norm of the whole model's gradient to this, None never clips.
        timeout_s: longest wait for one message.
        on_nonfinite: "stop" or "skip"; see PipelineConfig.
        codec_sums: "none" or "bf16"; see PipelineConfig.
        shard_optimizer: see PipelineConfig.
        optimizer_draws: steps of the optimizer draw numbers, which are keyed by the update and the stage.
        replicated_buffers: see PipelineConfig.
    """

    seed: int
    loss_reduction: Any
    max_grad_norm: float | None
    timeout_s: float
    on_nonfinite: str = "stop"
    codec_sums: str = "none"
    shard_optimizer: bool = False
    optimizer_draws: bool = False
    replicated_buffers: bool = False


def new_optimizer(make: MakeOptimizer, trained: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer that shares no option with others: schedulers change a rate that is a tensor in place.

    The function may hold that tensor, and be called again for another stage of this process or after a recovery.
    """
    made = make(trained)
    for group in getattr(made, "param_groups", ()):
        group.update({key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)})
    return made


class StageState:
    """Everything a stage owns: parameters, buffers, optimizer. It survives re-planning.

    Attributes:
        updates: that the scheduler has followed, put-off ones included and skipped ones not.
        slices: what of the parameters the optimizer steps, where replicas share out its state; None where it steps all.
    """

    slices: Slices | None = None

    def __init__(
        self,
        program: StageProgram,
        tensors: Mapping[str, torch.Tensor],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
    ) -> None:
        self.parameters = {
            name: torch.nn.Parameter(tensors[name], requires_grad=name in program.trainable)
            for name in program.parameters
        }
        self.buffers = {name: tensors[name] for name in program.buffers}
        self._read: threading.Event | None = None
        self.renew(make_optimizer, make_scheduler)

    def renew(self, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None) -> None:
        """Begin with a new optimizer and scheduler, and no gradients; parameters and buffers stay as they are."""
        self.wait_until_read()
        trained = [(name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad]
        for _, parameter in trained:
            parameter.grad = None
        self.updates = 0
        self.optimizer = new_optimizer(make_optimizer, trained) if trained else None
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        self.slices = None

    def shard(self, slices: Slices) -> None:
        """Have the optimizer step these slices only, from its first step on.

        Raises:
            StageError: it has stepped other ones.
        """
        if self.optimizer is None:
            return
        if self.slices is not None:
            checked(slices, self.slices)
            return
        slices.take_over(self.optimizer)
        self.slices = slices

    def is_read_until(self, done: threading.Event) -> None:
        """Another thread reads parameters and optimizer, and sets this when it has; nobody may change them before."""
        self._read = done

    def wait_until_read(self) -> None:
        """Before the parameters or the optimizer change.

        Raises:
            StageError: whoever reads them does not end.
        """
        if self._read is not None and not self._read.wait(READ_TIMEOUT_S):
            raise StageError(f"A copy of the parameters was not taken within {READ_TIMEOUT_S:g} s.")
        self._read = None


def owned_tensors(program: StageProgram, state: StageState, persistent: frozenset[str]) -> dict[str, torch.Tensor]:
    """What this stage writes into a checkpoint: parameters that it is the first to hold, and its buffers.

    Args:
        persistent: names that belong to the user's state_dict.
    """
    first = {
        name: parameter
        for name, parameter in state.parameters.items()
        if program.shared_with.get(name, (program.index,))[0] == program.index
    }
    return {**first, **{name: buffer for name, buffer in state.buffers.items() if name in persistent}}
