"""Failures of workers: ends the work of the others, finds the root cause, and describes how a process ended.

          abort --> waits for messages end --> work() ends     within settle_s(), else the worker is killed as stuck
fence --> abort --> ...                                        by a later driver, which adopts the workers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raypipe.errors import (
    LESS_MEMORY,
    LeaseError,
    LinkAbortedError,
    LinkError,
    RanOut,
    RaypipeError,
    StageError,
    StageLostError,
)
from raypipe.ir.units import human_bytes
from raypipe.planner.liveness import Diagnosis
from raypipe.runtime.fleet.roster import Member, end_member, results
from raypipe.runtime.nodes.node_watch import Ended
from raypipe.runtime.worker.orders import Attached

SETTLE_S, ANSWER_S = 10.0, 10.0
"""Seconds after which a worker counts as stuck: minimum for an action (such as a forward), and limit for the answer to
a call. Both are long, because killing a healthy worker would lose its copies of state."""
ADOPTED = "being adopted by another driver"
SETTLE_TIMES = 2.0
"""Time to finish an action, which cannot be interrupted, as a multiple of the longest action so far."""


def settle_s(workers: Sequence[Member], planned_s: float) -> float:
    """Return the seconds that these workers may take to end their work before they count as stuck.

    Args:
        planned_s: predicted seconds of a step's longest action; 0 without a prediction.
    """
    longest_s = max((member.heartbeat.longest_s for member in workers if member.heartbeat is not None), default=0.0)
    return max(SETTLE_S, SETTLE_TIMES * max(longest_s, planned_s))


def leave_work(
    workers: Sequence[Member], works: Mapping[Any, int], term: int, links: int, planned_s: float = 0.0
) -> None:
    """Have workers end their calls of ``StageActor.work``; kill workers that do not end them, and mark these lost.

    Args:
        works: reference of each call of ``work`` that may still be running -> number of its worker.
        term: number of this driver, which grows with each driver of the run.
        links: number of the workers' links; see StageActor.configure.
        planned_s: see ``settle_s``.

    Raises:
        LeaseError: a later driver has taken the workers over.
    """
    ray.wait(list(works), num_returns=len(works), timeout=settle_s(workers, planned_s)) if works else None
    living = {worker: member for worker, member in enumerate(workers) if member.actor is not None}
    leaving = {w: member.actor.abort.remote(term, links, "the run recovers") for w, member in living.items()}
    ray.wait(list(leaving.values()), num_returns=len(leaving), timeout=ANSWER_S) if leaving else None
    over = {worker for ref, worker in works.items() if not ray.wait([ref], timeout=0)[0]}
    for worker, ref in leaving.items():
        try:
            ray.get(ref, timeout=0)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), LeaseError):
                raise cause from None
            over.add(worker)  # it is dead, or does not answer
    for worker, member in living.items():  # only after no worker reported that another driver took the run over
        if worker in over or member.lost:
            end_member(member)


def adopted(members: Sequence[Member], term: int) -> list[tuple[Member, Attached]]:
    """Take over members of a lost driver: have them obey this driver only, and end their work.

    Members that do not answer or do not end their work are killed and marked lost.

    Args:
        term: number of this driver, higher than the number of the lost driver.

    Returns:
        (member, numbers from its previous driver) of each member that was taken over.

    Raises:
        LeaseError: a driver of a higher term has adopted a member.
    """
    fenced = []
    for member in members:
        try:
            fenced.append((member, *results([member.actor.fence.remote(term)], ANSWER_S, ADOPTED)))
        except StageError:  # it is dead, or does not answer
            end_member(member)
    patience_s = settle_s(members, planned_s=0.0)
    left = []
    for member, attached in fenced:
        try:
            results([member.actor.abort.remote(term, attached.links, "its driver was lost")], ANSWER_S, ADOPTED)
            left.append((member, attached, member.actor.reached.remote(term)))  # runs once its work has ended
        except StageError:
            end_member(member)
    adopted_members = []
    for member, attached, over in left:
        try:
            results([over], patience_s + ANSWER_S, ADOPTED)
            adopted_members.append((member, attached))
        except StageError:
            end_member(member)
    return adopted_members


def root_cause(
    works: Mapping[Any, int], names: Sequence[str], segments: int, explain: Callable[[int, str], Diagnosis]
) -> RaypipeError:
    """Return the failure that caused the failures of the other workers.

    There are five kinds of failures, here with the likeliest cause first: an error in a stage, such as the user's; a
    death; a broken link; an aborted link; a worker that does not stop. The first kind that occurred is returned. If
    several workers have failures of this kind, that of the highest worker number is returned: if the loss is not
    finite, the gradients of all stages are not finite either, but only the last worker has the loss.

    Args:
        works: reference of each call of ``work`` -> number of its worker; a running call counts as not stopping.
        names: names of the workers for messages, by worker.
        segments: number of segments that every worker has completed, for the message.
        explain: called with (worker, Ray's message) to find out why a worker died.
    """
    gone = (5, StageLostError("A stage died after its last segment, before its reports were fetched."))
    from_last = sorted(works.items(), key=lambda item: -item[1])
    failures = (_failure(ref, worker, names[worker], segments, explain) for ref, worker in from_last)
    return min(filter(None, failures), key=lambda item: item[0], default=gone)[1]


def _failure(
    ref: Any, worker: int, name: str, segments: int, explain: Callable[[int, str], Diagnosis]
) -> tuple[int, RaypipeError] | None:
    """Return (rank, failure) of a worker's call of ``work``; None if the call succeeded.

    The rank is the position in the list of ``root_cause``: 0 is the likeliest cause. ``segments`` and ``explain`` are
    as in ``root_cause``.
    """
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
        finding = explain(worker, str(error))
        how = "died" if finding.failure == "died" else "hung"
        lost = StageLostError(f"{name} {how} after {segments} segments of this run: it {finding.why}")
        lost.raised_at_s = time.time() - finding.after_s
        if finding.ran_out_bytes is not None:
            lost.ran_out = RanOut(worker, finding.ran_out_bytes)
        return 1, lost
    except RayActorError as error:
        first = str(error).splitlines()[0]
        return 1, StageLostError(f"{name} could not be reached after {segments} segments of this run: {first}")
    return None


_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")

_MONITOR = "running low on memory"
"""Text by which a message of Ray's memory monitor is recognized."""


def ran_out_bytes(ended: Ended | None, message: str) -> int | None:
    """Return the resident bytes of a process that was killed for lack of memory; None if it ended in another way.

    The result is 0 if the bytes are unknown. For the arguments see ``ending``.
    """
    if _MONITOR in message:
        return 0 if ended is None else ended.resident_bytes
    return ended.resident_bytes if ended is not None and ended.out_of_memory else None


def ending(ended: Ended | None, message: str, host: str) -> str:
    """Describe how a process ended, with a remedy: the end of a sentence that begins with the stage's name.

    Args:
        ended: end of the process as the watcher of its node saw it; None if unknown.
        message: Ray's message about the actor's death.
        host: name of the node.
    """
    if _MONITOR in message:
        return f"was killed by Ray's memory monitor on {host}, which ran out of memory. {LESS_MEMORY}"
    if ended is None:
        if "node has died" in message or "node died" in message:
            return f"was lost with its node {host}: Ray has lost contact with it. Look at that machine."
        return f"died on {host}: {_first_line(message)}"
    if ended.out_of_memory:
        return (
            f"was killed by the kernel's OOM killer on {host} while it held {human_bytes(ended.resident_bytes)}: there "
            f"was no memory left. {LESS_MEMORY}"
        )
    if ended.signal == "SIGKILL":
        return (
            f"was killed by SIGKILL on {host}, and not by the kernel's OOM killer: a user, a scheduler's "
            "limit or the node's shutdown ended it. Look for the sender."
        )
    if ended.signal in _CRASHES:
        return (
            f"crashed with {ended.signal} on {host}: native code of the model or of a library is at fault. Ray's log "
            "of that process (worker-*.err in its session's logs) has the stack."
        )
    if ended.signal:
        return f"was ended by {ended.signal} on {host}. Look who sent it."
    if ended.status is not None:
        return (
            f"exited with status {ended.status} on {host}: something in it called exit, or Ray ended it "
            f"({_first_line(message)})"
        )
    return f"died on {host}: {_first_line(message)}"


def _first_line(message: str) -> str:
    """Return the cause from Ray's message about a death: the first line that is not indented and not the heading."""
    for line in message.splitlines():
        if not line.startswith(("\t", "The actor died unexpectedly")):
            return line.strip()
    return (message.splitlines() or ["the reason is unknown."])[0].strip()
