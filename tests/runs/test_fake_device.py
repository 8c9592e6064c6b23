"""A device whose work is done as late as its waits allow: the same bits, and others if a wait is missing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.codec import Codec, Codecs, cuda
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.local import LocalFleet
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


@pytest.mark.parametrize("eager", [False, True])
def test_a_device_that_is_late_computes_the_same_bits(*, eager: bool) -> None:
    assert differs(lambda worker: FakeDevice(eager=eager)) == []


def test_a_traced_model_that_makes_tensors_computes_the_same_bits() -> None:
    plain, found = run(lambda worker: CPU, "tied-lm"), run(lambda worker: FakeDevice(eager=False), "tied-lm")
    assert all(_same(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("eager", [False, True])
def test_an_evaluation_on_it_has_the_same_loss_and_metrics(*, eager: bool) -> None:
    plain, found = evaluate(lambda worker: CPU), evaluate(lambda worker: FakeDevice(eager=eager))
    assert set(plain) == {"loss of 0", "accuracy", "largest"}
    assert found == plain


@pytest.mark.parametrize("why", ["copied once they are computed", "read once they are in host memory"])
def test_a_wait_of_metrics_that_is_missing_changes_them(why: str) -> None:
    wait, plain = f"{TransferKind.METRICS}: {why}", evaluate(lambda worker: CPU)

    def late(eager: bool, worker: int) -> FakeDevice:
        return FakeDevice(eager=eager, without=wait)

    assert any(evaluate(partial(late, eager)) != plain for eager in (False, True))


@pytest.mark.parametrize("eager", [False, True])
def test_a_state_that_goes_back_is_that_of_the_copy(*, eager: bool) -> None:
    found = gone_back(lambda worker: FakeDevice(eager=eager))
    assert all(same_bits(a, b) for a, b in zip(found, gone_back(lambda worker: CPU), strict=True))


@pytest.mark.parametrize(
    "wait",
    [f"{TransferKind.RESTORED}: computed with once they are on the device",
     f"{TransferKind.SNAPSHOT}: read once they are in host memory"],
)  # fmt: skip
def test_a_wait_of_copies_that_is_missing_changes_bits(wait: str) -> None:
    plain = gone_back(lambda worker: CPU)

    def late(eager: bool, worker: int) -> FakeDevice:
        return FakeDevice(eager=eager, without=wait)

    def same(eager: bool) -> bool:
        try:
            found = gone_back(partial(late, eager))
        except RaypipeError:  # a loss that is not finite
            return False
        return all(same_bits(a, b) for a, b in zip(found, plain, strict=True))

    assert not (same(False) and same(True))


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
    TransferKind.NORMS: (COPIED, READ),
    TransferKind.LOSS: (READ,),
    TransferKind.SNAPSHOT: (READ,),
    TransferKind.PARAMETERS: (STAGED,),
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


def _same(a: torch.Tensor | float | None, b: torch.Tensor | float | None) -> bool:
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)  # type: ignore[arg-type]
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))  # type: ignore[arg-type]


PAIRS = {
    "16 bits": Codecs(Codec("bf16"), Codec("fp16")),
    "int8 at random": Codecs(Codec("int8", rounding_seed=7), Codec("int8")),
    "few bits": Codecs(Codec("fp8"), Codec("int4", rounding_seed=3)),
}
Found = list[torch.Tensor | float | None]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return emulated(cuda.SOURCE, tmp_path_factory.mktemp("kernels"))


@cache
def on_links(name: str) -> Found:
    return run(lambda worker: CPU, codecs=PAIRS[name])


def same(a: Found, b: Found) -> bool:
    return len(a) == len(b) and all(
        same_bits(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_a_run_computes_what_codecs_on_links_make_of_it(kernels: Emulated, name: str, *, eager: bool) -> None:
    devices: list[FakeDevice] = []

    def device_of(worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, kernels=kernels))
        return devices[-1]

    found = run(device_of, codecs=PAIRS[name])
    assert same(found, on_links(name))
    assert not same(found, run(lambda worker: CPU))  # codecs lose something, so they were there
    both = {way for device in devices for way in device.launched}
    forward, backward = PAIRS[name]
    for codec in (forward, backward):
        assert {cuda.kernel_name(way, codec.name, torch.float32) for way in ("encode", "decode")} <= both


def test_a_device_without_kernels_leaves_codecs_to_the_links() -> None:
    found = run(lambda worker: FakeDevice(eager=False), codecs=PAIRS["few bits"])
    assert same(found, on_links("few bits"))


@pytest.mark.parametrize(
    "wait",
    [f"{TransferKind.OUTPUTS}: copied once they are computed",
     f"{TransferKind.INPUT_GRADS}: read once they are in host memory",
     f"{TransferKind.INPUTS}: computed with once they are on the device"],
)  # fmt: skip
def test_a_wait_that_is_missing_around_the_kernels_changes_bits(kernels: Emulated, wait: str) -> None:
    def late(eager: bool, worker: int) -> FakeDevice:
        return FakeDevice(eager=eager, without=wait, kernels=kernels)

    def differs(eager: bool) -> bool:
        try:
            return not same(run(partial(late, eager), codecs=PAIRS["few bits"]), on_links("few bits"))
        except RaypipeError:  # what it reads is not finite
            return True

    assert differs(False) or differs(True)


REPLICATED_STEPS = 3


def run_replicas(device_of: Callable[[int], Device], **more: Any) -> list[torch.Tensor | float | None]:
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
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.tensors, device_of)
    try:
        segments = train_segments(24, plan.minibatch_size, plan.microbatch_size, REPLICATED_STEPS)
        orders = (Order(segment) for segment, _ in segments)
        reports = [r for step in fleet.run(orders, lambda key: rows_for(plan, key)) for s in step for r in s]
        found: list[torch.Tensor | float | None] = [x for r in reports for x in (r.loss, r.grad_norm)]
        for executor in fleet.executors:
            for work in executor.works.values():
                found += executor.transfer.copied(work.state.parameters, TransferKind.SNAPSHOT).values()
    finally:
        fleet.stop()
    return found


@pytest.fixture
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "CHUNK_BYTES", 512)
    for module in (gradients, slices):
        monkeypatch.setattr(module, "EARLY_BYTES", 1)


@cache
def exchanged_on_cpu(codec: str) -> list[torch.Tensor | float | None]:
    return run_replicas(lambda worker: CPU, codec_sums=codec)


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("eager", [False, True])
def test_exchanged_gradients_have_the_bits_of_processors(codec: str, *, eager: bool) -> None:
    found = run_replicas(lambda worker: FakeDevice(eager=eager), codec_sums=codec)
    assert len(found) == len(exchanged_on_cpu(codec))
    for a, b in zip(found, exchanged_on_cpu(codec), strict=True):
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b  # type: ignore[arg-type]


@pytest.mark.usefixtures("_several_chunks")
def test_chunks_go_beside_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests here would show little: each is told by the hook of its last gradient, on the device too."""
    told: list[int] = []
    completed = all_reduce._ThreadedExchange.completed
    monkeypatch.setattr(
        all_reduce._ThreadedExchange, "completed", lambda begun, site: (told.append(site), completed(begun, site))[1]
    )
    run_replicas(lambda worker: FakeDevice(eager=False))
    assert len(told) == 4 * REPLICATED_STEPS * 4, "of four workers with two layers each, two parameters a layer"


EXCHANGE_WAITS = (
    f"{TransferKind.REDUCED}: computed with once they are on the device",
    f"{TransferKind.REDUCED}: copied once they are computed",
    f"{TransferKind.REDUCED}: read once they are in host memory",
    f"{TransferKind.REDUCED}: summed once they are complete",
    f"{TransferKind.REDUCED}: used once they are exchanged",
    "record_stream",
)


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize("why", EXCHANGE_WAITS)
def test_a_wait_that_is_missing_around_an_exchange_changes_bits(why: str) -> None:
    devices: list[FakeDevice] = []

    def late(eager: bool, worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, without=why))
        return devices[-1]

    def same(eager: bool) -> bool:
        try:
            found = run_replicas(partial(late, eager), codec_sums="none")
        except RaypipeError:  # what was read is not finite
            return False
        pairs = zip(found, exchanged_on_cpu("none"), strict=True)
        return all(same_bits(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)  # type: ignore[arg-type]

    assert not (same(False) and same(True))
    assert why == "record_stream" or any(why in device.waits for device in devices)
