"""Failover of a driver: the next driver takes over the stages of a lost one, and a driver leaves a node that drains.

driver 1  --Charter--> every stage        the driver's inputs and plan, in the stages' memory only: no file is unpickled
   x                                      driver 1 is lost
driver 2  <--find_left-- any living stage
          same settings: adopts the stages, which roll back to their newest common copies    (Fleet.adopt)
          other settings: has the stages save a checkpoint of these copies and end, and resumes from it

If the driver's own node is about to go, with or without stages on it, the driver

moves    normally: first the stages move away from the node; after a step the driver ends, Ray restarts it on another
         node, and the restarted driver adopts the stages
stays    if the run survives no failures, on the head node, or if Ray would restart the driver on the same node: the
         driver saves a checkpoint at once, and another one shortly before the node goes

Otherwise the driver would die with its node, and the stages would wait until Ray's health checks notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from raypipe.engine.io.checkpoint import newest_step
from raypipe.errors import StageError
from raypipe.run.plans.blueprint import Blueprint, Charter
from raypipe.run.requests import Requests
from raypipe.run.same_run import compare, goes_on
from raypipe.run.spec import RunSpec
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Member, end_member
from raypipe.runtime.nodes.preemption import DrainWatch
from raypipe.runtime.worker.packing import StoredTensors, stored
from raypipe.runtime.worker.places import living, release_orphans, release_unused

ASK_S = 10.0
POLL_S = 0.5
FIND_S = 60.0
"""Seconds for which a restarted driver waits for an answer of any stage, as long as Ray lists living stages."""

NOTHING_LEFT = (
    "The driver of this run was lost, and no stage outlived it that knows the run. Start the run again under the same "
    "name; it goes on from its newest checkpoint."
)


class Submission(NamedTuple):
    """Argument of ``DriverActor.run``.

    Attributes:
        charter: the driver's inputs, with the first plan.
        tensors: initial parameters and buffers; each worker fetches those of its stages.
    """

    charter: Charter
    tensors: StoredTensors


class Left(NamedTuple):
    """Stages and inputs that a lost driver has left on the cluster.

    Attributes:
        roster: stage actors that have answered and have opened their ports, so that they may be part of the run.
        charter: inputs of the lost driver, with its last plan.
        tensors: initial tensors of the run that are in no checkpoint.
        starting: stage actors that have answered, but have not opened their ports yet, so that they are not part of it.
    """

    roster: list[Member]
    charter: Charter
    tensors: StoredTensors
    starting: list[Member]

    def end_starting(self, owner: str) -> None:
        """End the actors in ``starting``; remove the placement groups of driver ``owner`` without a living actor."""
        for member in self.starting:
            end_member(member)
        release_unused(owner)


def find_left(owner: str, patience_s: float = 0.0) -> Left | None:
    """Find the stages and the Charter (inputs and plan) of the lost driver of this name.

    Returns None if no stage has a Charter. Waits up to ``patience_s`` for a Charter, as long as Ray lists living
    stages, because a broken network link may delay their answers.
    """
    deadline_s = time.monotonic() + patience_s
    while (left := _answered(owner)) is None and time.monotonic() < deadline_s and living(owner):
        time.sleep(POLL_S)
    return left


def known_to_stages(owner: str) -> Blueprint:
    """Return the blueprint (settings) of a restarted driver's run, as stored on its stages.

    If no stage returns a blueprint within FIND_S, all stages of the driver are ended, since they are useless then.

    Args:
        owner: name of the driver.

    Raises:
        StageError: no living stage has the blueprint.
    """
    left = find_left(owner, FIND_S)
    if left is None:
        release_orphans(owner)  # stages that were starting, without a charter
        raise StageError(NOTHING_LEFT)
    return left.charter.blueprint


def _answered(owner: str) -> Left | None:
    """Fetch facts and Charter of the living stages of the driver of this name.

    Returns None if no stage answers with a Charter.
    """
    roster = [Member(actor, place, number=number) for number, (actor, place) in living(owner).items()]
    calls = [(member.actor.facts.remote(), member.actor.charter.remote()) for member in roster]
    answered, starting, stored_charter = [], [], None
    for member, call in zip(roster, calls, strict=True):
        try:
            facts, (packed, setup, tensors) = ray.get(list(call), timeout=ASK_S)
        except RayError:  # ends when its lease expires, which is no longer renewed
            continue
        if facts is None:
            starting.append(member)
            continue
        member.facts = facts
        answered.append(member)
        if packed and setup is not None and stored_charter is None:
            stored_charter = packed, setup, tensors
    if stored_charter is None:
        return None
    packed, setup, tensors = stored_charter
    # Few and small tensors; owned by this process, so that they outlive the stage that sent them.
    mine = stored(dict(tensors.read(tensors.names)))
    charter: Charter = ray.cloudpickle.loads(packed)
    return Left(answered, charter._replace(blueprint=replace(charter.blueprint, setup=setup)), mine, starting)


def term_left(owner: str) -> int | None:
    """Return the highest term that living stages of the driver of this name obey; None if no stage answers.

    A term is a number that grows with each driver of a run. The caller is the present driver of the name ``owner``.
    Since Ray has one actor of a name at a time, the driver of the returned term has ended.
    """
    calls = [actor.term.remote() for actor, _ in living(owner).values()]
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=ASK_S) if calls else ([], [])
    terms = []
    for ref in answered:
        with contextlib.suppress(RayError):  # a dead stage
            terms.append(ray.get(ref))
    return max(terms, default=None)


def continued(submission: Submission | None, left: Left) -> RunSpec | None:
    """Return the spec with which the run continues on the stages that a lost driver left.

    Returns None if the settings changed, so that these stages cannot continue.

    Args:
        submission: new submission of the run; None in a restarted driver, which uses the spec stored on the stages.
        left: state of the lost driver.

    Raises:
        ConfigError: the submission is another run, or has other settings and was not submitted with resume=True.
    """
    was = left.charter.blueprint
    if submission is None:
        return was.spec
    blueprint = submission.charter.blueprint
    spec = blueprint.spec
    done = newest_step(spec.place) or 0
    goes_on(spec.place, spec.name, spec.settings, done=done, num_steps=spec.num_steps, resume=spec.resume)
    mine, before = spec.settings, was.spec.settings
    changed = compare(before, mine)
    if (
        before.versions != mine.versions
        or changed.fixed
        or changed.free
        or (blueprint.pipeline, blueprint.basis.request) != (was.pipeline, was.basis.request)
    ):
        return None
    return replace(spec, minibatch_size=was.spec.minibatch_size, microbatch_size=was.spec.microbatch_size)


BEFORE_S = 20.0
"""Seconds before a node's deadline at which a driver that stays on it saves the second checkpoint."""
HEAD = "node:__internal_head__"
"""Ray's resource by which the head node is recognized."""


