"""Progress of the workers after a failure, and the newest step to which all of them can come.

If a worker fails in a synchronous step, all remaining workers make the step or none of them does. The norm of the whole
model is complete only when every worker has all its gradients: each replica reports to its leader (first replica) that
it is ready, and leaders publish their norms after that (``reduction``). So once any worker has made a step, all others
have made it too, or are ready and can make it with the published norm. If no worker has made it, the step is repeated
on unchanged parameters.

    F F B B REDUCE_GRAD | REDUCE_NORM | STEP      |        0 made        1 made
    0 made              | 0 made, ready           | 1 made
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class WorkerProgress(NamedTuple):
    """Progress of a worker that was stopped.

    Attributes:
        steps: number of optimizer steps of the run that the worker has made, including skipped ones; None if it has
            begun no step since it loaded its state.
        ready: True if the worker has all gradients of the next step.
        totals: gradient norm of the whole model and loss of the worker's last step, scalars in host memory.
        overlapping: True if steps overlap, if stages clip by their own norms, or if the step in progress has changed
            some of the worker's parameters. The workers then have no common step without a rollback.
        changed: True if the step in progress has changed some of the worker's parameters.
    """

    steps: int | None = None
    ready: bool = False
    totals: tuple[torch.Tensor, torch.Tensor] | None = None
    overlapping: bool = False
    changed: bool = False


def all_hold(workers: Sequence[WorkerProgress], step: int) -> bool:
    """Return True if all workers hold the parameters after exactly ``step`` optimizer steps."""
    return all(worker.steps == step and not worker.changed for worker in workers)


def newest_common_step(
    workers: Sequence[WorkerProgress], step: int
) -> tuple[int, tuple[torch.Tensor, torch.Tensor] | None] | None:
    """Find the newest step that all workers can reach without a rollback; None if there is no such step.

    Args:
        step: number of steps made by the workers whose ``steps`` is None.

    Returns:
        (number of steps made, ``totals`` of a worker that has made them). The totals are None if no worker has any.
    """
    if any(worker.overlapping for worker in workers):
        return None
    steps = [step if worker.steps is None else worker.steps for worker in workers]
    newest = max(steps)
    at_newest = (worker.totals for worker, count in zip(workers, steps, strict=True) if count == newest)
    totals = next((x for x in at_newest if x is not None), None)
    for worker, count in zip(workers, steps, strict=True):
        if count < newest and not (count == newest - 1 and worker.ready and totals is not None):
            return None
    return newest, totals
