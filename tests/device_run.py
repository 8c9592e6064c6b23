"""Three steps on three stages, on devices of one's own: losses, norms and parameters, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from raypipe.data.open_data import open_data
from raypipe.engine.codec import Codecs
from raypipe.engine.copy import StageCopies, bring_back
from raypipe.engine.device.device import Device, TransferKind
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.state import MakeOptimizer, Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.planner.search import build_schedule, microbatches
from raypipe.planner.segments import evaluation_segments, forward_only, train_segments
from tests.engine.copy.stages import source_of
from tests.exactness import SHAPES, captured, config_of, programs, request_of, rows_of
from tests.models import case

__all__ = ["STAGES", "evaluate", "gone_back", "run"]

STAGES, STEPS = 3, 3
PLAIN = Codecs()


@contextmanager
def _started(
    device_of: Callable[[int], Device], name: str, optimizer: MakeOptimizer, norm: float | None, codecs: Codecs = PLAIN
) -> Iterator[tuple[LocalFleet, Callable[[RowsKey], Schedule], list[Order]]]:
    """A fleet of three stages that trains, its schedules, and the orders of its steps."""
    stages, (_, made), shape = programs(name, STAGES), captured(name), SHAPES["even"]
    config = config_of(shape, STAGES, "1f1b", max_grad_norm=norm)
    request = request_of(config, shape.samples)
    minibatch, size, _count = microbatches(request, STAGES)
    source = open_data(case(name).data(shape.samples), seed=config.seed)
    settings = Settings(config.seed, config.loss_reduction, norm, 30.0)
    fleet = LocalFleet(
        RunSetup(optimizer, None, {"train": source}, settings),
        GenerationSetup(stages, build_schedule(request, STAGES, 1, 0).wiring.homes, codecs=codecs),
        {**made.parameters, **made.buffers},
        device_of,
    )
    try:
        orders = [Order(segment) for segment, _ in train_segments(shape.samples, minibatch, size, STEPS)]
        yield fleet, rows_of(request, stages), orders
    finally:
        fleet.stop()


def run(
    device_of: Callable[[int], Device], name: str = "tied-sequential", codecs: Codecs = PLAIN
) -> list[torch.Tensor | float | None]:  # fmt: skip
    """Losses, norms and parameters of three steps on three stages."""
    sgd = partial(torch.optim.SGD, lr=5e-2, momentum=0.9)
    with _started(device_of, name, sgd, 0.5, codecs) as (fleet, rows, orders):
        reports = [report for of_stages in fleet.run(iter(orders), rows) for r in of_stages for report in r]
        found: list[torch.Tensor | float | None] = [x for r in reports for x in (r.loss, r.grad_norm)]
        found += [x for r in reports if r.norms for x in r.norms.norms]
        for work in fleet._works:
            found += work._transfer.copied(work.state.parameters, TransferKind.SNAPSHOT).values()
    return found


def gone_back(device_of: Callable[[int], Device]) -> list[torch.Tensor]:
    """Parameters after a step, a copy of the state, another step, back to the copy, and that step again."""
    adamw = partial(torch.optim.AdamW, lr=5e-2)
    sources = []
    with _started(device_of, "tied-sequential", adamw, None) as (fleet, rows, (first, second, *_)):
        list(fleet.run(iter([first]), rows))
        for executor in fleet.executors:
            (work,) = executor.works.values()
            copies = StageCopies(work.program, work.state, executor.transfer)
            copies.take(1, work.state.updates)
            sources.append(source_of(copies, 1))
        list(fleet.run(iter([second]), rows))
        for executor, back in zip(fleet.executors, sources, strict=True):
            (work,) = executor.works.values()
            bring_back(back, work.program, work.state, adamw, None, executor.transfer)
        list(fleet.run(iter([second]), rows))
        return [
            tensor
            for executor in fleet.executors
            for work in executor.works.values()
            for tensor in executor.transfer.copied(work.state.parameters, TransferKind.SNAPSHOT).values()
        ]


def evaluate(device_of: Callable[[int], Device]) -> dict[str, float]:
    """Loss and metrics of an evaluation on three stages."""
    name = "tied-sequential"
    stages, (_, made) = programs(name, STAGES), captured(name)
    setup = GenerationSetup(stages, tuple((stage,) for stage in range(STAGES)))
    source = open_data(case(name).data(20), seed=0)
    metrics = {"accuracy": _accuracy, "largest": lambda output, target: output.max()}
    run_setup = RunSetup(
        partial(torch.optim.SGD, lr=0.1), None, {"train": source, "eval": source}, Settings(0, "mean", None, 30.0),
        metrics=metrics,
    )  # fmt: skip
    fleet = LocalFleet(run_setup, setup, {**made.parameters, **made.buffers}, device_of)
    found: dict[str, float] = {}
    try:
        orders = (Order(segment, training=False) for segment in evaluation_segments(20, 8, 3))
        for of_stages in fleet.run(orders, lambda key: forward_only(range(STAGES), key.num_microbatches)):
            (report,) = of_stages[-1]
            for at, (average, items) in enumerate(report.averages):
                found[f"loss of {at}"] = found.get(f"loss of {at}", 0.0) + average * items
            found |= dict(report.metrics)
    finally:
        fleet.stop()
    return found


def _accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()
