"""A device whose work is done as late as its waits allow: the same bits, and others if a wait is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from raypipe.engine.codec import Codec, Codecs, cuda
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.local import LocalFleet
from raypipe.engine.messages import transfer
from raypipe.engine.optim import all_reduce, slices
from raypipe.engine.stage import gradients
from raypipe.errors import RaypipeError
from raypipe.ir import communication
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments
from tests.device_run import evaluate, gone_back, run
from tests.emulators.cuda import Emulated, emulated
from tests.exactness import same_bits
from tests.fake_device import FakeDevice, Reached
from tests.models import CASES
from tests.trainers import trainer_of

Found = list[torch.Tensor | float | None]
DeviceOf = Callable[[int], Device]
REPLICATED_STEPS = 3


def run_replicas(device_of: DeviceOf, **more: Any) -> Found:
    """Losses, norms and parameters of three steps on two stages of two replicas each."""
    case = CASES["mlp"]
    trainer = trainer_of(
        case.model(), loss_fn=case.loss_fn, optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        train_data=case.data(24), num_replicas=2, verify="off", max_grad_norm=0.5, **more,
    )  # fmt: skip
    job = trainer._prepared()
    plan = job.plan
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.tensors, device_of)
    try:
        segments = train_segments(24, plan.minibatch_size, plan.microbatch_size, REPLICATED_STEPS)
        orders = (Order(segment) for segment, _ in segments)
        reports = [r for step in fleet.run(orders, lambda key: rows_for(plan, key)) for s in step for r in s]
        found: Found = [x for r in reports for x in (r.loss, r.grad_norm)]
        for executor in fleet.executors:
            for work in executor.works.values():
                found += executor.transfer.copied(work.state.parameters, TransferKind.SNAPSHOT).values()
    finally:
        fleet.stop()
    return found


PAIRS = {
    "16 bits": Codecs(Codec("bf16"), Codec("fp16")),
    "int8 at random": Codecs(Codec("int8", rounding_seed=7), Codec("int8")),
    "few bits": Codecs(Codec("fp8"), Codec("int4", rounding_seed=3)),
    "transformed": Codecs(Codec("tah3"), Codec("tah4")),
}
NETS = {"transformed": "cnn"}
"""Those whose messages need more elements than the usual one has."""
RUNS: dict[str, Callable[[DeviceOf], Found]] = {
    "run": run,
    "a traced model that makes tensors": partial(run, name="tied-lm"),
    "evaluation": lambda device_of: list(evaluate(device_of).values()),
    "a state that goes back": lambda device_of: list(gone_back(device_of)),
    **{name: partial(run, codecs=pair, name=NETS.get(name, "tied-sequential")) for name, pair in PAIRS.items()},
    "exchange": partial(run_replicas, codec_sums="none"),
    "exchange in bf16": partial(run_replicas, codec_sums="bf16"),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return emulated(cuda.SOURCE, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def several_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where replicas exchange gradients."""
    if "exchange" in request.node.name:
        monkeypatch.setattr(communication, "CHUNK_BYTES", 512)
        for module in (gradients, slices):
            monkeypatch.setattr(module, "EARLY_BYTES", 1)


@cache
def plainly(name: str) -> Found:
    return RUNS[name](lambda worker: CPU)


def differs(name: str, device_of: DeviceOf) -> bool:
    """Whether a run has other bits than on the CPU; it may fail, because what it reads is not finite."""
    plain = plainly(name)
    try:
        found = RUNS[name](device_of)
    except RaypipeError:
        return True
    return len(found) != len(plain) or not all(map(_same, found, plain))


def _same(a: torch.Tensor | float | None, b: torch.Tensor | float | None) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return repr(a) == repr(b)  # NaN is NaN here


@pytest.mark.usefixtures("several_chunks")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_a_device_that_is_late_computes_the_same_bits(kernels: Emulated, name: str, *, eager: bool) -> None:
    """What codecs on links make of them, where it has kernels of its own."""
    devices: list[FakeDevice] = []

    def device_of(worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, kernels=kernels if name in PAIRS else None))
        return devices[-1]

    assert not differs(name, device_of)
    launched = {way for device in devices for way in device.launched}
    for codec in PAIRS.get(name, ()):
        assert {cuda.kernel_name(way, codec.name, torch.float32) for way in ("encode", "decode")} <= launched


