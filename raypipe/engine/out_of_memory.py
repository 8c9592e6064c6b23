"""Whether an exception says that there was no memory left, and how much the process or its device held then."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

__all__ = ["held_bytes", "process_bytes", "ran_out"]

_STATM = Path("/proc/self/statm")


def ran_out(error: BaseException) -> bool:
    """Whether Python, torch or a device had no memory left.

    torch's allocator for host memory raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def held_bytes(error: BaseException) -> int:
    """By the device, where it was the device's memory, else by this process; 0 where the system does not tell."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return process_bytes()


def process_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