class Departure:
    """Reaction of the driver when its own node is about to go: the driver moves, or saves checkpoints.

    Args:
        stays: reason why the driver cannot move to another node, for messages; "" if it can.
        requests: requests to the training loop, to which the move or the checkpoints are added.
        end: ends this process, so that Ray restarts the driver on another node.
        alert: called with a sentence for all clients.
        event: called with (decision, reason, ...) to record an event of the run.
    """

    def __init__(
        self,
        stays: str,
        requests: Requests,
        end: Callable[[], None],
        alert: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self._stays, self._requests, self._end = stays, requests, end
        self._alert, self._event = alert, event
        self._timer: threading.Timer | None = None

    def goes(self, deadline_s: float | None, stays: str) -> None:
        """Request that the driver moves to another node after a step; request checkpoints if the driver has to stay.

        DrainWatch calls this method when the driver's node is about to go.

        Args:
            deadline_s: Unix seconds at which the node goes; None if unknown.
            stays: reason why Ray would restart the driver on the same node; "" if it would not.
        """
        stays = self._stays or stays
        if not stays:
            self._alert("the node of the driver is about to go: it moves to another one between two steps")
            self._requests.hand_over(self._move)
            return
        self._alert(f"the node of the driver is about to go, and the driver stays, for {stays}: checkpoints are saved")
        self._event("driver stays", stays)
        self._requests.checkpoint()
        if deadline_s is not None and (left_s := deadline_s - time.time() - BEFORE_S) > BEFORE_S:
            self._timer = threading.Timer(left_s, self._requests.checkpoint)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Cancel the second checkpoint, if its time has not come yet."""
        if self._timer is not None:
            self._timer.cancel()

    def _move(self) -> None:
        """End the driver's process; the training loop calls this once all its state is written."""
        self._event(
            "driver moves",
            "its node is about to go; the next driver adopts the stages, which go back to their newest copies",
        )
        self._end()


def why_it_stays(node: str, max_failures: int) -> str:
    """Return the reason why Ray would not restart the driver of this node on another node; "" if Ray would.

    Args:
        node: Ray's id of the node.
        max_failures: number of failures that the run survives.
    """
    if not max_failures:
        return "FailureConfig(max_failures=0) has Ray start no driver again"
    nodes: list[dict[str, Any]] = ray.nodes()
    if any(one["NodeID"] == node and HEAD in one["Resources"] for one in nodes):
        return "this is the head, with which the whole cluster goes"
    return ""


@contextlib.contextmanager
def watching_drains(
    fleet: Fleet, spec: RunSpec, requests: Requests, alert: Callable[[str], None], event: Callable[..., None]
) -> Iterator[DrainWatch]:
    """Move stages, and the driver in this process, away from nodes that are about to go, inside the context.

    Args:
        alert, event: see Departure.
    """
    here = ray.get_runtime_context().get_node_id()
    end = partial(os.kill, os.getpid(), signal.SIGKILL)  # no cleanup: the stages stay
    departure = Departure(why_it_stays(here, spec.max_failures), requests, end, alert, event)
    watch = DrainWatch(lambda: fleet.nodes, lambda: fleet.watch.announced, requests.leave, event, here, departure.goes)
    with contextlib.closing(departure), contextlib.closing(watch):
        yield watch