def test_a_device_without_kernels_leaves_codecs_to_the_links() -> None:
    assert not differs("few bits", lambda worker: FakeDevice(eager=False))


COMPUTED_WITH, COPIED, READ, STAGED = (
    "computed with once they are on the device",
    "copied once they are computed",
    "read once they are in host memory",
    "staged once the copy before has been made",
)
FOUND = {
    TransferKind.COLUMNS: (COMPUTED_WITH,),
    TransferKind.INPUTS: (COMPUTED_WITH,),
    TransferKind.OUTPUT_GRADS: (COMPUTED_WITH,),
    TransferKind.REDUCED: (COMPUTED_WITH, COPIED, READ, STAGED),
    TransferKind.OUTPUTS: (COPIED, READ),
    TransferKind.INPUT_GRADS: (COPIED, READ),
    TransferKind.NORMS: (READ,),
    TransferKind.SNAPSHOT: (READ,),
    TransferKind.PARAMETERS: (STAGED,),
}
"""Those that no other wait stands in for in this run; docs/design/0046 names the others."""
MISSING = [
    *(("run", f"{what}: {why}") for what, reasons in FOUND.items() for why in reasons),
    ("run", "record_stream"),
    ("evaluation", f"{TransferKind.LOSS}: {READ}"),
    ("evaluation", f"{TransferKind.METRICS}: {COPIED}"),
    ("evaluation", f"{TransferKind.METRICS}: {READ}"),
    ("a state that goes back", f"{TransferKind.RESTORED}: {COMPUTED_WITH}"),
    ("a state that goes back", f"{TransferKind.SNAPSHOT}: {READ}"),
    ("few bits", f"{TransferKind.OUTPUTS}: {COPIED}"),
    ("few bits", f"{TransferKind.INPUT_GRADS}: {READ}"),
    ("few bits", f"{TransferKind.INPUTS}: {COMPUTED_WITH}"),
    *(("exchange", f"{TransferKind.REDUCED}: {why}") for why in (COMPUTED_WITH, COPIED, READ)),
    ("exchange", f"{TransferKind.REDUCED}: summed once they are complete"),
    ("exchange", f"{TransferKind.REDUCED}: used once they are exchanged"),
    ("exchange", "record_stream"),
]


@pytest.mark.usefixtures("several_chunks")
@pytest.mark.parametrize(("name", "wait"), MISSING)
def test_a_wait_that_is_missing_changes_bits(
    kernels: Emulated, name: str, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "KEPT_BYTES", 0)  # staging memory is short
    devices: list[FakeDevice] = []

    def device_of(worker: int, *, eager: bool) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, without=wait, kernels=kernels if name in PAIRS else None))
        return devices[-1]

    assert any(differs(name, partial(device_of, eager=eager)) for eager in (False, True))
    assert wait == "record_stream" or any(wait in device.waits for device in devices), "nobody waits for that"


class Watched(FakeDevice):
    """Notes which threads wait for what."""

    def __init__(self) -> None:
        super().__init__(eager=True)
        self.by: dict[str, set[str]] = {}

    def finish(self, mark: Reached, why: str) -> None:
        self.by.setdefault(why, set()).add(threading.current_thread().name)
        super().finish(mark, why)


def test_who_computes_does_not_wait_for_the_messages_that_it_sends() -> None:
    devices: list[Watched] = []

    def device_of(worker: int) -> Watched:
        devices.append(Watched())
        return devices[-1]

    run(device_of)
    for what in (TransferKind.OUTPUTS, TransferKind.INPUT_GRADS):
        threads = {name for device in devices for name in device.by.get(f"{what}: {READ}", ())}
        assert threads
        assert all(name.startswith("raypipe-send") for name in threads), threads


@pytest.mark.usefixtures("several_chunks")
def test_chunks_of_an_exchange_go_beside_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests here would show little: each is told by the hook of its last gradient, on the device too."""
    told: list[int] = []
    completed = all_reduce._ThreadedExchange.completed
    monkeypatch.setattr(
        all_reduce._ThreadedExchange, "completed", lambda begun, site: (told.append(site), completed(begun, site))[1]
    )
    run_replicas(lambda worker: FakeDevice(eager=False))
    assert len(told) == 4 * REPLICATED_STEPS * 4, "of four workers with two layers each, two parameters a layer"
