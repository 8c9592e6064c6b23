"""Pipeline in threads of this process, without Ray, whose stages compute on chosen devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import TensorDataset

import raypipe
from jobs.train.lm import GPT, VOCABULARY, loss_fn
from raypipe.engine.device.device import Device
from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepReport
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments

__all__ = ["adamw", "gpt", "pipeline", "sent", "texts", "trainer_of"]

HEADS = 8


def gpt(context: int, width: int, depth: int) -> torch.nn.Module:
    """Make a GPT on the CPU, with equal parameters every time."""
    torch.manual_seed(0)
    return GPT(context, width, depth, HEADS)


def texts(count: int, context: int) -> TensorDataset:
    """Draw ``count`` random texts as (tokens, next tokens), both (count, context)."""
    tokens = torch.randint(0, VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def sent(columns: Iterable[torch.Tensor], place: torch.device) -> list[torch.Tensor]:
    """Start copies of tensors in host memory to a device; those to a GPU are from pinned memory, without a wait."""
    on_gpu = place.type == "cuda"
    return [x.pin_memory().to(place, non_blocking=True) if on_gpu else x for x in columns]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of `make train`, in one kernel for all tensors."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), fused=True)


def trainer_of(
    model: Any, data: Any, folder: Path, scaling_config: Any = None, loss_fn: Any = loss_fn, **config: Any
) -> raypipe.PipelineTrainer:
    """Make the trainer of a model, with runs below ``folder``.

    Args:
        model: or a function that makes it.
        data: dataset with a length.
        loss_fn: None if the model computes its own loss.
        config: of PipelineConfig.
    """
    return raypipe.PipelineTrainer(
        model, loss_fn=loss_fn, optimizer=adamw, train_data=data,
        pipeline=raypipe.PipelineConfig(verify="off", **config), scaling_config=scaling_config,
        run_config=SimpleNamespace(name="on_device", storage_path=str(folder)),  # as ray.train.RunConfig
    )  # fmt: skip


@contextmanager
def pipeline(
    model: torch.nn.Module, data: Any, folder: Path, device_of: Callable[[int], Device],
    **config: Any,
) -> Iterator[tuple[LocalFleet, Callable[[int], Iterator[list[list[StepReport]]]]]]:  # fmt: skip
    """Yield (stages, function that runs steps and yields each step's reports by stage); close them at the end.

    Args:
        folder: parent folder of a run.
        device_of: worker -> its device.
        config: fields of PipelineConfig, and loss_fn as of ``trainer_of``.
    """
    trainer = trainer_of(model, data, folder, **config)
    job = trainer._prepared()
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.tensors, device_of)
    plan = job.plan
    rows = cache(partial(rows_for, plan))  # made once for each key, as a run does

    def carry_out(count: int) -> Iterator[list[list[StepReport]]]:
        segments = train_segments(len(data), plan.minibatch_size, plan.microbatch_size, count)
        return fleet.run((Order(segment) for segment, _ in segments), rows)

    try:
        yield fleet, carry_out
    finally:
        fleet.stop()
