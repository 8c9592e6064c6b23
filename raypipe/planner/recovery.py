"""Where a run can go back to: the newest step of which every stage's state is somewhere; or who alone goes back.

stage 0   worker 0: 20, 21                        step 21 lacks stage 1, so all go back to 20:
stage 1   (lost)        worker 0 holds: 20        stage 0 from worker 0, stage 1 from worker 0

Replicas that share out the state of their optimizer have a piece of their stage's copy each, besides what all have:

stage 0   worker 0: 20, 21   slices of 0: 20, 21      step 20 has all pieces, though nobody is left who stepped slices 1
          (lost)             worker 2 holds slices of 1: 20

    all have made, or can make, step 27           worker 1's copy after 20; what worker 0 sent it in 20 ... 26
    roll back    steps 20 ... 26 by all           7 steps of the pipeline
    replay       steps 20 ... 26 by worker 1      7 times what worker 1 computes in a step, or the messages' way to it

A worker is replayed on the messages that its neighbours have logged, and nobody else goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Copy", "Log", "Lost", "Replay", "StepTimes", "lacking", "newest_common", "replay_or_why_not"]

FETCHED_BYTES_S = 200e6
"""Of logged messages, on their way to who is replayed: half of what a copy of state was measured at (0038)."""


class Copy(NamedTuple):
    """Copies of one stage's state that one process has, or of a piece of it.

    Attributes:
        holder: the process.
        steps: after which there is a whole copy.
        piece: 0 for what all replicas have alike, which is all where they share nothing out; n for slices of the n-th.
        pieces: how many with slices belong to a copy.
    """

    holder: Any
    stage: int
    steps: tuple[int, ...]
    piece: int = 0
    pieces: int = 0


def newest_common(
    copies: Iterable[Copy], num_stages: int, steps: Collection[int]
) -> tuple[int, dict[int, tuple[Copy, ...]]] | None:
    """(step, by stage the copies that have it) of the newest step that all stages can go back to; None without one.

    Of each piece it is the first copy that has the step: one copy for a stage that is in one piece.

    Args:
        copies: those that are to be preferred first, such as a stage's own before another worker's.
        steps: that count: those of which the run knows all that it has to.
    """
    by_piece = _by_piece(copies, num_stages)
    common = set(steps).intersection(
        *({step for copy in of_piece for step in copy.steps} for of_piece in by_piece.values())
    )
    if not by_piece or not common:
        return None
    step = max(common)
    first = {key: next(copy for copy in of_piece if step in copy.steps) for key, of_piece in by_piece.items()}
    return step, {
        stage: tuple(copy for (of, _), copy in sorted(first.items()) if of == stage) for stage in range(num_stages)
    }


def lacking(copies: Iterable[Copy], num_stages: int) -> str:
    """Of what nobody has a copy of any step, for people; "" where there are some of everything."""
    for (stage, piece), of_piece in sorted(_by_piece(copies, num_stages).items()):
        if not any(copy.steps for copy in of_piece):
            whose = f"the slices of replica {piece - 1} of stage {stage}" if piece else f"the state of stage {stage}"
            return f"nobody that is left has {whose}"
    return ""


def _by_piece(copies: Iterable[Copy], num_stages: int) -> dict[tuple[int, int], list[Copy]]:
    """By stage and piece, the copies that there are of all that make up the state of so many stages."""
    found: dict[tuple[int, int], list[Copy]] = {(stage, 0): [] for stage in range(num_stages)}
    here = [copy for copy in copies if copy.stage < num_stages]
    for copy in here:
        found |= {(copy.stage, n): [] for n in range(1, copy.pieces + 1) if (copy.stage, n) not in found}
    for copy in here:
        found.setdefault((copy.stage, copy.piece), []).append(copy)
    return found


class Lost(NamedTuple):
    """A worker that was lost.

    Attributes:
        peers: workers that it exchanges messages with.
        copies: steps after which somebody has a copy of all of its stages.
    """

    peers: frozenset[int]
    copies: Collection[int]


class Log(NamedTuple):
    """What a worker that lives has kept of what it sent.

    Attributes:
        steps: that lie there whole; nothing where the worker keeps none.
        bytes_to: by worker, of all these steps.
    """

    steps: range
    bytes_to: Mapping[int, int]


class StepTimes(NamedTuple):
    """What a step takes, as far as it was measured; 0 where it was not.

    Attributes:
        step_s: of the pipeline.
        busy_s: by worker, of what it computes.
    """

    step_s: float = 0.0
    busy_s: Mapping[int, float] = {}


class Replay(NamedTuple):
    """Workers that were lost do steps again, and nobody else does.

    Attributes:
        step: to which they come.
        begins: by lost worker, the step whose copy it begins with.
        seconds: that this should take, and ``redone_s`` that all going back should; 0 where nothing was measured.
    """

    step: int
    begins: Mapping[int, int]
    seconds: float
    redone_s: float


def replay_or_why_not(
    step: int, lost: Mapping[int, Lost], logs: Mapping[int, Log], back: int | None, times: StepTimes
) -> Replay | str:
    """How those that were lost come to the step of the others, or why all are to go back instead, for people.

    Where nobody was lost, only links, there is nothing to be replayed, and nobody goes back.

    Args:
        step: steps that every worker that lives has made, or can make.
        lost: by worker.
        logs: of workers that live.
        back: the newest step to which all could go back; None where that is a checkpoint.
    """
    begins: dict[int, int] = {}
    fetched_bytes, seconds = 0.0, 0.0
    for worker, one in sorted(lost.items()):
        if also := sorted(one.peers & lost.keys()):
            return f"workers {worker} and {also[0]}, which exchange messages, were lost together"
        newest = max((at for at in one.copies if at <= step), default=None)
        if newest is None:
            return f"nobody has a copy of what worker {worker} held"
        wanted = range(newest, step)
        for peer in sorted(one.peers) if wanted else ():
            log = logs.get(peer, Log(range(0), {}))
            if not log.steps or log.steps[0] > newest or log.steps[-1] < step - 1:
                return _not_in_log(worker, peer, wanted, log)
            fetched_bytes += log.bytes_to.get(worker, 0) * len(wanted) / len(log.steps)
        begins[worker] = newest
        # Where processes share processors, one is said to compute for longer than the step took.
        busy_s = times.busy_s.get(worker, 0.0)
        seconds = max(seconds, len(wanted) * (min(busy_s, times.step_s) if times.step_s else busy_s))
    seconds = max(seconds, fetched_bytes / FETCHED_BYTES_S)  # the next step's come while one is done
    redone_s = times.step_s * (step - (back or 0))
    if times.step_s and seconds > redone_s:
        return f"replaying would take {seconds:.2f} s, and the steps of all {redone_s:.2f} s"
    return Replay(step, begins, seconds, redone_s)


def _not_in_log(worker: int, peer: int, wanted: range, log: Log) -> str:
    """Which of the steps that a worker has to do again its neighbour has kept no messages of, for people."""
    kept = f"steps {log.steps[0]} to {log.steps[-1]}" if log.steps else "no step"
    return (
        f"worker {worker} would need what worker {peer} sent in steps {wanted[0]} to {wanted[-1]}, and the log "
        f"there has {kept}"
    )
