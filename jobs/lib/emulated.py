"""Stages that take the seconds they are told to, run by PipelineTrainer.fit: what a plan is worth without its devices.

A block sleeps where an accelerator would compute, and hands on a boundary tensor of 16 KiB, whatever the real one
would be. Links are as good as free, unless each message is held for what a real one would take (held_links.py). Around
its sleep a block is a Python function that autograd calls, on a core that has been idle, and it wakes late: half a
millisecond that no accelerator takes. ``own_seconds`` measures that with one lone block, and blocks sleep so much
shorter.

One fleet measures several plans in turn, A B A B, so that whatever else the machine does meets all of them alike:

    step        0  1  2  3  4  5  6  7        a block counts its own micro-batches, so it knows the step,
    plan        B  C  A  B  C  A  B  C        and with it the plan whose seconds it takes
                warm

The weight's gradient is 1 + the plan's number for every micro-batch, so that the weights at the end tell whether
every stage has done every micro-batch of every plan.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.held_links import LEARNING_RATE, Hold

__all__ = [
    "CPU_SHARE",
    "Block",
    "StageTimes",
    "check_trained",
    "own_seconds",
    "plan_of_step",
    "run_in_turn",
    "trainer_of",
]

WIDTH = 4096  # float32; a micro-batch is one sample
WARM_UP_STEPS = 2
CALIBRATIONS = 25
CPU_SHARE = 0.1
"""Logical CPUs of a stage: those that sleep share processors."""

StageTimes = Sequence[tuple[float, float]]
"""(forward_s, backward_s) of one micro-batch, by stage."""


class _Sleep(torch.autograd.Function):
    """Hands on the same tensors every time, as if an accelerator had filled them: the host does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block, ctx.plan = block, block.next_forward()
        time.sleep(max(0.0, block.times[ctx.plan][0] - block.own_s[0]))
        return block.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        block, plan = ctx.block, ctx.plan  # of the same step, for steps do not overlap
        time.sleep(max(0.0, block.times[plan][1] - block.own_s[1]))
        return block.of_x if ctx.needs_input_grad[0] else None, torch.full((1,), 1.0 + plan), None


class Block(nn.Module):
    """One stage of several plans.

    Args:
        times: (forward_s, backward_s) by plan.
        num_microbatches: of every step.
        last: its output is a single feature.
        own_s: what forward and backward take besides their sleeps, which are shorter by that.
    """

    def __init__(
        self,
        times: Sequence[tuple[float, float]],
        num_microbatches: int,
        *,
        last: bool,
        own_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self.own_s = own_s
        self.times = tuple(times)
        self.num_microbatches = num_microbatches
        self.forwards: torch.Tensor
        self.weight = nn.Parameter(torch.zeros(1))
        self.output, self.of_x = torch.zeros(1, 1 if last else WIDTH), torch.zeros(1, WIDTH)
        # A buffer, because a stage is a copy: what else a module remembers between its calls is refused.
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)

    def next_forward(self) -> int:
        """The plan of the forward that begins now. Steps do not overlap: each ends with a flush."""
        self.forwards += 1
        return plan_of_step((int(self.forwards) - 1) // self.num_microbatches, len(self.times))


@functools.cache
def own_seconds() -> tuple[float, float]:
    """What forward and backward of a lone block take besides the sleeps that they are asked for: medians, here."""
    asked_s = 0.01
    block, x = Block([(asked_s, asked_s)], 1, last=False), torch.ones(1, WIDTH, requires_grad=True)
    forward_s, backward_s = [], []
    for _ in range(CALIBRATIONS):
        outputs: list[torch.Tensor] = []
        forward_s.append(_seconds(lambda into=outputs: into.append(block(x))) - asked_s)  # type: ignore[misc]
        gradients = (x, block.weight)
        backward_s.append(
            _seconds(lambda of=outputs, to=gradients: torch.autograd.grad(of, to, [block.output])) - asked_s  # type: ignore[misc]
        )
    return max(0.0, median(forward_s)), max(0.0, median(backward_s))


def _seconds(call: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def plan_of_step(step: int, num_plans: int) -> int:
    """The plan whose turn it is; the first one comes right after the steps to warm up."""
    return (step - WARM_UP_STEPS) % num_plans


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One operation; its value does not matter."""
    return output.sum()


def held_of_plan(holds: Sequence[Sequence[float]], hop: int, forward: bool, step: int, microbatch: int) -> float:
    """Seconds that a message is held, either way: those of the plan whose turn it is."""
    return holds[plan_of_step(step, len(holds))][hop]


def trainer_of(
    blocks: Sequence[Block], num_microbatches: int, num_steps: int, optimizer: Any, folder: str, **pipeline: Any
) -> raypipe.PipelineTrainer:
    """A trainer with one block for each stage, one sample for each micro-batch, and data for so many steps.

    Args:
        optimizer: made from named parameters.
        folder: where the run's own folder, of the same name, will lie; another one for every run.
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


def run_in_turn(
    plans: Sequence[StageTimes],
    num_microbatches: int,
    rounds: int,
    *,
    slack: int = 2,
    holds: Sequence[Sequence[float]] | None = None,
    local: bool = False,
) -> list[list[float]]:
    """Seconds of ``rounds`` steps of every plan, after some to warm up.

    The schedule is 1F1B with ``slack``: a block's backward is one sleep, which no schedule can split.

    Args:
        plans: all with the same number of stages, two or more.
        holds: by plan and hop, seconds for which each message occupies its link; None for links that are free.
        local: in threads of this process, where links cannot be held; otherwise on Ray actors.

    Raises:
        RuntimeError: a stage has not done what the plans say.
    """
    assert not (local and holds)
    num_stages = len(plans[0])
    num_steps = WARM_UP_STEPS + rounds * len(plans)
    own_s = own_seconds()
    blocks = [
        Block([times[stage] for times in plans], num_microbatches, last=stage == num_stages - 1, own_s=own_s)
        for stage in range(num_stages)
    ]
    optimizer = Hold(functools.partial(held_of_plan, holds or [[0.0] * (num_stages - 1)]), num_microbatches)
    fixed = {"schedule": "slack", "slack": slack, "transport": "tcp"}
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        trainer = trainer_of(blocks, num_microbatches, num_steps, optimizer, folder, **fixed)
        result = trainer.fit(num_steps=num_steps, local=local, progress=False)
        weights = raypipe.load_state_dict(result.checkpoint)
    done = num_microbatches * sum(1 + plan_of_step(step, len(plans)) for step in range(num_steps))
    check_trained(weights, num_stages, done)
    seconds = [record.seconds for record in result.records]
    return [seconds[WARM_UP_STEPS + plan :: len(plans)] for plan in range(len(plans))]


def check_trained(weights: Mapping[str, torch.Tensor], num_stages: int, done: int) -> None:
    """See to it that every stage trained to what so many gradients of one make.

    Raises:
        RuntimeError: one did not.
    """
    for stage in range(num_stages):
        found = weights[f"{stage}.weight"].item()
        if abs(found + LEARNING_RATE * done) > 1e-4 * LEARNING_RATE * done:
            raise RuntimeError(
                f"Stage {stage} trained to {found}, but every micro-batch of every plan makes {-LEARNING_RATE * done}: "
                "what was measured is not what was planned."
            )
