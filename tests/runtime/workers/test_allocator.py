"""Freed memory stays with a stage's process, unless somebody has settled that otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from raypipe.runtime.workers.allocator import keep_freed_memory

CHURN = """
import json, resource, sys, threading
import torch
from raypipe.runtime.workers.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
found = []

def work():  # as stages do, in another thread than the first
    for turn in range(20):
        if turn == 10:
            found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
        held = [torch.ones(size << 20) for size in (1, 3, 2, 6, 1)]
        del held
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps([kept, found[1] - found[0]]))
"""


def churned(how: str) -> tuple[bool, int]:
    """Whether memory is kept, and pages that were entered anew while 52 MiB were taken and given back ten times."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", CHURN, how], env=plain, capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = json.loads(done.stdout.splitlines()[-1])
    return kept, pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_what_was_freed_is_not_entered_anew() -> None:
    kept, pages = churned("keep")
    if not kept:
        pytest.skip("another allocator than glibc's")
    _, before = churned("leave")
    assert pages < before / 10


def test_what_the_environment_says_stays() -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert not keep_freed_memory({name: "1"})
