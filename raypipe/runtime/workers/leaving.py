"""After a failure: every worker leaves its work, so that it can be given a state and links anew.

abort --> waits of the segment end --> work() ends        within settle_s(), else the worker is stuck, and is ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypipe.errors import LeaseError
from raypipe.runtime.workers.roster import Member, end_member

__all__ = ["leave_work", "settle_s"]

SETTLE_S, ANSWER_S = 10.0, 10.0
"""How long a worker may compute what it has begun, and then answer nothing on a busy machine, before it is taken for
stuck. To end one that is healthy would lose its copies of state."""
SETTLE_TIMES = 2.0
"""Of the longest action so far, which nobody can break off."""


def settle_s(workers: Sequence[Member], planned_s: float) -> float:
    """How long these may take to leave their work.

    Args:
        planned_s: that the longest action of a step takes by the plan; 0 without one.
    """
    longest_s = max((member.pulse.longest_s for member in workers if member.pulse is not None), default=0.0)
    return max(SETTLE_S, SETTLE_TIMES * max(longest_s, planned_s))


def leave_work(
    workers: Sequence[Member], works: Mapping[Any, int], term: int, links: int, planned_s: float = 0.0
) -> None:
    """Have workers leave their work; those that are dead or stuck are ended, and lost.

    Args:
        works: their calls of ``work`` that have not been seen to end, with the worker.
        term: of the driver.
        links: number of the links that they have.
        planned_s: see ``settle_s``.

    Raises:
        LeaseError: a later driver has taken them over.
    """
    ray.wait(list(works), num_returns=len(works), timeout=settle_s(workers, planned_s)) if works else None
    asked = {worker: member for worker, member in enumerate(workers) if member.actor is not None}
    leaving = {w: member.actor.abort.remote(term, links, "the run recovers") for w, member in asked.items()}
    ray.wait(list(leaving.values()), num_returns=len(leaving), timeout=ANSWER_S) if leaving else None
    over = {worker for ref, worker in works.items() if not ray.wait([ref], timeout=0)[0]}
    for worker, ref in leaving.items():
        try:
            ray.get(ref, timeout=0)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), LeaseError):
                raise cause from None
            over.add(worker)  # it is dead, or does not answer
    for worker, member in asked.items():  # once nobody has said that another driver took the run over
        if worker in over or member.lost:
            end_member(member)
