"""One more size, where a plan takes micro-batches far beyond those that were measured.

    profile: 1, 2, 4, 8 --> plan: one of 32 --> measure 8 and 32 in turns --> profile: 1, 2, 4, 8, 32 --> plan again

A line through small sizes says little of large ones, whose matrices fill the processor better: VGG-16 takes a tenth to
a quarter less at 32 than the line through 1 to 8. And not all operations alike: at 16 its first linear layers take 0.80
and 0.52 of what their lines say, convolutions 1.02, so operations are measured at that size too, or the cut would be
for other seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from contextlib import suppress
from pathlib import Path

from raypipe.engine.capture import Capture
from raypipe.engine.local import one_thread
from raypipe.engine.profiling.measure import Bench, Progress, settle_allocator
from raypipe.engine.profiling.rounds import seconds_of
from raypipe.engine.profiling.steps import Columns, first_of, samples_of
from raypipe.ir.profile import Profile

__all__ = ["is_far", "measure_further"]

FAR = 1.5
"""Times the largest size that was measured; up to there the line is followed."""
LONG_S = 5.0
"""A round that takes longer is the last, once there is one to count."""
MOST_MEMORY = 0.5
"""Of the memory that is free, what a micro-batch may take to be measured."""


def is_far(profile: Profile, samples: int) -> bool:
    """Whether so many samples are more than was measured says anything of."""
    return samples > FAR * max((profile.microbatch_size, *(size for size, _ in profile.seconds_by_size)))


def measure_further(
    captured: Capture, profile: Profile, columns: Columns, *, repeats: int = 3, progress: Progress | None = None
) -> Profile:
    """The profile with the seconds of one more size, whole and by operation, as they are beside the largest known one.

    Args:
        columns: one micro-batch of that size by column, targets included.
        repeats: rounds whose median is taken, after one to warm up.
        progress: called with (done, total) rounds.

    Returns:
        the same with a note where it cannot be measured, or takes more memory than there is to spare here.
    """
    samples, (known, known_s) = samples_of(columns), profile.seconds_by_size[-1]
    needed_bytes = samples * sum(node.activation_bytes for node in profile.graph.nodes)
    if needed_bytes > MOST_MEMORY * _free_bytes():
        return _noted(profile, samples, "a micro-batch of that size takes more memory than is free here")
    part, ratios, rounds = first_of(columns, known), [], []
    try:
        settle_allocator()
        with one_thread():
            bench = Bench.of(captured)
            for done in range(repeats + 1):
                begin_s = time.perf_counter()
                # In turns, so that a machine that has become slower or quicker since changes nothing; the first pass
                # behind one of another size takes longer.
                bench.whole(part)
                before_s = sum(bench.whole(part))
                ratios.append(sum(bench.whole(columns)) / before_s)
                rounds.append(bench.round(columns))
                if progress is not None:
                    progress(done + 1, repeats + 1)
                if time.perf_counter() - begin_s > LONG_S and done:
                    break
    except Exception as error:  # noqa: BLE001  (the user's code, at a size that nobody asked for)
        return _noted(profile, samples, f"{type(error).__name__}: {error}")
    seconds = known_s * statistics.median(ratios[1:])
    by_operation = seconds_of(rounds[1:]).by_operation()
    factor = seconds / sum(by_operation)
    return dataclasses.replace(
        profile,
        seconds_by_size=(*profile.seconds_by_size, (samples, seconds)),
        large=(samples, tuple(factor * own_s for own_s in by_operation)),
    )


def _noted(profile: Profile, samples: int, why: str) -> Profile:
    note = f"Micro-batches of {samples} could not be measured: {why}."
    return dataclasses.replace(profile, notes=(*profile.notes, note))


def _free_bytes(root: Path = Path("/")) -> float:
    """What this machine, or the container that this is, has left; infinite where nobody tells."""
    free = [math.inf]
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(1024.0 * int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        group = root / "sys/fs/cgroup"
        free.append(float(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())))
    return min(free)
