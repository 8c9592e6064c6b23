"""GPU memory that two processes of a host share by CUDA IPC, through CuPy, which is imported at the first call.

The memory is allocated beside torch's: torch's own ``storage._share_cuda_()`` counts users in a file in /dev/shm, which
a killed process leaves there, and never frees what a killed process had opened.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class _Opened:
    """Owner of memory of another process, which is closed when the last tensor over it is freed."""


def share(index: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
    """Allocate memory on GPU ``index``; see ``Device.share``."""
    import cupy

    with cupy.cuda.Device(index):
        memory = cupy.cuda.Memory(nbytes)
        return _tensor_over(memory), cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)


def open_shared(index: int, handle: bytes, nbytes: int) -> torch.Tensor:
    """Open memory of another process for GPU ``index``, if necessary with peer access; see ``Device.open_shared``."""
    import cupy

    with cupy.cuda.Device(index):
        address = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        opened = _Opened()
        weakref.finalize(opened, _close, address, index).atexit = False
        # The index is given because the owner's GPU may be hidden from this process.
        return _tensor_over(cupy.cuda.UnownedMemory(address, nbytes, opened, index))


def _tensor_over(memory: Any) -> torch.Tensor:
    """Make a uint8 tensor over memory of CuPy, which the tensor keeps alive."""
    import cupy

    return torch.from_dlpack(cupy.ndarray((memory.size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)))


def _close(address: int, index: int) -> None:
    import cupy

    with cupy.cuda.Device(index):
        cupy.cuda.runtime.ipcCloseMemHandle(address)
