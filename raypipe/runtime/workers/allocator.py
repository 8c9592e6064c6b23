"""What a stage's process frees stays with it, for the next micro-batch asks for as much.

glibc gives memory back to the system as soon as a large piece is free, and gets it anew for the next micro-batch: every
page is then zeroed and entered by the kernel once more. With ResNet-50 that was 20 000 to 75 000 pages per step and
stage, a tenth of the step and more. All threads share one arena, for others cannot hold a piece of 64 MiB.

Nothing is done under another allocator, or where somebody set glibc's thresholds in the environment (``MALLOC_...``,
``GLIBC_TUNABLES``), as whoever measures memory does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MOST = (1 << 31) - 1
_PAD_BYTES = 64 << 20
"""Asked of the system at a time."""


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Let this process keep what it frees; whether that was possible.

    Args:
        environment: instead of os.environ.
    """
    given = os.environ if environment is None else environment
    if any(name.startswith("MALLOC_") for name in given) or "GLIBC_TUNABLES" in given or "LD_PRELOAD" in given:
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (not glibc otherwise)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {_TRIM_THRESHOLD: _MOST, _TOP_PAD: _PAD_BYTES, _MMAP_THRESHOLD: _MOST, _ARENA_MAX: 1}
    taken = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(taken)
