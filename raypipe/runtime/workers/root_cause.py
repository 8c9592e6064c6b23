"""Which of several failures explains the others: one stage fails, and its neighbours' links end because of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from raypipe.errors import LinkAbortedError, LinkError, RanOut, RaypipeError, StageError, StageLostError
from raypipe.planner.liveness import Finding

__all__ = ["root_cause", "with_traceback"]


def root_cause(
    works: Mapping[Any, int], names: Sequence[str], segments: int, explain: Callable[[int, str], Finding]
) -> RaypipeError:
    """The failure nearest to the root: the user's error, then a death, a broken link, an abort, a stage that hangs.

    Of several as near, that of the last worker: a loss that is not finite makes every stage's gradients so, and it
    knows the loss.

    Args:
        works: reference to each worker's long call -> worker; all have ended, or have had the time to.
        names: of the workers, for people.
        segments: that every stage has carried out, for the message.
        explain: (worker, what Ray says) -> why a worker is lost that Ray says is dead.
    """
    gone = (5, StageLostError("A stage died after its last segment, before its reports were fetched."))
    from_last = sorted(works.items(), key=lambda item: -item[1])
    found = (_failure(ref, worker, names[worker], segments, explain) for ref, worker in from_last)
    return min(filter(None, found), key=lambda item: item[0], default=gone)[1]


def _failure(
    ref: Any, worker: int, name: str, segments: int, explain: Callable[[int, str], Finding]
) -> tuple[int, RaypipeError] | None:
    """How a worker's long call failed, and how far from the root that is; None where it ended well."""
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return 4, LinkError(f"{name} did not stop after another stage's failure.")
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, LinkAbortedError):
            return 3, cause
        if isinstance(cause, LinkError):
            return 2, cause
        return 0, cause if isinstance(cause, RaypipeError) else StageError(f"{name} failed: {error}")
    except ActorDiedError as error:
        found = explain(worker, str(error))
        how = "died" if found.means == "died" else "hung"
        lost = StageLostError(f"{name} {how} after {segments} segments of this run: it {found.why}")
        lost.raised_at_s = time.time() - found.after_s
        if found.ran_out_bytes is not None:
            lost.ran_out = RanOut(worker, found.ran_out_bytes)
        return 1, lost
    except RayActorError as error:
        first = str(error).splitlines()[0]
        return 1, StageLostError(f"{name} could not be reached after {segments} segments of this run: {first}")
    return None


def with_traceback(error: RaypipeError) -> str:
    """The sentence, and below it the traceback through the user's code where there is one."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n\n{''.join(traceback.format_exception(error.__cause__))}"
