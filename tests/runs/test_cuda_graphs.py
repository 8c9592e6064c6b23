"""Training from graphs of a fake device has the bits of training without; what a graph must not do changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.local import LocalFleet
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments
from tests.exactness import same_bits
from tests.fake_device import FakeDevice
from tests.models import CASES
from tests.trainers import trainer_of

Found = list[torch.Tensor | float | None]
STEPS = 20
SGD, ADAMW = partial(torch.optim.SGD, lr=5e-2, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)


def run(device_of: Callable[[int], Device], name: str = "mlp", steps: int = STEPS, samples: int = 40, *,
        graphs: bool, **given: Any) -> Found:  # fmt: skip
    """Losses, norms and parameters, buffers too."""
    case = CASES[name]
    trainer = trainer_of(
        case.model(), loss_fn=case.loss_fn, train_data=case.data(samples), verify="off", **{"optimizer": SGD} | given
    )
    job = trainer._prepared()
    plan = job.plan
    setup = replace(job.run_setup(None), cuda_graphs=graphs)
    fleet = LocalFleet(setup, job.generation_setup(), job.tensors, device_of)
    try:
        segments = train_segments(samples, plan.minibatch_size, plan.microbatch_size, steps)
        orders = (Order(segment) for segment, _ in segments)
        reports = [r for step in fleet.run(orders, lambda key: rows_for(plan, key)) for s in step for r in s]
        found: Found = [x for r in reports for x in (r.loss, r.grad_norm)]
        for executor in fleet.executors:
            for work in executor.works.values():
                held = {**work.state.parameters, **work.state.buffers}
                found += executor.transfer.copied(held, TransferKind.SNAPSHOT).values()
    finally:
        fleet.stop()
    return found


@cache
def plainly(**given: Any) -> Found:
    return run(lambda worker: CPU, graphs=False, **given)


def same(found: Found, wanted: Found) -> bool:
    return len(found) == len(wanted) and all(map(_same, found, wanted))


def _same(a: torch.Tensor | float | None, b: torch.Tensor | float | None) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return repr(a) == repr(b)


class Devices:
    """Makes fake devices and keeps them."""

    def __init__(self) -> None:
        self.made: list[FakeDevice] = []

    def __call__(self, worker: int) -> FakeDevice:
        self.made.append(FakeDevice(eager=False))
        return self.made[-1]
