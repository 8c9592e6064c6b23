"""A new size of micro-batch must not be measured with memory that comes from the system in every round."""

from __future__ import annotations

import os
import subprocess
import sys

FAULTS = """
import resource, torch
from raypipe.profiling.measure import settle_allocator

def turn():
    kept = [torch.ones(1 << 18) for _ in range(20)]  # 20 MiB, freed together

settle_allocator()
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * (20 << 20) // 4096
"""Of all turns."""


def test_freed_memory_is_used_again() -> None:
    """In a process of its own, for this one's malloc has seen other tests.

    Unsettled, most processes touch all pages in every turn; in some a small piece happens to lie on top of the heap and
    keeps it from being given back, so nothing is asserted of those.
    """
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    found = subprocess.run(
        [sys.executable, "-c", FAULTS], env=settings, stdout=subprocess.PIPE, timeout=120, check=True
    )
    assert int(found.stdout) < PAGES / 20
