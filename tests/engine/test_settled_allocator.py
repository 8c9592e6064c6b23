"""A new size of micro-batch must not be measured with memory that comes from the system in every round."""

from __future__ import annotations

import os
import subprocess
import sys

FAULTS = """
import resource, sys, torch
from raypipe.engine.profiling.measure import settle_allocator

def turn():
    kept = [torch.ones(1 << 18) for _ in range(20)]  # 20 MiB, freed together

if sys.argv[1] == "settled":
    settle_allocator()
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * (20 << 20) // 4096
"""Of all turns."""


def faults(state: str) -> int:
    """Pages that were touched anew, in a process of its own: this one's malloc has seen other tests."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, state]
    return int(subprocess.run(command, env=settings, stdout=subprocess.PIPE, timeout=120, check=True).stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults("settled") < PAGES / 20


def test_without_it_every_turn_touches_all_its_memory_anew() -> None:
    """Else the test above would hold whatever is done: then this allocator needs no settling."""
    assert faults("new") > PAGES / 2
