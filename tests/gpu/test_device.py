"""A CUDA device keeps the contract of devices, with work before every crossing that takes it a while."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.engine.device.device import Device
from tests.contract.device import DeviceContract


class TestCuda(DeviceContract):
    @pytest.fixture
    def device(self) -> Device:
        return CudaDevice()

    def busy(self, device: Device) -> None:
        x = torch.ones(4096, 4096, device=device.place)
        for _ in range(4):
            x = x @ x * 2.0**-12


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(Exception, match="there is no GPU 99"):
        CudaDevice(99)
