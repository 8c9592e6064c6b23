"""State of a stage (parameters, buffers, optimizer, loss scale) and settings of a run; both outlive re-plans.

The loss scale of fp16 changes as in torch.amp.GradScaler, equally on every stage:

    gradient of the loss x scale --> fp16 backward --> sums in fp32 / scale --> norm --> finite: step
                                                                                     --> else: no step, scale / 2

Small gradients would be zero in fp16, so the loss is multiplied, until some gradient overflows. Every stage sees the
norm of the whole model before it steps, so all stages' copies of the scale stay equal. It is kept among the options of
the optimizer's groups: checkpoints, copies in memory and other partitions then carry it like a learning rate.

Sharding of the optimizer state between replicas follows from the plan and the parameters, without communication:

    2 replicas    slices 0 | 1         a copy of the state, a checkpoint, or a state of other slices is read by name,
    3 replicas    slices 0 | 1 | 2     and each replica keeps the slices that it steps
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.optim.several import as_one
from raypipe.engine.optim.slices import Slices, parts_of
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import StageError

MakeOptimizer = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


READ_TIMEOUT_S = 120.0
"""Seconds that a step waits for a copy of the state that it is about to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run that no re-plan changes.

    Attributes:
        seed: seed of random numbers and of the data's order.
        loss_reduction: see ``engine.stage.losses.Reduction``.
        max_grad_norm: limit to which the norm of the whole model's gradient is clipped; None for no clipping.
        timeout_s: maximum seconds to wait for one message.
        on_nonfinite: "stop" or "skip"; see PipelineConfig.
        codec_sums: "none" or "bf16"; see PipelineConfig.
        shard_optimizer: see PipelineConfig.
        optimizer_draws: True if the optimizer's steps draw random numbers, which then depend on seed, update and stage.
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


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Read the learning rate of a parameter group; None if it is missing or no number, such as Adafactor's lr=None."""
    rate: Any = group.get("lr")
    if (isinstance(rate, torch.Tensor) and rate.numel() != 1) or not hasattr(rate, "__float__"):
        return None
    return float(rate)


def new_optimizer(make: MakeOptimizer, trained: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Create an optimizer, with a copy of every option that is a tensor.

    Schedulers change a tensor learning rate in place. ``make`` may pass the same tensor again, to the optimizer of
    another stage of this process or after a recovery. An object that holds several optimizers becomes one, see
    ``several.as_one``.
    """
    optimizer = as_one(make(trained))
    for group in getattr(optimizer, "param_groups", ()):
        group.update({key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)})
    return optimizer


class StageState:
    """Parameters, buffers, optimizer and scheduler of a stage. The object survives re-planning.

    Attributes:
        updates: number of scheduler steps made. A deferred update counts, a skipped one does not.
        optimizer: None if the stage trains nothing.
        scheduler: None if the stage trains nothing, or if the run has no scheduler.
        slices: slices of the parameters that the optimizer steps; None if the optimizer's state is not sharded.
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
        """Create a new optimizer and scheduler, and clear gradients; parameters and buffers stay as they are.

        A rollback needs new ones: schedulers cannot step backwards, and ``load_state_dict`` cannot remove the state of
        an optimizer that has stepped. Objects that refer to the old ones, such as an Executor, must be made anew too.
        """
        self.wait_until_read()
        trained = [(name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad]
        for _, parameter in trained:
            parameter.grad = None
        self.updates = 0
        self.optimizer = new_optimizer(make_optimizer, trained) if trained else None
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        self.slices = None

    def shard(self, slices: Slices) -> None:
        """Restrict the optimizer to these slices, before its first step.

        Raises:
            StageError: the optimizer was restricted to other slices before.
        """
        if self.optimizer is None:
            return
        if (known := self.slices) is not None:
            if slices.parts != known.parts or slices.replica != known.replica:
                raise StageError(
                    "shard_optimizer=True: a replica would step other slices than those whose optimizer state it has. "
                    "Start the run again, which reads its state from a checkpoint."
                )
            return
        slices.take_over(self.optimizer)
        self.slices = slices

    def is_read_until(self, done: threading.Event) -> None:
        """Register a read of parameters and optimizer by another thread, which sets ``done`` at its end."""
        self._read = done

    def wait_until_read(self) -> None:
        """Wait for the end of a read that ``is_read_until`` registered, before parameters or optimizer change.

        Raises:
            StageError: the read did not end within READ_TIMEOUT_S.
        """
        if self._read is not None and not self._read.wait(READ_TIMEOUT_S):
            raise StageError(f"A copy of the parameters was not taken within {READ_TIMEOUT_S:g} s.")
        self._read = None


def owned_tensors(program: StageProgram, state: StageState, persistent: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return this stage's part of a checkpoint: parameters that no earlier stage holds, and persistent buffers."""
    first = {
        name: parameter
        for name, parameter in state.parameters.items()
        if program.shared_with.get(name, (program.index,))[0] == program.index
    }
    return {**first, **{name: buffer for name, buffer in state.buffers.items() if name in persistent}}


FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""The defaults of torch.amp.GradScaler: the first scale, its factors, and steps until it grows."""
LOSS_SCALE_OPTIONS = ("loss_scale", "loss_scale_steps")
"""Options of an optimizer's groups that store the loss scale, and the number of steps since its last change."""


class LossScale:
    """Loss scale of fp16 on one stage, stored in its optimizer's groups; a stage without an optimizer has no scale."""

    def __init__(self, state: StageState) -> None:
        self._state = state

    @property
    def value(self) -> float:
        """Factor of the loss in the next step, a power of two; not defined without an optimizer."""
        scale: float = self._groups[0].get(LOSS_SCALE_OPTIONS[0], FIRST_SCALE)
        return scale

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after a step, made or skipped; ``overflowed`` is True if the gradients were not finite."""
        if not self._groups:
            return
        scale, steps = self.value, self._groups[0].get(LOSS_SCALE_OPTIONS[1], 0) + 1
        if overflowed:
            scale, steps = scale * BACKOFF, 0
        elif steps == GROWTH_INTERVAL:
            scale, steps = scale * GROWTH, 0
        for group in self._groups:
            group.update(zip(LOSS_SCALE_OPTIONS, (scale, steps), strict=True))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._state.optimizer
        return [] if optimizer is None else optimizer.param_groups


def is_sharded(placement: Placement, settings: Settings) -> bool:
    """Return True if the stages of a worker have several replicas, and these shard the state of their optimizers."""
    return settings.shard_optimizer and len(placement.replicas) > 1


def shard_optimizer(program: StageProgram, state: StageState, placement: Placement, settings: Settings) -> None:
    """Restrict the optimizer of a stage to this worker's slices, if ``is_sharded``; else do nothing.

    The caller loads the optimizer's state after this, so that no replica ever holds the state of all slices.

    Raises:
        StageError: the optimizer was restricted to other slices before.
    """
    if is_sharded(placement, settings):
        parts = parts_of(program, state.parameters, placement)
        state.shard(Slices([*parts.values()], placement.replica, state.parameters))
