"""Three steps on three stages, on devices of one's own: losses, norms and parameters, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from raypipe.data.open_data import open_data
from raypipe.engine.codec import Codecs
from raypipe.engine.copy import StageCopies
from raypipe.engine.device.device import Device, TransferKind
from raypipe.engine.io.checkpoint import load_stage
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.ir.schedule import Schedule, single_homes
from raypipe.ir.segment import Order, RowsKey, Segment
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import build_schedule, microbatches
from raypipe.planner.segments import evaluation_segments, forward_only, train_segments
from tests.engine.copy.stages import source_of
from tests.exactness import SHAPES, captured, config_of, programs, request_of
from tests.models import case

__all__ = ["STAGES", "evaluate", "gone_back", "run"]

STAGES, STEPS, SHAPE = 3, 3, SHAPES["even"]
PLAIN = Codecs()


def run(
    device_of: Callable[[int], Device], name: str = "tied-sequential", codecs: Codecs = PLAIN
) -> list[torch.Tensor | float | None]:  # fmt: skip
    """Losses, norms and parameters of three steps on three stages."""
    sgd = partial(torch.optim.SGD, lr=5e-2, momentum=0.9)
    fleet = _fleet(device_of, name, sgd, max_grad_norm=0.5, codecs=codecs)
    try:
        orders: Iterator[Order] = (Order(segment) for segment in _segments(STEPS))
        reports = [
            report for of_stages in fleet.run(orders, _rows(name, max_grad_norm=0.5)) for r in of_stages for report in r
        ]
        found: list[torch.Tensor | float | None] = [x for r in reports for x in (r.loss, r.grad_norm)]
        found += [x for r in reports if r.norms for x in r.norms.norms]
        return found + _parameters(fleet)
    finally:
        fleet.stop()


def gone_back(device_of: Callable[[int], Device], *, graphs: bool = False) -> list[torch.Tensor]:
    """Parameters after a step, a copy of the state, another step, back to the copy, and that step again."""
    name, adamw = "tied-sequential", partial(torch.optim.AdamW, lr=5e-2)
    fleet, rows = _fleet(device_of, name, adamw, graphs=graphs), _rows(name)
    first, second = _segments(2)
    sources = []
    try:
        list(fleet.run(iter([Order(first)]), rows))
        for executor in fleet.executors:
            (work,) = executor.works.values()
            copies = StageCopies(work.program, work.state, executor.transfer)
            copies.take(1, work.state.updates)
            sources.append(source_of(copies, 1))
        list(fleet.run(iter([Order(second)]), rows))
        for executor, back in zip(fleet.executors, sources, strict=True):
            (work,) = executor.works.values()
            work.state.renew(adamw, None)
            load_stage(back, work.program, work.state, crossing=executor.transfer)
        list(fleet.run(iter([Order(second)]), rows))
        return _parameters(fleet)
    finally:
        fleet.stop()


def evaluate(device_of: Callable[[int], Device]) -> dict[str, float]:
    """Loss and metrics of an evaluation on three stages."""
    metrics = {"accuracy": _accuracy, "largest": lambda output, target: output.max()}
    fleet = _fleet(device_of, "tied-sequential", partial(torch.optim.SGD, lr=0.1), metrics=metrics)
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


def _fleet(
    device_of: Callable[[int], Device], name: str, optimizer: Any, max_grad_norm: float | None = None,
    codecs: Codecs = PLAIN, metrics: Any = None, *, graphs: bool = False,
) -> LocalFleet:  # fmt: skip
    """A worker for each of three stages; evaluations are of 20 samples."""
    made, data = captured(name)[1], case(name).data
    sources = {"train": open_data(data(SHAPE.samples), seed=0), "eval": open_data(data(20), seed=0)}
    settings = Settings(0, "mean", max_grad_norm, 30.0)
    return LocalFleet(
        RunSetup(optimizer, None, sources, settings, metrics=metrics or {}, cuda_graphs=graphs),
        GenerationSetup(programs(name, STAGES), single_homes(range(STAGES)), codecs=codecs),
        {**made.parameters, **made.buffers},
        device_of,
    )


def _segments(steps: int) -> list[Segment]:
    minibatch, size, _ = microbatches(request_of(config_of(SHAPE, STAGES, "1f1b"), SHAPE.samples), STAGES)
    return [segment for segment, _ in train_segments(SHAPE.samples, minibatch, size, steps)]


def _rows(name: str, **clips: float) -> Callable[[RowsKey], Schedule]:
    request = request_of(config_of(SHAPE, STAGES, "1f1b", **clips), SHAPE.samples)
    first = programs(name, STAGES)[0].first_trainable
    return lambda key: lower(build_schedule(request, STAGES, key.num_microbatches, first))


def _parameters(fleet: LocalFleet) -> list[Any]:
    """Those of all stages, in host memory."""
    return [
        tensor
        for executor in fleet.executors
        for work in executor.works.values()
        for tensor in executor.transfer.copied(work.state.parameters, TransferKind.SNAPSHOT).values()
    ]


def _accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()
