"""Whether memory holds so many micro-batches of so many samples, asked often and answered from few cuts.

A stage's bytes grow with the samples that it has in flight, b x in_flight(depth) at each depth, and with the
messages of b samples. Whatever needs no more than something that fitted, fits; whatever needs no less than something
that did not, does not. Only in between is a cut looked for.
"""

from __future__ import annotations

from collections.abc import Callable

from raypipe.errors import PlanError
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.limits import Limits

__all__ = ["memory_test"]


def memory_test(
    cut: Callable[[Limits], object], limits_of: Callable[[int, int], Limits], depth: int, minibatch_size: int
) -> Callable[[int, int], bool]:
    """The test, (micro-batches, samples) -> bool.

    Args:
        cut: finds some cut within limits, or raises PlanError.
        limits_of: for (micro-batches, samples).
        depth: of the first stage.
    """
    good: list[tuple[int, ...]] = []
    bad: list[tuple[int, ...]] = []

    def fits(count: int, samples: int) -> bool:
        limits = limits_of(count, samples)
        need = _need(limits.memory, depth)
        if any(all(a <= b for a, b in zip(need, known, strict=True)) for known in good):
            return True
        if any(all(a >= b for a, b in zip(need, known, strict=True)) for known in bad):
            return False
        try:
            cut(limits)
        except PlanError:
            bad.append(need)
            return False
        good.append(need)
        return True

    low, high = 0, minibatch_size + 1  # halving first makes the answers that follow free
    while high - low > 1:
        middle = (low + high) // 2
        if fits(-(-minibatch_size // middle), middle):
            low = middle
        else:
            high = middle
    return fits


def _need(memory: MemoryModel, depth: int) -> tuple[int, ...]:
    size = memory.microbatch_size
    depths = range(1, depth + 1)
    held = [count(d) for d in depths for count in (memory.activation_sets, memory.in_flight)]
    return (size * memory.message_slots, *(size * count for count in held))
