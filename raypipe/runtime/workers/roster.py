"""The actors of a fleet: starting them in places of their own, who is in use and who is spare, ending them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.config.ray import gpu_share
from raypipe.errors import ConfigError, PlanError, RaypipeError, StageError, StageLostError
from raypipe.ir.plan import human_bytes
from raypipe.planner.liveness import Finding
from raypipe.runtime.workers.granted import DeviceOf
from raypipe.runtime.workers.places import (
    NAMESPACE,
    Owner,
    actor_name,
    ask,
    first_unused,
    granted,
    release,
    wait_for,
)
from raypipe.runtime.workers.pulse import Pulse
from raypipe.runtime.workers.worker import StageActor

__all__ = [
    "GRACE_S", "LEASE_S", "SPARE", "Member", "Roster", "Terms", "answers", "chosen", "end_member", "results",
    "shared_memory_notes", "stop_members",
]  # fmt: skip

SPARE = "A spare worker"
START_TIMEOUT_S = 150.0
UNDER_WAY_S = 30.0
"""For members that are starting already, before a place for another one is asked for."""
LEAST_SHM_BYTES = 256 << 20
_LASTING: Mapping[str, Any] = {"namespace": NAMESPACE, "lifetime": "detached"}
LEASE_S = 60.0
"""See PipelineConfig.driver_grace_s."""
GRACE_S = 2.0
"""How long to wait for what should come at once, such as the other stages' word after a failure."""


@dataclass(slots=True)
class Member:
    """An actor of the fleet, in use or spare.

    Attributes:
        actor, place: it, and its placement group; None of one that was lost before this driver knew of it.
        facts: what it says of itself: address, node, host, process, versions.
        worker: its number in the pipeline; None for a spare.
        joined: it knows the run.
        lost: its process has ended, so that no plan can use it again.
        name: for people: "Stage 1", "Stages 0 and 3", or "A spare worker".
        pulse: what it said of itself last.
        finding: why it was lost, once that is known.
        number: in the names of its actor and its place; no two members of a driver have the same.
    """

    actor: Any = None
    place: PlacementGroup | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    worker: int | None = None
    joined: bool = False
    lost: bool = False
    number: int = 0
    name: str = SPARE
    pulse: Pulse | None = None
    finding: Finding | None = None


class Terms(NamedTuple):
    """What every member of a fleet is started with; see Fleet."""

    resources: Mapping[str, float]
    transport: str
    link_ports: tuple[int, int] | None
    owner: Owner
    lease_s: float
    device_of: DeviceOf


