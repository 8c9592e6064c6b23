"""Stages on a device whose work is done as late as waits allow: the same bits, and others without one of the waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch

from raypipe.engine.device import CPU, Crosses, Device
from raypipe.errors import RaypipeError
from tests.device_run import evaluate, gone_back, run
from tests.exactness import same_bits
from tests.fake_device import FakeDevice, Reached


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
    wait, plain = f"{Crosses.METRICS}: {why}", evaluate(lambda worker: CPU)

    def late(eager: bool, worker: int) -> FakeDevice:
        return FakeDevice(eager=eager, without=wait)

    assert any(evaluate(partial(late, eager)) != plain for eager in (False, True))


@pytest.mark.parametrize("eager", [False, True])
def test_a_state_that_goes_back_is_that_of_the_copy(*, eager: bool) -> None:
    found = gone_back(lambda worker: FakeDevice(eager=eager))
    assert all(same_bits(a, b) for a, b in zip(found, gone_back(lambda worker: CPU), strict=True))


@pytest.mark.parametrize(
    "wait",
    [f"{Crosses.RESTORED}: computed with once they are on the device",
     f"{Crosses.SNAPSHOT}: read once they are in host memory"],
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
    for what in (Crosses.OUTPUTS, Crosses.INPUT_GRADS):
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
