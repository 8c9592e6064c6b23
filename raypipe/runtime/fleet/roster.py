"""Roster: list of a fleet's actors, workers and spares; starts each in its own placement group, and ends them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.config.ray import gpu_share
from raypipe.errors import ConfigError, PlanError, RaypipeError, StageError, StageLostError
from raypipe.ir.units import human_bytes
from raypipe.planner.liveness import Diagnosis
from raypipe.runtime.fleet.missing_resources import wait_for
from raypipe.runtime.worker.heartbeat import Heartbeat
from raypipe.runtime.worker.places import (
    NAMESPACE,
    Owner,
    actor_name,
    created,
    first_unused,
    release,
    request_places,
)
from raypipe.runtime.worker.stage_process import DeviceOf, ray_device
from raypipe.runtime.worker.worker import StageActor

SPARE = "A spare worker"
START_TIMEOUT_S = 150.0
UNDER_WAY_S = 30.0
"""Timeout in seconds of a wait for actors that are starting, before placement groups for others are requested."""
LEAST_SHM_BYTES = 256 << 20
_LASTING: Mapping[str, Any] = {"namespace": NAMESPACE, "lifetime": "detached"}
LEASE_S = 60.0
"""Default duration of a lease in seconds; see PipelineConfig.driver_grace_s."""
GRACE_S = 2.0
"""Timeout in seconds of calls that should return at once, such as those to other stages after a failure."""


@dataclass(slots=True)
class Member:
    """Actor of the fleet: a worker, which has stages of the plan, or a spare, which has none.

    Attributes:
        actor, place: handle and placement group of the actor; None if the actor was lost before this driver started.
        facts: result of ``StageActor.listen``: address, node, host, process, versions and more; empty before.
        worker: number of the worker in the current plan; None for a spare.
        joined: True if the actor has received the run's setup, see ``StageActor.join``.
        lost: True if the actor's process has ended or is given up, so that no plan can use it again.
        number: number in the names of the actor and its placement group; unique for a driver.
        name: name in messages: "Stage 1", "Stages 0 and 3", or "A spare worker".
        heartbeat: newest heartbeat; None before the first.
        finding: reason why the member was lost; None before Watch has found it out.
    """

    actor: Any = None
    place: PlacementGroup | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    worker: int | None = None
    joined: bool = False
    lost: bool = False
    number: int = 0
    name: str = SPARE
    heartbeat: Heartbeat | None = None
    finding: Diagnosis | None = None


class Terms(NamedTuple):
    """Settings with which every member of a fleet is started.

    Attributes:
        resources: resources of each actor, as in ScalingConfig (``{"CPU": 1}``).
        transport: name of the kind of links between workers; see runtime/transport/.
        link_ports: lowest and highest port that the links may use; None leaves the choice to the system.
        owner: driver that the actors obey.
        lease_s: seconds without a heartbeat request after which an actor ends itself. If the driver cannot reach an
            actor for as long, the actor counts as lost.
        device_of: called in the actor's process with its share of a GPU (0 for the CPU) to create its device.
        folder: working directory of the actors on nodes that have it.
    """

    resources: Mapping[str, float]
    transport: str = "tcp"
    link_ports: tuple[int, int] | None = None
    owner: Owner = Owner()
    lease_s: float = LEASE_S
    device_of: DeviceOf = ray_device
    folder: str = ""


class Roster:
    """List of the members of a fleet, workers and spares; the constructor starts members until there are ``count``.

    Args:
        count: number of members to begin with, including ``living``.
        terms: settings of members that are started.
        living: members that are alive already.

    Attributes:
        owner: driver that the members obey.
        closed: True once the fleet has ended.
        members: all members except those that ``drop_lost`` removed; an index into it is a *roster position*.
        waiting: requested placement groups of members that are not started yet, by member number.
        starting: number of members whose processes are starting; their groups are no longer in ``waiting``.
        patience_s: timeout of a wait for placement groups; None for PLACE_TIMEOUT_S.
        stopped: function that is polled during a wait for placement groups; the wait ends once it returns True.

    Raises:
        ConfigError, PlanError: see Fleet.
    """

    def __init__(self, count: int, terms: Terms, living: Sequence[Member] = ()) -> None:
        self._terms, self.owner = terms, terms.owner
        self._growing = threading.Condition()
        self.closed = False
        self.members = list(living)
        self.waiting: dict[int, PlacementGroup] = {}
        self.starting = 0
        self.patience_s: float | None = None
        self.stopped: Callable[[], bool] = lambda: False
        # The next number. Ending actors of an earlier driver still have theirs.
        self._started = max((first_unused(self.owner.name), *(1 + member.number for member in living)))
        self.grow(count)

    def grow(self, count: int, patience_s: float | None = None) -> None:
        """Start members until ``count`` are living; thread-safe. New members are spares until a plan uses them.

        If another thread is starting members, this call waits for them before it requests others.

        Args:
            patience_s: timeout of the wait for placement groups; None for the attribute ``patience_s``.

        Raises:
            PlanError: a placement group was not created in time, or a member did not start.
        """
        with self._growing:
            self._growing.wait_for(lambda: self.living >= count or not self.starting or self.closed, UNDER_WAY_S)
            missing = count - self.living
            if missing <= 0 or self.closed:
                return
            first = [*created(self.waiting), *self.waiting]  # created groups before pending ones
            places = {number: self.waiting.pop(number) for number in list(dict.fromkeys(first))[:missing]}
            places |= self._request(missing - len(places))
            wait_for(
                places, self.needs, self.owner.name, self.patience_s if patience_s is None else patience_s, self.stopped
            )
            self._take(self._start(places))

    @property
    def living(self) -> int:
        """Number of members, workers and spares, that are not lost."""
        return sum(not member.lost for member in self.members)

    def ask_for(self, count: int, without: Collection[str] = ()) -> None:
        """Request placement groups until there are ``count`` members and requests; cancel surplus requests.

        Args:
            without: Ray's ids of nodes that are about to go; members on them do not count.
        """
        with self._growing:
            missing = max(0, count - len(self.staying(without)) - self.starting)
            surplus = list(self.waiting)[missing:]
            release([self.waiting.pop(number) for number in surplus])
            if not self.closed:
                self.waiting |= self._request(missing - len(self.waiting))

    def start_granted(self) -> int:
        """Start members in the requested placement groups that Ray has created; return the number of new members.

        New members are spares until a plan uses them.

        Raises:
            PlanError: a new member did not start; all new members are ended, and their groups removed.
        """
        with self._growing:
            places = created(self.waiting)
            self.waiting = {number: place for number, place in self.waiting.items() if number not in places}
            self.starting += len(places)
        if not places:
            return 0
        new: list[Member] = []
        try:
            new = self._start(places)  # takes seconds, without the lock
        finally:
            with self._growing:
                self.starting -= len(places)
                self._take(new)
                self._growing.notify_all()
        return len(new)

    def _request(self, count: int) -> dict[int, PlacementGroup]:
        numbers = range(self._started, self._started + count)
        self._started += max(0, count)
        return request_places(self.owner.name, numbers, self.needs)

    def _take(self, new: list[Member]) -> None:
        if self.closed:
            stop_members(new, self.owner.term)
        else:
            self.members = [*self.members, *new]

    def drop_lost(self) -> None:
        """Remove lost members, and their placement groups."""
        with self._growing:
            lost = [member for member in self.members if member.lost]  # members lost from now on are for the next call
            for member in lost:
                end_member(member)
            self.members = [member for member in self.members if not any(member is one for one in lost)]

    def end_spares(self, keep: int = 0, on: Collection[str] | None = None) -> None:
        """End surplus spares, or all spares on some nodes.

        Args:
            keep: number of members to keep; spares are ended until so many are left. Ignored with ``on``.
            on: Ray's ids of nodes on which all spares are ended; None ends surplus spares on any node.
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
        """List the roster positions of living members that are not on these nodes (Ray's ids), workers first."""
        there = [at for at, m in enumerate(self.members) if m.facts["node"] not in nodes and not m.lost]
        workers = [self.members[at].worker for at in there]
        return [at for _, at in sorted(zip((math.inf if w is None else w for w in workers), there, strict=True))]

    def close(self) -> None:
        """Close the links and end the actors within seconds, even stuck ones; no members are started afterwards."""
        self.closed = True
        release(list(self.waiting.values()))
        stop_members(self.members, self.owner.term)

    @property
    def needs(self) -> dict[str, float]:
        """Resources of one member: amounts above 0, by name.

        Raises:
            ConfigError: all amounts are 0.
        """
        needs = {name: amount for name, amount in self._terms.resources.items() if amount}
        if not needs:
            raise ConfigError(
                "resources_per_worker requests nothing, so stages could not be placed; give each at least a share of a "
                'CPU: ScalingConfig(resources_per_worker={"CPU": 0.1}).'
            )
        return needs

    def _start(self, places: Mapping[int, PlacementGroup]) -> list[Member]:
        """Start an actor in each of these placement groups (by member number), and return the new members.

        If an actor does not start, all these actors are ended, all these groups are removed, and the error is raised.
        """
        needs, terms, owner = self.needs, self._terms, self.owner.name
        # Until the first heartbeat renews it, a lease also covers the start of the processes.
        lease_s = START_TIMEOUT_S + terms.lease_s
        extra = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": extra}
        roster: list[Member] = []
        try:
            for number, place in places.items():
                strategy = PlacementGroupSchedulingStrategy(placement_group=place)
                lasting = {"name": actor_name(owner, number), **_LASTING} if owner else {}
                actor = StageActor.options(scheduling_strategy=strategy, **options, **lasting)
                roster.append(Member(actor.remote(lease_s, terms.folder), place, number=number))
            share = gpu_share(needs)
            listening = [
                member.actor.listen.remote(terms.transport, terms.link_ports, share, terms.device_of)
                for member in roster
            ]
            _introduce(roster, listening, [member.facts for member in self.members])
        except BaseException:
            stop_members(roster, self.owner.term)
            release(list(places.values()))
            raise
        return roster


