"""The CPU and the fake device keep the contract of devices, and where a device's marks lie on the host's clock."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.codec import cuda
from raypipe.engine.device import cuda_device
from raypipe.engine.device.cuda_device import host_offset_s
from raypipe.engine.device.device import CPU, Device
from tests.contract.device import DeviceContract
from tests.emulators.cuda import Emulated, emulated
from tests.fake_device import FakeDevice


class TestCpu(DeviceContract):
    @pytest.fixture
    def device(self) -> Device:
        return CPU


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return emulated(cuda.SOURCE, tmp_path_factory.mktemp("kernels"))


class TestFake(DeviceContract):
    @pytest.fixture(params=[False, True], ids=["late", "eager"])
    def device(self, request: pytest.FixtureRequest, kernels: Emulated) -> Device:
        return FakeDevice(eager=request.param, kernels=kernels)


ASKED = [10.0, 10.001, 10.002]


@pytest.mark.parametrize(
    ("since", "known", "guess", "expected"),
    [
        # Idle: every mark was reached when it was asked for.
        ([0.0, 0.001, 0.002], 10.003, None, 10.0),
        # The second one waited for 4 ms of work; nothing says that the first one did.
        ([0.0, 0.005, 0.006], 10.008, None, 10.0),
        # A guess that is possible stays; one that would have marks reached before they were asked for does not.
        ([0.0, 0.005, 0.006], 10.008, 10.0015, 10.0015),
        ([0.0, 0.005, 0.006], 10.008, 9.9, 10.0),
        # Nor one that would have them reached after the host knew of them.
        ([0.0, 0.005, 0.006], 10.008, 10.5, 10.002),
        # The last mark was asked for late, so that the first cannot have been reached before it.
        ([0.0, 0.0005, 0.0015], 10.003, 10.0, 10.0005),
    ],
)
def test_a_device_s_clock_is_placed_by_what_the_host_saw(
    since: list[float], known: float, guess: float | None, expected: float
) -> None:
    assert host_offset_s(since, ASKED, known, guess) == pytest.approx(expected, abs=1e-9)


def test_torch_without_cuda_is_told_from_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "built without CUDA" in cuda_device.why_not()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "its driver is older" in cuda_device.why_not()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cuda_device.why_not(1) == ""
    assert cuda_device.why_not(2) == "there is no GPU 2: torch sees 2, counted from 0."
