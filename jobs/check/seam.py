"""What the seam to devices costs on the CPU: processor time of its calls in a step, over that of the step.

    python jobs/check/seam.py

A small GPT trains on three stages in threads, as `fit(local=True)` does. Every call of the seam is counted in a few
steps; each kind is then timed by itself, with the arguments of one of its calls. What marks and values cost that were
taken before there was a seam is counted too. The aim is 0.5 % of a step. All is processor time, so that other work
counts little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import final_line, machine_line, median, table
from jobs.lib.on_device import gpt, pipeline, texts
from raypipe.engine.crossing import Crossing
from raypipe.engine.device import CPU, CpuDevice

OF_CROSSING = ("message", "named", "copied", "to_device", "to_host", "read", "two_parts_s")
OF_DEVICE = ("mark", "seconds", "prepare_thread", "record_stream", "wait", "finish")
STEPS, CALLS, ROUNDS = 4, 5000, 5
MOST = 0.005


class Counted:
    """Calls of functions by name, but for those that others of them make, and the last call of each."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.last: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}
        self._inside = threading.local()
        self._lock = threading.Lock()

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "yes", False):
                return function(*args, **kwargs)
            with self._lock:
                self.count[name] = self.count.get(name, 0) + 1
                self.last[name] = function, args, kwargs
            self._inside.yes = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.yes = False

        return call


def cost_s(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Processor seconds of one call."""
    found = []
    for _ in range(ROUNDS):
        begin_s = time.thread_time()
        for _ in range(CALLS):
            call(*args, **kwargs)
        found.append((time.thread_time() - begin_s) / CALLS)
    return median(found)


def main() -> int:
    """Count, time, and print the share."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder:
        config = {"num_stages": 3, "minibatch_size": 16, "num_microbatches": 8, "schedule": "1f1b"}
        with pipeline(gpt(128, 128, 6), texts(256, 128), Path(folder), lambda worker: CPU, **config) as (_, run):
            for _ in run(2):  # warm
                pass
            begin_s = time.process_time()
            for _ in run(STEPS):
                pass
            step_s = (time.process_time() - begin_s) / STEPS
            kept = [(owner, name, owner.__dict__[name]) for owner, names in
                    ((Crossing, OF_CROSSING), (CpuDevice, OF_DEVICE)) for name in names]  # fmt: skip
            try:
                for owner, name, held in kept:
                    function = counted.wrapped(name, getattr(owner, name))
                    setattr(owner, name, staticmethod(function) if isinstance(held, staticmethod) else function)
                for _ in run(STEPS):
                    pass
            finally:
                for owner, name, held in kept:
                    setattr(owner, name, held)
    rows, total_s = [], 0.0
    for name, count in counted.count.items():
        function, args, kwargs = counted.last[name]
        each_s = cost_s(function, args, kwargs)
        rows.append((name, count / STEPS, each_s * 1e6, count / STEPS * each_s * 1e3))
        total_s += count / STEPS * each_s
    title = f"a step takes {step_s * 1e3:.1f} ms of processor time; {machine_line()}"
    print(table(title, ("call", "in a step", "us each", "ms of a step"), rows))
    missed = [] if total_s <= MOST * step_s else ["share"]
    print(final_line("seam", {"share": total_s / step_s, "step_ms": step_s * 1e3, "seam_ms": total_s * 1e3}, missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