def stop_members(roster: Sequence[Member], term: int) -> None:
    """Close the members' links, then end their actors, within seconds, even actors that are stuck or dead.

    A term is a number that grows with each driver of a run. Members that obey a driver with a higher term than ``term``
    are left alone.
    """
    terms = [member.actor.term.remote() for member in roster]
    closing = [member.actor.close.remote(term) for member in roster]
    ray.wait([*terms, *closing], num_returns=2 * len(roster), timeout=GRACE_S) if roster else None
    for member, obeyed in zip(roster, terms, strict=True):
        with contextlib.suppress(RayError):  # it is dead or stuck
            if ray.get(obeyed, timeout=0) > term:
                continue
        end_member(member)


def end_member(member: Member) -> None:
    """Kill a member's process, mark the member lost, and remove its placement group."""
    member.lost = True
    if member.actor is None or member.place is None:
        return
    with contextlib.suppress(RayError):
        ray.kill(member.actor, no_restart=True)
    release([member.place])


def _introduce(roster: Sequence[Member], refs: list[Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Wait until each new actor listens, store its facts in its member, and compare versions of packages.

    Args:
        roster: the new members; their ``facts`` are set in place.
        refs: references of the new members' calls of StageActor.listen.
        others: facts of the members that were started before.

    Raises:
        PlanError: an actor did not start within START_TIMEOUT_S, or has other versions than the first member.
    """
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=START_TIMEOUT_S)
    if waiting:
        raise PlanError(
            f"Worker {refs.index(waiting[0])} has its place, but its process did not start within "
            f"{START_TIMEOUT_S:g} s. Look at that node's load and at Ray's worker logs."
        )
    new = results(refs, GRACE_S, "starting")
    first = [*others, *new][0]
    for worker, (member, facts) in enumerate(zip(roster, new, strict=True), len(others)):
        member.facts = facts
        if facts["versions"] != first["versions"]:
            raise PlanError(
                f"Worker {worker} on {facts['host']} runs {facts['versions']}, but worker 0 on "
                f"{first['host']} runs {first['versions']}. Install the same versions on every node."
            )


def answers(refs: Sequence[Any]) -> list[Any]:
    """Return the results of calls to stage actors; wait without a timeout, because Watch kills actors that hang.

    Raises:
        RayError: an actor died, or a call raised.
    """
    while True:
        with contextlib.suppress(GetTimeoutError):
            return ray.get(list(refs), timeout=GRACE_S)


def results(refs: Sequence[Any], timeout_s: float, doing: str) -> list[Any]:
    """Return the results of calls to stage actors.

    Args:
        refs: references of the calls.
        timeout_s: timeout of all calls together.
        doing: description of the calls for messages, such as "joining the run".

    Raises:
        RaypipeError: a call raised this error.
        StageError: a call raised another error, or not all were answered in time.
        StageLostError: an actor died or could not be reached.
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
    """Return a warning for each host whose /dev/shm is below LEAST_SHM_BYTES; a container's default is 64 MiB."""
    small = {m["host"]: m["shm_bytes"] for m in members if 0 < m["shm_bytes"] < LEAST_SHM_BYTES}
    return [
        f"/dev/shm on {host} has {human_bytes(size)}, so Ray's object store spills to disk: give it more "
        "(docker run --shm-size=8g)."
        for host, size in small.items()
    ]
