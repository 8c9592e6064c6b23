"""What one driver leaves to the next: the charter of its run, which its stages keep, and the stages themselves.

driver  --Charter--> every stage        in memory: nothing that would be unpickled lies in the run's folder
  x
driver  <--find_left-- any living stage
        the same submission: the stages go on        (runtime/workers/takeover.py)
        another one: they save a checkpoint and end, and it goes on from that
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.checkpoint import newest_step
from raypipe.engine.setup import RunSetup
from raypipe.errors import StageError
from raypipe.runtime.run.blueprint import Blueprint
from raypipe.runtime.run.planned import Asked, Planned
from raypipe.runtime.run.planning import PlanBasis
from raypipe.runtime.run.same_run import differences, goes_on
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.workers.packing import StoredTensors, stored
from raypipe.runtime.workers.places import living, release_orphans, release_unused
from raypipe.runtime.workers.roster import Member, end_member

__all__ = [
    "NOTHING_LEFT", "Charter", "Left", "NotTakenOverError", "Submission", "continued", "find_left", "known_to_stages",
    "term_left",
]  # fmt: skip

ASK_S = 10.0
POLL_S = 0.5
FIND_S = 60.0
"""How long a driver that Ray has started again waits for a stage to answer, while Ray knows of some."""

NOTHING_LEFT = (
    "The driver of this run was lost, and no stage outlived it that knows the run. Start the run again under the same "
    "name; it goes on from its newest checkpoint."
)


class NotTakenOverError(Exception):
    """Stages that a driver has left cannot go on together; says why."""


class Submission(NamedTuple):
    """What whoever started the run gave to its driver; resources are those of one worker."""

    blueprint: Blueprint
    tensors: StoredTensors
    resources: Mapping[str, float]


class Charter(NamedTuple):
    """A blueprint without what every stage knows anyway, the plan in force, and the resources of one worker.

    Attributes:
        asked: of a run that may change its number of workers, the size that somebody asked for last.
        failures: that the run has survived since it was submitted.
    """

    basis: PlanBasis
    pipeline: PipelineConfig
    spec: RunSpec
    turns: bool
    planned: Planned
    resources: Mapping[str, float]
    asked: Asked | None = None
    failures: int = 0

    @classmethod
    def of(cls, blueprint: Blueprint, planned: Planned, resources: Mapping[str, float]) -> Charter:
        """Of a run that has this plan."""
        known = blueprint.basis, blueprint.pipeline, blueprint.spec, blueprint.turns
        return cls(*known, planned, dict(resources))

    def blueprint(self, setup: RunSetup) -> Blueprint:
        """As it was."""
        return Blueprint(self.basis, self.pipeline, setup, self.spec, self.turns)

    def packed(self, planned: Planned, asked: Asked | None, failures: int) -> bytes:
        """For the stages, of the run with this plan."""
        packed: bytes = ray.cloudpickle.dumps(self._replace(planned=planned, asked=asked, failures=failures))
        return packed


class Left(NamedTuple):
    """What a driver that is gone has left.

    Attributes:
        roster: its living stage actors.
        starting: actors that it had not told yet how to listen, so that they are none of the run's.
        tensors: what the run began with, of what no checkpoint holds.
    """

    roster: list[Member]
    charter: Charter
    setup: RunSetup
    tensors: StoredTensors
    starting: list[Member]

    def end_starting(self, owner: str) -> None:
        """End what the driver was starting, and give back the places that it waited for."""
        for member in self.starting:
            end_member(member)
        release_unused(owner)


def find_left(owner: str, patience_s: float = 0.0) -> Left | None:
    """What the driver of this name left, if any stage of it lives that knows its run. Looking changes nothing.

    Args:
        patience_s: how long stages that live by Ray's account may leave it unanswered, as behind a broken link.
    """
    deadline_s = time.monotonic() + patience_s
    while (left := _answered(owner)) is None and time.monotonic() < deadline_s and living(owner):
        time.sleep(POLL_S)
    return left


def known_to_stages(owner: str) -> tuple[RunSpec, float]:
    """The run of a driver that Ray has started again, as its stages know it, and for how long they wait for a driver.

    Raises:
        StageError: no stage knows it; none is left.
    """
    left = find_left(owner, FIND_S)
    if left is None:
        release_orphans(owner)  # which were starting, and know nothing of the run
        raise StageError(NOTHING_LEFT)
    return left.charter.spec, left.setup.driver_grace_s


def _answered(owner: str) -> Left | None:
    """What those of its stages say that answer now."""
    roster = [Member(actor, place, number=number) for number, (actor, place) in living(owner).items()]
    asked = [(member.actor.facts.remote(), member.actor.charter.remote()) for member in roster]
    answered, starting, found = [], [], None
    for member, (facts, charter) in zip(roster, asked, strict=True):
        try:
            known, (packed, setup, tensors) = ray.get([facts, charter], timeout=ASK_S)
        except RayError:  # its lease ends it, for nobody renews that any more
            continue
        if known is None:
            starting.append(member)
            continue
        member.facts = known
        answered.append(member)
        if packed and setup is not None and found is None:
            found = packed, setup, tensors
    if found is None:
        return None
    packed, setup, tensors = found
    # Few and small; from now on they are this process's, and do not end with the stage that told them.
    mine = stored(dict(tensors.read(tensors.names)))
    return Left(answered, ray.cloudpickle.loads(packed), setup, mine, starting)


def term_left(owner: str) -> int | None:
    """Newest term of a driver of this name that living stages obey; None without any.

    Ray has one actor of a name at a time, so whoever bears it now knows that this driver has ended.
    """
    asked = [actor.term.remote() for actor, _ in living(owner).values()]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
    terms = []
    for ref in answered:
        with contextlib.suppress(RayError):  # of a stage that is dead
            terms.append(ray.get(ref))
    return max(terms, default=None)


def continued(given: Submission | None, left: Left) -> RunSpec | None:
    """What the loop knows of the run when the stages go on as they are; None where they cannot, with other settings.

    Args:
        given: the new submission; None where there is none but the one that the stages are of.

    Raises:
        ConfigError: it is another run, or has other settings that nobody asked to take over.
    """
    was = left.charter
    if given is None:
        return was.spec
    spec, blueprint = given.blueprint.spec, given.blueprint
    done = newest_step(spec.place) or 0
    goes_on(spec.place, spec.name, spec.settings, done=done, num_steps=spec.num_steps, resume=spec.resume)
    mine, before = spec.settings, was.spec.settings
    changed = differences(before.fixed, mine.fixed) or differences(before.free, mine.free)
    if changed or (blueprint.pipeline, blueprint.basis.request) != (was.pipeline, was.basis.request):
        return None
    return replace(spec, minibatch_size=was.spec.minibatch_size, microbatch_size=was.spec.microbatch_size)
