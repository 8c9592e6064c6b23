"""What was compared, as a table for people.

candidates, with 4 workers:
  workers  kind               micro-batches     step    memory
      3-1  replicated stages         6 of 8  41.2 ms  53.0 MiB  <- chosen
        4  data parallelism         4 of 12    58 ms  61.5 MiB  41% longer
  1-1-1-1  pipeline                  8 of 6  91.3 ms  40.1 MiB  2.2 times as long
      2-2  replicated stages              -        -         -  stage 1 would need 80.1 MiB of 64.0 MiB
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.candidate import Candidate
from raypipe.ir.plan_table import human_bytes, human_s

__all__ = ["candidate_lines"]


def candidate_lines(found: Sequence[Candidate]) -> list[str]:
    """A table of them, in the order given."""
    best_s = min((each.step_s for each in found if each.chosen), default=0.0)
    rows = [("workers", "kind", "micro-batches", "step", "memory", "")]
    for each in found:
        shape = "-".join(map(str, each.workers))
        if each.refused:
            rows.append((shape, each.kind, "-", "-", "-", each.refused))
            continue
        longer = _longer(each.step_s / best_s) if best_s else ""
        parts = f"{each.num_microbatches} of {each.microbatch_size}"
        memory = human_bytes(each.memory_bytes)
        rows.append((shape, each.kind, parts, human_s(each.step_s), memory, "<- chosen" if each.chosen else longer))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        shape, kind, *numbers = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        lines.append("  ".join(["", shape, f"{kind.strip():<{widths[1]}}", *numbers, row[-1]]).rstrip())
    return ["candidates:", *lines]


def _longer(ratio: float) -> str:
    if ratio < 1.005:
        return "as long"
    return f"{ratio - 1:.0%} longer" if ratio < 2 else f"{ratio:.1f} times as long"
