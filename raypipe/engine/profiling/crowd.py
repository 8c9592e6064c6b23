"""What workers on one machine cost each other: the other half of a core, caches, memory, and being sent away.

    neighbours        ~~~~~~~      ~~~~~~~      ~~~~~~~
    whole model  ####  #####  ####  #####  ####  #####  ####        processor seconds, each against those around it

Virtual processors are often the two halves of one core: both at once are then slower by a tenth to a half, where a lone
process notices nothing. Processor seconds are what counts: that more workers than processors also wait for each other
is not in them. Neighbours are plain processes with matrix products and a stream through memory; they stand for stages,
and end with the pipe that they listen to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from raypipe.engine.capture import Capture
from raypipe.engine.local import one_thread
from raypipe.engine.profiling.measure import Bench, Progress, settle_allocator
from raypipe.engine.profiling.steps import Columns, first_of
from raypipe.ir.profile import Profile

__all__ = ["matters", "measure_crowd", "neighbours", "num_processors"]

LEAST_S = 0.02
"""Seconds of a micro-batch below which nobody asks what the neighbours cost."""
BLOCK_S = 0.1
"""The model runs again and again for at least so long: many turns of the scheduler."""
LONG_S = 0.3
"""Of models whose micro-batch takes longer a smaller one is run, where it is known."""
REPEATS = 4
SETTLE_S = 0.02
START_S = 20.0
WAITS = 0.5
"""Of the clock's seconds; who computes for less of them waits for something that neighbours do not make longer."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def num_processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Neighbours:
    """Processes that compute when they are told to."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def compute(self, yes: bool) -> None:
        """Begin, or rest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"1\n" if yes else b"0\n")
            process.stdin.flush()
        time.sleep(SETTLE_S)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[Neighbours]:
    """So many processes, at rest; none is left behind.

    Raises:
        OSError: they cannot be started, or do not begin in time.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("there is no Python to run them with")
    command = [sys.executable, "-P", str(Path(__file__).with_name("neighbour.py"))]
    with contextlib.ExitStack() as ends:
        started = []
        for _ in range(count):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
            )
            ends.callback(_end, process)
            started.append(process)
        until_s = time.monotonic() + START_S
        for process in started:
            assert process.stdout is not None
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                ready = waiting.select(max(0.0, until_s - time.monotonic()))
            if not ready or not process.stdout.readline():
                raise OSError("a process to compare with did not begin")
        yield Neighbours(started)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # what was not yet flushed
        process.communicate()


def matters(profile: Profile, processes: int) -> bool:
    """Whether it is worth asking what so many workers on this machine cost each other."""
    known = (count for count, _ in profile.crowd)
    seconds = profile.forward_s + profile.backward_s
    return processes > 1 and processes not in known and profile.source == "measured" and seconds >= LEAST_S


def measure_crowd(
    captured: Capture, profile: Profile, columns: Columns, processes: int, *, progress: Progress | None = None
) -> Profile:
    """The profile with what a micro-batch takes beside so many others, over what it takes alone.

    Args:
        columns: one micro-batch by column, targets included.
        processes: that compute at once, this one among them.
        progress: called with (done, total) blocks.

    Returns:
        the same with a note where that fails, say because no process can be started; 1.0 of a model that waits more
        than it computes.
    """
    size, whole_s = _size(profile)
    part = first_of(columns, size)
    alone, beside = [], []
    try:
        settle_allocator()
        with one_thread(), neighbours(processes - 1) as others:
            bench = Bench.of(captured)
            _block_s(bench, part)  # to warm up
            for done in range(REPEATS):
                alone.append(_block_s(bench, part))
                others.compute(True)
                beside.append(_block_s(bench, part))
                others.compute(False)
                if progress is not None:
                    progress(done + 1, REPEATS)
            alone.append(_block_s(bench, part))
    except Exception as error:  # noqa: BLE001  (a plan can be made without)
        note = f"What {processes} workers on this machine cost each other could not be measured: {error}."
        return dataclasses.replace(profile, notes=(*profile.notes, note))
    factor = _factor(alone, beside) if statistics.median(alone) > WAITS * whole_s else 1.0
    return dataclasses.replace(profile, crowd=tuple(sorted({*profile.crowd, (processes, factor)})))


def _size(profile: Profile) -> tuple[int, float]:
    """The largest size that does not take long, and its seconds; the smallest that is known where all do."""
    known = [one for one in profile.seconds_by_size if one[0] <= profile.microbatch_size]
    known = known or [(profile.microbatch_size, profile.forward_s + profile.backward_s)]
    return max((one for one in known if one[1] <= LONG_S), default=min(known))


def _factor(alone: Sequence[float], beside: Sequence[float]) -> float:
    """Of blocks beside others over the mean of the two around each; a neighbour makes nobody quicker."""
    ratios = [2 * there / (before + after) for there, (before, after) in zip(beside, pairwise(alone), strict=True)]
    return max(1.0, statistics.median(ratios))


def _block_s(bench: Bench, columns: Columns) -> float:
    """Processor seconds of one micro-batch, the mean of as many as fill a block."""
    begin_s, cpu_s, count = time.perf_counter(), time.thread_time(), 0
    while not count or time.perf_counter() - begin_s < BLOCK_S:
        bench.whole(columns)
        count += 1
    return (time.thread_time() - cpu_s) / count
