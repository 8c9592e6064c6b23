"""Replicas that exchange gradients on a device whose work is done as late as waits allow: the bits of processors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.api import launch
from raypipe.engine import gradients
from raypipe.engine.device import CPU, Crosses, Device
from raypipe.engine.local import LocalFleet
from raypipe.engine.replicas import all_reduce, chunks
from raypipe.errors import RaypipeError
from raypipe.ir import exchange
from raypipe.ir.work_order import Order
from raypipe.planner.rows import rows_for
from raypipe.planner.segments import train_segments
from tests.exactness import same_bits
from tests.fake_device import FakeDevice
from tests.models import CASES

STEPS = 3


def run(device_of: Callable[[int], Device], **more: Any) -> list[torch.Tensor | float | None]:
    """Losses, norms and parameters of three steps on two stages of two replicas each."""
    case = CASES["mlp"]
    trainer = PipelineTrainer(
        case.model(), loss_fn=case.loss_fn, optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        train_data=case.data(24),
        pipeline=PipelineConfig(
            num_stages=2, num_replicas=2, minibatch_size=8, num_microbatches=4, partitioner="parameters", verify="off",
            max_grad_norm=0.5, **more,
        ),
    )  # fmt: skip
    job = trainer._prepared()
    plan = job.plan
    fleet = LocalFleet(launch.run_setup(job, None), launch.generation_setup(job), job.tensors, device_of)
    try:
        segments = train_segments(24, plan.minibatch_size, plan.microbatch_size, STEPS)
        orders = (Order(segment) for segment, _ in segments)
        reports = [r for step in fleet.run(orders, lambda key: rows_for(plan, key)) for s in step for r in s]
        found: list[torch.Tensor | float | None] = [x for r in reports for x in (r.loss, r.grad_norm)]
        for executor in fleet.executors:
            for work in executor.works.values():
                found += executor.crossing.copied(work.state.parameters, Crosses.SNAPSHOT).values()
    finally:
        fleet.stop()
    return found


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 512)
    for module in (gradients, chunks):
        monkeypatch.setattr(module, "EARLY_BYTES", 1)


@cache
def plainly(codec: str) -> list[torch.Tensor | float | None]:
    return run(lambda worker: CPU, codec_sums=codec)


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("eager", [False, True])
def test_the_bits_of_processors(codec: str, *, eager: bool) -> None:
    found = run(lambda worker: FakeDevice(eager=eager), codec_sums=codec)
    assert len(found) == len(plainly(codec))
    for a, b in zip(found, plainly(codec), strict=True):
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b  # type: ignore[arg-type]


def test_chunks_go_beside_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests here would show little: each is told by the hook of its last gradient, on the device too."""
    told: list[int] = []
    completed = all_reduce._Begun.completed
    monkeypatch.setattr(
        all_reduce._Begun, "completed", lambda begun, site: (told.append(site), completed(begun, site))[1]
    )
    run(lambda worker: FakeDevice(eager=False))
    assert len(told) == 4 * STEPS * 4, "of four workers with two layers each, two parameters a layer"


WAITS = (
    f"{Crosses.REDUCED}: computed with once they are on the device",
    f"{Crosses.REDUCED}: copied once they are computed",
    f"{Crosses.REDUCED}: read once they are in host memory",
    f"{Crosses.REDUCED}: summed once they are complete",
    f"{Crosses.REDUCED}: used once they are exchanged",
    "record_stream",
)


@pytest.mark.parametrize("why", WAITS)
def test_a_wait_that_is_missing_changes_them(why: str) -> None:
    devices: list[FakeDevice] = []

    def late(eager: bool, worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, without=why))
        return devices[-1]

    def same(eager: bool) -> bool:
        try:
            found = run(partial(late, eager), codec_sums="none")
        except RaypipeError:  # what was read is not finite
            return False
        pairs = zip(found, plainly("none"), strict=True)
        return all(same_bits(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)  # type: ignore[arg-type]

    assert not (same(False) and same(True))
    assert why == "record_stream" or any(why in device.waits for device in devices)
