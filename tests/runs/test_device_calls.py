"""How often a step calls the device: each call takes the host's time, and each wait leaves the device idle."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from raypipe.engine.local import LocalFleet
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments
from tests.fake_device import FakeDevice
from tests.models import CASES
from tests.trainers import trainer_of

STEPS, MICROBATCHES = 6, 8
KINDS = ("waits", "events", "stream switches", "record_streams", "pinned allocations")
CALLS = {1: (5, 27, 3, 6, 4), 2: (47, 159, 42, 51, 28)}
"""Calls of a step by number of stages, in the order of KINDS, on all devices together."""


@pytest.mark.parametrize("num_stages", CALLS)
def test_a_step_makes_so_many_calls_of_the_device(num_stages: int) -> None:
    devices: list[FakeDevice] = []

    def device_of(worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=False))
        return devices[-1]

    case = CASES["mlp"]
    trainer = trainer_of(
        case.model(), loss_fn=case.loss_fn, optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        train_data=case.data(16 * STEPS), num_stages=num_stages, minibatch_size=16, num_microbatches=MICROBATCHES,
        schedule="1f1b", verify="off", max_grad_norm=0.5,
    )  # fmt: skip
    job = trainer._prepared()
    plan = job.plan
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.tensors, device_of)
    until: list[Counter[str]] = []
    try:
        segments = train_segments(16 * STEPS, plan.minibatch_size, plan.microbatch_size, STEPS)
        for _ in fleet.run((Order(segment) for segment, _ in segments), lambda key: rows_for(plan, key)):
            until.append(sum((device.calls for device in devices), Counter()))
    finally:
        fleet.stop()
    of_a_step = until[-1] - until[-2]
    assert tuple(of_a_step[kind] for kind in KINDS) == CALLS[num_stages]
