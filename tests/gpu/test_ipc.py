"""Links through GPU memory that two processes on one GPU open by CUDA IPC: the contract, steps, aborts, a killed peer.

The same tests run with fake devices in tests/runtime/transport/test_device_memory.py.
"""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.device.cuda_device import CudaDevice
from tests.contract.two_processes import DeviceMemoryBetweenProcesses

pytest.importorskip("cupy", reason="GPU memory is shared by CuPy: pip install raypipe[cuda13]")


class TestCudaIpcBetweenProcesses(DeviceMemoryBetweenProcesses):
    device = "cuda"


def test_shared_memory_is_a_tensor_of_the_device() -> None:
    device = CudaDevice()
    memory, handle = device.share(1 << 20)
    assert (memory.device, memory.dtype, memory.shape) == (device.place, torch.uint8, (1 << 20,))
    assert memory.data_ptr() % 64 == 0
    assert len(handle) == 64
    memory.fill_(7)
    assert bool((memory == 7).all())
