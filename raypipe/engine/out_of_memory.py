"""Memory: whether an exception says that none was left, what the process or its device holds, what it may hold."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

__all__ = ["held_bytes", "memory_bytes", "process_bytes", "ran_out"]

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


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """That this process may hold: what the machine has, or the limit of its container where that is lower.

    Args:
        groups, own: where Linux shows control groups and which is this process's, of version 1 or 2.
    """
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"]
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                limits.append(groups / path.lstrip("/") / "memory.max")
            elif "memory" in kinds.split(","):
                limits.append(groups / "memory" / path.lstrip("/") / "memory.limit_in_bytes")
    for limit in limits:
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            found = min(found, int(limit.read_text()))
    return found
