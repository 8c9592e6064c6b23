"""Host time of a step: processor seconds of one stage over plain PyTorch's, for models with short operations.

    executor_over_plain_MODEL_PRECISION   median over pairs of a step of ours and one of plain PyTorch

Processor seconds are those of all threads of the process. Both sides have one torch thread, eight micro-batches of one
sample, the same mini-batch in every step, fused AdamW and a norm clipped to 1; their steps take turns. Operations are
as short as those of a small model on a GPU, where the host is the limit; here their kernels are part of both sides.
The losses of both must agree. That the bits do is tested elsewhere (tests/runs).
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from jobs.lib.common import Bench, BenchRun, median
from jobs.lib.on_device import adamw, gpt, pipeline, texts
from jobs.lib.pipeline_nets import gpt2, images, resnet18, sentences
from jobs.train import lm
from raypipe.engine.device.device import CPU
from raypipe.engine.torch_settings import one_thread
from raypipe.ir.report import StepReport

MICROBATCHES = 8
CONTEXT, WIDTH, DEPTH = 16, 64, 12
MAX_NORM = 1.0
SAME_LOSS = 0.05
"""Relative difference of two losses up to which they are the same: ours draws another order of the samples."""


@dataclass(frozen=True)
class Settings:
    """Pairs of steps of every model in every precision, after ``warm_up`` pairs that do not count."""

    pairs: int = 30
    warm_up: int = 5
    models: tuple[str, ...] = ("gpt", "gpt2", "resnet18")
    precisions: tuple[str, ...] = ("fp32", "bf16-autocast")


BENCH = Bench(
    "bench_host",
    __doc__,
    settings=Settings(),
    quick=Settings(pairs=5, warm_up=2),
    layout={
        "fp32": r"executor_over_plain_(\w+)_fp32",
        "bf16-autocast": r"executor_over_plain_(\w+)_bf16_autocast",
    },
    targets={r"executor_over_plain_\w+": "<= 1.0"},
)


@dataclass(frozen=True)
class Task:
    """Model, its data, its loss as PipelineTrainer takes it, and the loss of a micro-batch in plain PyTorch."""

    model: nn.Module
    data: Dataset[Any]
    loss_fn: Callable[..., torch.Tensor] | None
    plain_loss: Callable[[nn.Module, Any], torch.Tensor]


def task_of(name: str) -> Task:
    """Make a task, with equal parameters every time."""
    torch.manual_seed(0)
    words, classify = lm.VOCABULARY, nn.functional.cross_entropy
    if name == "gpt2":
        data = sentences(CONTEXT, MICROBATCHES, words)
        return Task(gpt2(width=WIDTH, layers=DEPTH, words=words, context=CONTEXT), data, None, own_loss)
    if name == "resnet18":
        return Task(resnet18(width=8), images(16, MICROBATCHES), classify, partial(loss_of, classify))
    return Task(gpt(CONTEXT, WIDTH, DEPTH), texts(MICROBATCHES, CONTEXT), lm.loss_fn, partial(loss_of, lm.loss_fn))


def own_loss(model: nn.Module, part: Any) -> torch.Tensor:
    """Compute the loss of a model that computes its own."""
    loss: torch.Tensor = model(**part).loss
    return loss


def loss_of(loss_fn: Callable[..., torch.Tensor], model: nn.Module, part: Any) -> torch.Tensor:
    """Compute the loss of a model from inputs and targets."""
    return loss_fn(model(part[0]), part[1])


def plain(task: Task, model: nn.Module, precision: str) -> Iterator[float]:
    """Run one step of plain PyTorch at each turn, and yield its loss."""
    optimizer = adamw(model.parameters())
    while True:
        minibatch = default_collate([task.data[index] for index in range(MICROBATCHES)])
        total = torch.zeros(())
        for index in range(MICROBATCHES):
            part = tree_map(lambda column, at=index: column[at : at + 1], minibatch)
            with nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16):
                loss = task.plain_loss(model, part) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield float(total)


def ours(steps: Iterator[list[list[StepReport]]]) -> Iterator[float]:
    """Run one step of the stage at each turn, and yield its loss."""
    for ((report,),) in steps:
        assert report.loss is not None, "it is the last stage"
        yield report.loss


def pairs_of(name: str, precision: str, settings: Settings) -> list[tuple[float, float]]:
    """Measure processor seconds, (of ours, of plain PyTorch), of steps in turns.

    Raises:
        RuntimeError: the losses of the two sides differ.
    """
    task, count = task_of(name), settings.warm_up + settings.pairs
    config: dict[str, Any] = {
        "num_stages": 1, "minibatch_size": MICROBATCHES, "num_microbatches": MICROBATCHES, "schedule": "1f1b",
        "precision": precision, "max_grad_norm": MAX_NORM, "loss_fn": task.loss_fn,
    }  # fmt: skip
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-host-")))
        sides = {"plain": plain(task, copy.deepcopy(task.model), precision)}
        _, steps = stack.enter_context(pipeline(task.model, task.data, folder, lambda worker: CPU, **config))
        stack.enter_context(one_thread())
        sides["ours"] = ours(steps(count))
        for _, side in BenchRun.turns(sides, count):
            begin_s = time.process_time()
            losses[side].append(next(sides[side]))
            seconds[side].append(time.process_time() - begin_s)
    for step, (one, other) in enumerate(zip(losses["ours"], losses["plain"], strict=True)):
        if not math.isclose(one, other, rel_tol=SAME_LOSS):
            raise RuntimeError(f"{name} in {precision}: step {step} has the loss {one}, but {other} in plain PyTorch")
    return list(zip(seconds["ours"], seconds["plain"], strict=True))[settings.warm_up :]


def main(given: Sequence[str] | None = None) -> int:
    """Measure all models in all precisions."""
    run = BENCH.begin(given)
    rows = []
    for name, precision in itertools.product(run.settings.models, run.settings.precisions):
        pairs = pairs_of(name, precision, run.settings)
        ratios = [ours / plain for ours, plain in pairs]
        key = f"{name}_{precision.replace('-', '_')}"
        run.raw[key], run.figures[f"executor_over_plain_{key}"] = pairs, median(ratios)
        milliseconds = (median(side) * 1e3 for side in zip(*pairs, strict=True))
        rows.append((name, precision, *milliseconds, median(ratios), min(ratios), max(ratios)))
    run.table(
        "processor milliseconds of a step",
        ("model", "precision", "ours", "plain", "ours / plain", "least", "most"),
        rows,
    )
    run.end()
    return 0