class Roster:
    """All members of a fleet that live: workers, then spares. See Fleet for what is raised.

    Args:
        count: members to begin with, ``living`` among them.
        terms: that those are started with who are missing.
        living: members that live already.

    Attributes:
        waiting: places that were asked for and have no member yet, by number.
        starting: number of members whose processes are starting, in places of which ``waiting`` has none any more.
        patience_s: for which a place for another member is waited for; None for the usual while.
    """

    def __init__(self, count: int, terms: Terms, living: Sequence[Member] = ()) -> None:
        self._terms, self._owner = terms, terms.owner
        self._growing = threading.Condition()
        self._closed = False
        self.members = list(living)
        self.waiting: dict[int, PlacementGroup] = {}
        self.starting = 0
        self.patience_s: float | None = None
        # The next number. Actors that an earlier driver started and that are ending still bear theirs.
        self._started = max((first_unused(self._owner.name), *(1 + member.number for member in living)))
        self.grow(count)

    def grow(self, count: int, patience_s: float | None = None) -> None:
        """Have so many members, of which new ones are spares until a plan uses them. From any thread, one by one.

        Those that are starting already are waited for, before others are asked for.

        Args:
            patience_s: for which their places are waited for; None for that of the attribute.

        Raises:
            PlanError: there is no place for one.
        """
        with self._growing:
            self._growing.wait_for(lambda: self.living >= count or not self.starting or self._closed, UNDER_WAY_S)
            missing = count - self.living
            if missing <= 0 or self._closed:
                return
            first = [*granted(self.waiting), *self.waiting]  # those that are there before those that may come
            places = {number: self.waiting.pop(number) for number in list(dict.fromkeys(first))[:missing]}
            places |= self._ask(missing - len(places))
            wait_for(places, self.needs, self.patience_s if patience_s is None else patience_s)
            self._take(self._start(places))

    @property
    def closed(self) -> bool:
        """Whether the fleet has ended."""
        return self._closed

    @property
    def living(self) -> int:
        """Number of members that are not lost."""
        return sum(not member.lost for member in self.members)

    def ask_for(self, count: int, without: Collection[str] = ()) -> None:
        """Wait for places until there are so many members; what is asked for beyond that is given back.

        Args:
            without: nodes whose members do not count, because they are about to go.
        """
        with self._growing:
            missing = max(0, count - len(self.staying(without)) - self.starting)
            surplus = list(self.waiting)[missing:]
            release([self.waiting.pop(number) for number in surplus])
            if not self._closed:
                self.waiting |= self._ask(missing - len(self.waiting))

    def start_granted(self) -> int:
        """Start members in the places that have come; how many. They are spares until a plan uses them.

        Raises:
            PlanError: one did not start; its place and those of the others are given back.
        """
        with self._growing:
            places = granted(self.waiting)
            self.waiting = {number: place for number, place in self.waiting.items() if number not in places}
            self.starting += len(places)
        if not places:
            return 0
        new: list[Member] = []
        try:
            new = self._start(places)  # which takes seconds: the lock is free meanwhile
        finally:
            with self._growing:
                self.starting -= len(places)
                self._take(new)
                self._growing.notify_all()
        return len(new)

    def _ask(self, count: int) -> dict[int, PlacementGroup]:
        numbers = range(self._started, self._started + count)
        self._started += max(0, count)
        return ask(self._owner.name, numbers, self.needs)

    def _take(self, new: list[Member]) -> None:
        if self._closed:
            stop_members(new, self._owner.term)
        else:
            self.members = [*self.members, *new]

    def drop_lost(self) -> None:
        """Forget the members whose process has ended; their places are given back."""
        with self._growing:
            lost = [member for member in self.members if member.lost]  # one more meanwhile is for the next time
            for member in lost:
                end_member(member)
            self.members = [member for member in self.members if not any(member is one for one in lost)]

    def end_spares(self, keep: int, on: Collection[str] | None = None) -> None:
        """End members that the plan does not use, until there are ``keep`` members at most; or all that are on a node.

        Args:
            on: nodes; None ends those of any node.
        """
        with self._growing:
            spares = [member for member in self.members if member.worker is None]
            surplus = spares[: max(0, len(self.members) - keep)]
            if on is not None:
                surplus = [member for member in spares if member.facts["node"] in on]
            for member in surplus:
                end_member(member)
            self.members = [member for member in self.members if not any(member is one for one in surplus)]

    def staying(self, nodes: Collection[str]) -> list[int]:
        """Positions of all members that live and are not on these nodes, workers first."""
        there = [at for at, m in enumerate(self.members) if m.facts["node"] not in nodes and not m.lost]
        workers = [self.members[at].worker for at in there]
        return [at for _, at in sorted(zip((math.inf if w is None else w for w in workers), there, strict=True))]

    def besides(self, nodes: Collection[str], in_use: Sequence[Member]) -> list[int]:
        """Positions of workers 0, 1, ...: those in use, and others for those on these nodes.

        Raises:
            PlanError: there is no place for another one.
        """
        leaving = sum(member.facts["node"] in nodes for member in in_use)
        spares = [at for at in self.staying(nodes) if self.members[at].worker is None]
        before = len(self.members)
        self.grow(sum(not member.lost for member in self.members) + leaving - len(spares))
        others = iter([*spares, *range(before, len(self.members))])
        return [next(others) if m.facts["node"] in nodes else self.members.index(m) for m in in_use]

    def close(self) -> None:
        """Close the links, then end the actors; within seconds, whatever state they are in. None starts any more."""
        self._closed = True
        release(list(self.waiting.values()))
        stop_members(self.members, self._owner.term)

    @property
    def needs(self) -> dict[str, float]:
        """Resources of one member."""
        needs = {name: amount for name, amount in self._terms.resources.items() if amount}
        if not needs:
            raise ConfigError(
                "resources_per_worker asks for nothing, so stages could not be placed; give each at least a share of a "
                'CPU: ScalingConfig(resources_per_worker={"CPU": 0.1}).'
            )
        return needs

    def _start(self, places: Mapping[int, PlacementGroup]) -> list[Member]:
        """Actors, each in a place of its own, by number. None is left, and no place, if this raises."""
        needs, terms, owner = self.needs, self._terms, self._owner.name
        # A lease begins when somebody renews it, or a while after the last process has had the time to start.
        lease_s = START_TIMEOUT_S + terms.lease_s
        extra = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": extra}
        roster: list[Member] = []
        try:
            for number, place in places.items():
                strategy = PlacementGroupSchedulingStrategy(placement_group=place)
                lasting = {"name": actor_name(owner, number), **_LASTING} if owner else {}
                actor = StageActor.options(scheduling_strategy=strategy, **options, **lasting).remote(lease_s)
                roster.append(Member(actor, place, number=number))
            how = terms.transport, terms.link_ports, gpu_share(needs), terms.device_of
            _introduce(roster, how, [member.facts for member in self.members])
        except BaseException:
            stop_members(roster, self._owner.term)
            release(list(places.values()))
            raise
        return roster


