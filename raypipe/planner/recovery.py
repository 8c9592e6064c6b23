"""Where a run can go back to: the newest step of which every stage's state is somewhere.

stage 0   worker 0: 20, 21                        step 21 lacks stage 1, so all go back to 20:
stage 1   (lost)        worker 0 holds: 20        stage 0 from worker 0, stage 1 from worker 0
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

__all__ = ["Copy", "newest_common"]


class Copy(NamedTuple):
    """Copies of one stage's state that one process has.

    Attributes:
        holder: the process.
        steps: after which there is a whole copy.
    """

    holder: Any
    stage: int
    steps: tuple[int, ...]


def newest_common(
    copies: Iterable[Copy], num_stages: int, steps: Collection[int]
) -> tuple[int, dict[int, Copy]] | None:
    """(step, by stage the first copy that has it) of the newest step that all stages can go back to; None without one.

    Args:
        copies: those that are to be preferred first, such as a stage's own before another worker's.
        steps: that count: those of which the run knows all that it has to.
    """
    if not num_stages:
        return None
    by_stage: dict[int, list[Copy]] = {stage: [] for stage in range(num_stages)}
    for copy in copies:
        if copy.stage in by_stage:
            by_stage[copy.stage].append(copy)
    common = set(steps).intersection(
        *({step for copy in of_stage for step in copy.steps} for of_stage in by_stage.values())
    )
    if not common:
        return None
    step = max(common)
    return step, {stage: next(c for c in of_stage if step in c.steps) for stage, of_stage in by_stage.items()}
