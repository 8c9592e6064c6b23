"""How often a step calls the device: each call takes the host's time, and each wait leaves the device idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from raypipe.data.open_data import open_data
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.local import LocalFleet
from raypipe.errors import StageError
from raypipe.ir.report import StepReport
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments
from tests.fake_device import FakeDevice
from tests.models import CASES
from tests.trainers import trainer_of

STEPS, MICROBATCHES = 4, 8
KINDS = ("waits", "stalls", "events", "stream switches", "record_streams", "pinned allocations")
CALLS = {
    (1, True): (2, 0, 22, 1, 2, 2),
    (1, False): (2, 1, 22, 1, 2, 2),
    (2, True): (22, 0, 98, 38, 43, 24),
}
"""Calls of a step by number of stages and whether the optimizer is fused, as in KINDS, on all devices together."""


@contextmanager
def fleet_of(
    device_of: Callable[[int], Device], num_stages: int, *, fused: bool, steps: int = STEPS, refused: int | None = None
) -> Iterator[tuple[LocalFleet, Iterator[list[list[StepReport]]]]]:
    """Yield (stages, reports of steps of SGD with clipping); the data of step ``refused`` has a NaN."""
    case = CASES["mlp"]
    data = case.data(16 * steps)
    if refused is not None:
        columns: Any = open_data(data, seed=0).read(0, 16 * refused, 1, (0, 1))
        data.tensors[0][(data.tensors[0] == columns[0]).all(1)] = torch.nan
    trainer = trainer_of(
        case.model(), loss_fn=case.loss_fn, optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9, fused=fused),
        train_data=data, num_stages=num_stages, minibatch_size=16, num_microbatches=MICROBATCHES,
        schedule="1f1b", verify="off", max_grad_norm=0.5,
    )  # fmt: skip
    job = trainer._prepared()
    plan = job.plan
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.tensors, device_of)
    try:
        segments = train_segments(16 * steps, plan.minibatch_size, plan.microbatch_size, steps)
        yield fleet, fleet.run((Order(segment) for segment, _ in segments), lambda key: rows_for(plan, key))
    finally:
        fleet.stop()


@pytest.mark.parametrize(("num_stages", "fused"), CALLS)
def test_a_step_makes_so_many_calls_of_the_device(num_stages: int, *, fused: bool) -> None:
    """Compares whole runs of n and n + 1 steps: between two reports of one run, threads are not at the same place."""

    def calls_of(steps: int) -> Counter[str]:
        devices: list[FakeDevice] = []

        def device_of(worker: int) -> FakeDevice:
            devices.append(FakeDevice(eager=False))
            return devices[-1]

        with fleet_of(device_of, num_stages, fused=fused, steps=steps) as (fleet, reports):
            assert len(list(reports)) == steps
            kept = [len(of_size) for worker in fleet.executors for of_size in worker.transfer._staging.values()]
            assert max(kept) <= MICROBATCHES, "a step reuses the receiving buffers of the one before"
        calls = sum((device.calls for device in devices), Counter())
        calls["pinned allocations"] -= sum(kept)  # how many of them are in use at once is a matter of time
        return calls

    of_a_step = calls_of(STEPS) - calls_of(STEPS - 1)
    assert tuple(of_a_step[kind] for kind in KINDS) == CALLS[num_stages, fused]


def trained(device_of: Callable[[int], Device], num_stages: int, refused: int | None) -> tuple[Any, ...]:
    """Return (losses and norms by step, error, parameters) of a run with a fused optimizer."""
    found: list[tuple[float | None, ...]] = []
    error = ""
    with fleet_of(device_of, num_stages, fused=True, refused=refused) as (fleet, steps):
        try:
            found.extend(tuple(x for (r,) in step for x in (r.loss, r.grad_norm)) for step in steps)
        except StageError as raised:
            error = str(raised)
        parameters = [
            executor.transfer.copied(work.state.parameters, TransferKind.SNAPSHOT)
            for executor in fleet.executors
            for work in executor.works.values()
        ]
    return found, error, parameters


@pytest.mark.parametrize("refused", [None, 1, STEPS - 1])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_is_checked_late_changes_nothing_if_it_is_refused(num_stages: int, refused: int | None) -> None:
    """The error names the step, and the parameters are those before it, as on a CPU, where it is checked at once."""
    of_cpu, of_device = (
        trained(device_of, num_stages, refused)
        for device_of in (lambda worker: CPU, lambda worker: FakeDevice(eager=False))
    )
    assert of_device[:2] == of_cpu[:2]
    assert (f"Step {refused}:" in of_cpu[1]) == (refused is not None)
    for on_cpu, on_device in zip(of_cpu[2], of_device[2], strict=True):
        assert all(torch.equal(on_device[name], x) for name, x in on_cpu.items())