def stop_members(roster: Sequence[Member], term: int) -> None:
    """Close the links, then end the actors; within seconds, whatever state they are in.

    Args:
        term: of the driver that ends them; those that a later one has taken over are left alone.
    """
    asked = [member.actor.obeys.remote(term) for member in roster]
    closing = [member.actor.close.remote(term) for member in roster]
    ray.wait([*asked, *closing], num_returns=2 * len(roster), timeout=GRACE_S) if roster else None
    for member, obeys in zip(roster, asked, strict=True):
        if not _taken_over(obeys):
            end_member(member)


def _taken_over(obeys: Any) -> bool:
    """Whether a stage has said that it takes orders of a later driver; one that is dead or stuck has said nothing."""
    try:
        return not ray.get(obeys, timeout=0)
    except RayError:
        return False


def end_member(member: Member) -> None:
    """End its process, whatever state it is in, and give its place back."""
    member.lost = True
    if member.actor is None or member.place is None:
        return
    with contextlib.suppress(RayError):
        ray.kill(member.actor, no_restart=True)
    release([member.place])


def chosen(roster: Sequence[Member], count: int, members: Sequence[int] | None) -> list[Member]:
    """The members that become workers 0, 1, ...

    Args:
        members: their positions in the roster; None takes those in use, in their order, then spares.

    Raises:
        PlanError: there are not so many.
    """
    if members is not None:
        return [roster[at] for at in members]
    there = [member for member in roster if not member.lost]
    if count > len(there):
        raise PlanError(f"The plan needs {count} workers, but only {len(there)} are there.")
    return sorted(there, key=lambda member: math.inf if member.worker is None else member.worker)[:count]


def _introduce(
    roster: Sequence[Member],
    how: tuple[str, tuple[int, int] | None, float, DeviceOf],
    others: Sequence[Mapping[str, Any]],
) -> None:
    """Wait for an actor in each place; its process imports torch, which takes a while on a busy machine.

    Args:
        how: they are to listen, and to compute; see StageActor.listen.
        others: facts of members that are there already.
    """
    refs = [member.actor.listen.remote(*how) for member in roster]
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=START_TIMEOUT_S)
    if waiting:
        raise PlanError(
            f"Worker {refs.index(waiting[0])} has its place, but its process did not start within "
            f"{START_TIMEOUT_S:g} s. Look at that node's load and at Ray's worker logs."
        )
    found = results(refs, GRACE_S, "starting")
    first = [*others, *found][0]
    for worker, (member, facts) in enumerate(zip(roster, found, strict=True), len(others)):
        member.facts = facts
        if facts["versions"] != first["versions"]:
            raise PlanError(
                f"Worker {worker} on {facts['host']} runs {facts['versions']}, but worker 0 on "
                f"{first['host']} runs {first['versions']}. Install the same versions on every node."
            )


def answers(refs: Sequence[Any]) -> list[Any]:
    """Of calls that are answered at once, however long a starved process takes: who hangs is ended by whoever watches.

    Raises:
        RayError: one of them died.
    """
    while True:
        with contextlib.suppress(GetTimeoutError):
            return ray.get(list(refs), timeout=GRACE_S)


def results(refs: Sequence[Any], timeout_s: float, doing: str) -> list[Any]:
    """Of all these calls.

    Raises:
        RaypipeError: of the first stage that failed; one did not answer in time, or died.
    """
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError:
        raise StageError(f"The stages did not finish {doing} within {timeout_s:g} s.") from None
    except RayTaskError as error:
        if isinstance(error.cause, RaypipeError):
            raise error.cause from None
        raise StageError(f"A stage failed while {doing}: {error}") from None
    except RayActorError as error:
        raise StageLostError(f"A stage died while {doing}: {error}") from None


def shared_memory_notes(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for every host whose /dev/shm is too small for Ray's object store; a container's default is 64 MiB."""
    small = {m["host"]: m["shm_bytes"] for m in members if 0 < m["shm_bytes"] < LEAST_SHM_BYTES}
    return [
        f"/dev/shm on {host} has {human_bytes(size)}, so Ray's object store spills to disk: give it more "
        "(docker run --shm-size=8g)."
        for host, size in small.items()
    ]
