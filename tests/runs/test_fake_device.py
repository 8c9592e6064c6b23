"""Stages on a device whose work is done as late as waits allow: the same bits, and others without one of the waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch

from raypipe.engine.data import open_data
from raypipe.engine.device import CPU, Crosses, Device
from raypipe.engine.local import LocalFleet
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.state import Settings
from raypipe.errors import RaypipeError
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.work_order import Order
from raypipe.planner.schedule.lower import lower
from raypipe.planner.segments import train_segments
from raypipe.planner.tune import build_schedule, microbatches
from tests.exactness import SHAPES, captured, config_of, programs, request_of, same_bits
from tests.fake_device import FakeDevice
from tests.models import case

NAME, STAGES, STEPS = "tied-sequential", 3, 3


@pytest.mark.parametrize("eager", [False, True])
def test_a_device_that_is_late_computes_the_same_bits(*, eager: bool) -> None:
    assert differs(lambda worker: FakeDevice(eager=eager)) == []


COMPUTED_WITH, COPIED, READ, STAGED = (
    "computed with once they are on the device",
    "copied once they are computed",
    "read once they are in host memory",
    "staged once the copy before has been made",
)
FOUND = {
    Crosses.COLUMNS: (COMPUTED_WITH,),
    Crosses.INPUTS: (COMPUTED_WITH,),
    Crosses.OUTPUT_GRADS: (COMPUTED_WITH,),
    Crosses.REDUCED: (COMPUTED_WITH, COPIED, READ, STAGED),
    Crosses.OUTPUTS: (COPIED, READ),
    Crosses.INPUT_GRADS: (COPIED, READ),
    Crosses.NORMS: (COPIED, READ),
    Crosses.LOSS: (READ,),
    Crosses.SNAPSHOT: (READ,),
    Crosses.PARAMETERS: (STAGED,),
}
"""Those that no other wait stands in for in this run; docs/design/0046 names the others."""

WAITS = [f"{what}: {why}" for what, reasons in FOUND.items() for why in reasons] + ["record_stream"]


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_missing_changes_bits(wait: str) -> None:
    devices: list[FakeDevice] = []

    def device_of(worker: int, *, eager: bool) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, without=wait))
        return devices[-1]

    found = [differs(partial(device_of, eager=eager)) for eager in (False, True)]
    if wait != "record_stream":
        assert any(wait in device.waits for device in devices), "nobody waits for that"
    assert any(found)


def differs(device_of: Callable[[int], Device]) -> list[str]:
    """In what a run differs from that on the CPU; it may fail, for what it reads is not finite."""
    plain = plainly()
    try:
        found = run(device_of)
    except RaypipeError as error:
        return [str(error)]
    return [f"{i}: {a} {b}" for i, (a, b) in enumerate(zip(found, plain, strict=True)) if not _same(a, b)]


@cache
def plainly() -> list[torch.Tensor | float | None]:
    return run(lambda worker: CPU)


def run(device_of: Callable[[int], Device]) -> list[torch.Tensor | float | None]:
    """Losses, norms and parameters of three steps on three stages."""
    stages, (_, made) = programs(NAME, STAGES), captured(NAME)
    shape = SHAPES["even"]
    config = config_of(shape, STAGES, "1f1b", max_grad_norm=0.5)
    request = request_of(config, shape.samples)
    settings = Settings(config.seed, config.loss_reduction, config.max_grad_norm, 30.0)
    minibatch, size, _count = microbatches(request, STAGES)

    def rows(key: RowsKey) -> Schedule:
        return lower(build_schedule(request, STAGES, key.num_microbatches, stages[0].first_trainable))

    setup = GenerationSetup(stages, build_schedule(request, STAGES, 1, 0).wiring.homes)
    source = open_data(case(NAME).data(shape.samples), seed=config.seed)
    sgd = partial(torch.optim.SGD, lr=5e-2, momentum=0.9)
    fleet = LocalFleet(
        RunSetup(sgd, None, {"train": source}, settings),
        setup,
        {**made.parameters, **made.buffers},
        device_of,
    )
    try:
        orders: Iterator[Order] = (Order(s) for s, _ in train_segments(shape.samples, minibatch, size, STEPS))
        reports = [report for of_stages in fleet.run(orders, rows) for r in of_stages for report in r]
        found: list[torch.Tensor | float | None] = [x for r in reports for x in (r.loss, r.grad_norm)]
        found += [x for r in reports if r.norms for x in r.norms.norms]
        for work in fleet._works:
            crossing = work._crossing
            found += crossing.copied(work.state.parameters, Crosses.SNAPSHOT).values()
    finally:
        fleet.stop()
    return found


def _same(a: torch.Tensor | float | None, b: torch.Tensor | float | None) -> bool:
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)  # type: ignore[arg-type]
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))  # type: ignore[arg-type]
