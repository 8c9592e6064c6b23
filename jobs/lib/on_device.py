"""A pipeline in threads of this process, whose stages compute on devices of one's own choice; no Ray, no run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import raypipe
from jobs.train.lm import GPT, VOCABULARY, loss_fn
from raypipe.api import launch
from raypipe.engine.device import Device
from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepReport
from raypipe.ir.work_order import Order
from raypipe.planner.rows import rows_for
from raypipe.planner.segments import train_segments

__all__ = ["adamw", "gpt", "pipeline", "steps", "texts", "trainer_of"]

HEADS = 8


def gpt(context: int, width: int, depth: int) -> torch.nn.Module:
    """On the CPU, with the same parameters every time."""
    torch.manual_seed(0)
    return GPT(context, width, depth, HEADS)


def texts(count: int, context: int) -> TensorDataset:
    """Random bytes, and those that follow them."""
    tokens = torch.randint(0, VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As `make train` has it."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95))


def trainer_of(
    model: Any, data: TensorDataset, folder: Path, scaling_config: Any = None, **config: Any
) -> raypipe.PipelineTrainer:
    """Of that model, whose runs lie below ``folder``.

    Args:
        model: or a function that makes it.
        config: of PipelineConfig.
    """
    from ray.train import RunConfig

    return raypipe.PipelineTrainer(
        model, loss_fn=loss_fn, optimizer=adamw, train_data=data,
        pipeline=raypipe.PipelineConfig(verify="off", **config), scaling_config=scaling_config,
        run_config=RunConfig(name="on_device", storage_path=str(folder)),
    )  # fmt: skip


@contextmanager
def pipeline(
    model: torch.nn.Module, data: TensorDataset, folder: Path, device_of: Callable[[int], Device],
    **config: Any,
) -> Iterator[tuple[LocalFleet, Callable[[int], Iterator[list[list[StepReport]]]]]]:  # fmt: skip
    """(its stages, carries out so many steps and yields the reports of each by stage); closed at the end.

    Args:
        folder: where its plan would keep a run.
        device_of: worker -> what it computes on.
        config: of PipelineConfig.
    """
    trainer = trainer_of(model, data, folder, **config)
    job = trainer._prepared()
    fleet = LocalFleet(launch.run_setup(job, None), launch.generation_setup(job), job.tensors, device_of)
    plan = job.plan
    rows = cache(partial(rows_for, plan))  # made once for each key, as a run does

    def carry_out(count: int) -> Iterator[list[list[StepReport]]]:
        segments = train_segments(len(data), plan.minibatch_size, plan.microbatch_size, count)
        return fleet.run((Order(segment) for segment, _ in segments), rows)

    try:
        yield fleet, carry_out
    finally:
        fleet.stop()


def steps(reports: Iterator[list[list[StepReport]]]) -> list[float]:
    """Seconds of each step, from the first stage's begin to the last one's end."""
    found = []
    for of_stages in reports:
        ends = [report for of_stage in of_stages for report in of_stage]
        found.append(max(r.end_s for r in ends) - min(r.start_s for r in ends))
    return found
