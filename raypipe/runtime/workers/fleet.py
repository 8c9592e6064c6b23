"""Stage actors from start to stop: placing them, wiring them, feeding them segments, and what to do when one fails."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import LeaseError, RaypipeError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.work_order import Order
from raypipe.planner.liveness import Finding
from raypipe.runtime.run.takeover import Completion
from raypipe.runtime.run.window import Window
from raypipe.runtime.workers.configuring import Configuring
from raypipe.runtime.workers.flight import Flight
from raypipe.runtime.workers.granted import DeviceOf, granted
from raypipe.runtime.workers.leaving import leave_work
from raypipe.runtime.workers.memos import with_packed_memo
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.root_cause import root_cause
from raypipe.runtime.workers.roster import (
    GRACE_S,
    LEASE_S,
    Member,
    Roster,
    Terms,
    answers,
    results,
)
from raypipe.runtime.workers.watch import Notice, Watch

__all__ = ["Fleet"]

REHEARSE_TIMEOUT_S = 150.0
"""A starved process imports for a minute, and nobody waits for it."""
ADOPT_S = 10.0
LEAVE_S = 0.5
"""After a first failure, how long the other stages have to finish what was sent to them and to follow."""


class Fleet(Configuring):
    """Stage actors of whoever made them, which ends them. ``configure`` makes them a pipeline, again and again.

    Args:
        num_workers: actors to start; a pipeline may use fewer.
        resources: of each, as in ScalingConfig (``{"CPU": 1}``).
        transport: how boundary tensors travel between them; see runtime/links/opening.py.
        link_ports: lowest and highest port that their links may use; None leaves it to the system.
        owner: the driver that orders.
        roster: members that live already; more are started where these are too few.
        lease_s: after which an actor ends itself that hears nothing of this fleet, and counts as lost here that cannot
            be reached.
        tell: is called, from another thread, with what happens to members; it must not raise.
        device_of: makes the device of a worker with a share of a GPU, or without one, in its process.

    Raises:
        ConfigError: the transport cannot keep to ``link_ports``.
        PlanError: a worker found no place in time, or versions differ between nodes.
    """

    def __init__(
        self,
        num_workers: int,
        resources: Mapping[str, float],
        transport: str = "tcp",
        link_ports: tuple[int, int] | None = None,
        owner: Owner = Owner(),  # noqa: B008  (immutable)
        roster: Sequence[Member] = (),
        lease_s: float = LEASE_S,
        tell: Callable[[Notice], None] = lambda notice: None,
        device_of: DeviceOf = granted,
    ) -> None:
        terms = Terms(resources, transport, link_ports, owner, lease_s, device_of)
        super().__init__(owner.term, Roster(num_workers, terms, roster))
        self._run = 0
        self._halting = threading.Lock()
        self._flight: Flight | None = None
        self._broken: Flight | None = None  # the last one that a failure ended
        self.watch = Watch(lambda: self.roster, lease_s, tell, owner.term)

    @property
    def places(self) -> Roster:
        """Members, and places that are waited for."""
        return self._roster

    @property
    def members(self) -> list[Mapping[str, Any]]:
        """What every member says of itself, in the roster's order."""
        return [member.facts for member in self.roster]

    @property
    def nodes(self) -> set[str]:
        """That members are on, by Ray's ids of them."""
        return {member.facts["node"] for member in self.roster}

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """What people are told of each worker; not its address, which may hold a handle and so keep the actor alive."""
        told = [member for member in self.in_use if member.facts] or self.roster
        return tuple({name: v for name, v in member.facts.items() if name != "address"} for member in told)

    def expect(self, action_s: float) -> None:
        """The longest action of a step takes about so long; what takes many times that is told, and hangs some day."""
        self.watch.planned_s = action_s

    def adopt(
        self, workers: Mapping[int, Member], run: RunSetup, setup: GenerationSetup, *, links: int, last: int
    ) -> None:
        """Take members that are workers already; a worker that is missing is lost.

        Args:
            workers: by their number in the pipeline.
            links, last: their newest numbers of links and of a run.
        """
        self._run_setup, self._links, self._run = run, links, last
        for member in workers.values():
            member.joined = True
        self._assign([workers.get(worker, Member(lost=True)) for worker in range(setup.num_workers)], setup)

    def complete(self, todo: Completion, schedules: Callable[[RowsKey], Schedule]) -> None:
        """Give workers that were adopted what others were given, and have all of them end after the same order."""
        for worker, (actor, orders) in enumerate(zip(self.actors, todo.missing, strict=True)):
            if worker in todo.idle:
                actor.work.remote(self._term, todo.run)
            for order in orders:
                self._teach(order.rows, schedules)
                actor.submit.remote(self._term, todo.run, order)
        ends = [actor.finish_after.remote(self._term, todo.run, todo.orders) for actor in self.actors]
        results(ends, ADOPT_S, "being taken over")

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, ahead: int = 3, last: bool = False
    ) -> Iterator[list[list[StepReport]]]:
        """Feed orders to all stages, ``ahead`` of them at a time; yields the reports of each, by stage.

        Ends early, after a segment that every stage has carried out, when ``halt`` is called from another thread.

        Args:
            schedules: the lowered rows by key.
            last: these orders complete what ``halt`` left under way, and are carried out after it.

        Raises:
            StageError, LinkError: the root cause of the first failure; every stage has been released.
        """
        flight = self._begin(last)
        submitted = yielded = 0
        more = True
        while yielded < flight.limit and (more or yielded < submitted):
            while more and submitted < yielded + ahead:
                following = None if self._halted and not last else next(orders, None)
                more = following is not None
                if following is not None:
                    self._submit(flight.run, following, schedules)
                    submitted += 1
                else:
                    for actor in self.actors:
                        actor.submit.remote(self._term, flight.run, None)
            failure = None
            while failure is None and yielded < min(submitted, flight.limit) and flight.complete <= yielded:
                failure = self._gather(flight)
            while yielded < flight.complete and (failure is not None or yielded < submitted):
                yield self.by_stage([reports.take(yielded) for reports in flight.received])
                yielded += 1
            if failure is not None:
                raise failure
        with self._halting:
            self._flight = None
        results(list(flight.works), GRACE_S, "finishing")

    def _begin(self, last: bool) -> Flight:
        """Every worker waits for orders, which ``halt`` may end from now on."""
        self._run += 1
        flight = Flight(
            self._run,
            {actor.work.remote(self._term, self._run): worker for worker, actor in enumerate(self.actors)},
            {actor.reports.remote(self._run, 0): worker for worker, actor in enumerate(self.actors)},
            [Window() for _ in self.actors],
            last,
        )
        with self._halting:
            self._flight = flight
        return flight

    def halt(self) -> None:
        """From another thread: end after the segments that some stage has begun; runs that begin later are empty."""
        with self._halting:
            self._halted, flight = True, self._flight
            if flight is None or flight.last or flight.limit < math.inf:
                return
            with contextlib.suppress(RayError):  # a stage that failed meanwhile is run()'s affair
                begun = answers([actor.halt.remote(self._term, flight.run) for actor in self.actors])
                flight.limit = max(begun)
                answers([actor.finish_after.remote(self._term, flight.run, max(begun)) for actor in self.actors])

    def settle(self) -> None:
        """After a failure: every worker leaves its work; one that is dead, or does not leave it, is lost."""
        flight, self._flight = self._flight, None
        self._broken = flight or self._broken
        works = flight.works if flight is not None else {}
        leave_work(self.in_use, works, self._term, self._links, self.watch.planned_s)

    @property
    def ordered(self) -> bool:
        """Whether this fleet has ordered what the last failure ended, so that ``unheard`` knows of it."""
        return self._broken is not None

    def unheard(
        self,
        count: int,
        last: Mapping[int, list[list[StepReport]]],
        replayed: Mapping[int, Sequence[list[list[StepReport]]]] = MappingProxyType({}),
    ) -> list[list[list[StepReport]]]:
        """Reports of the steps that those who live have made, after those that ``run`` has yielded, as it yields them.

        Args:
            count: of these steps.
            last: by worker, what it said of the last one, where it made that after the failure.
            replayed: by worker that was replaced, what it said of all steps up to the last one that it did again.
        """
        broken, self._broken = self._broken, None
        if broken is None:
            return []
        heard = [reports.since(reports.first) for reports in broken.received]
        steps = []
        for at in range(count):
            of_worker = [reports[at] if at < len(reports) else None for reports in heard]
            if at == count - 1:
                of_worker = [last.get(worker, reports) for worker, reports in enumerate(of_worker)]
            for worker, again in replayed.items():
                of_worker[worker] = again[at - count] if count - at <= len(again) else of_worker[worker]
            steps.append(self.by_stage(of_worker))
        return steps

    def forget_lost(self) -> tuple[str, ...]:
        """The fleet goes on without the members that were lost; the names of those that were workers, for people."""
        self._roster.drop_lost()
        return tuple(self._names[worker] for worker in self._dropped())

    def replace_lost(self, count: int) -> tuple[str, ...]:
        """Spares, else new members, become the workers that were lost; the names of these, for people.

        Args:
            count: of the workers that the plan needs.

        Raises:
            PlanError: there is no place for a new one.
        """
        self._roster.drop_lost()
        lost = self._dropped()
        self._roster.grow(count)
        spares = [member for member in self.roster if member.worker is None]
        for worker, member in zip(lost, spares, strict=False):
            self.in_use[worker], member.worker = member, worker
        return tuple(self._names[worker] for worker in lost)

    def _dropped(self) -> list[int]:
        """Workers that the roster knows no more."""
        return [at for at, member in enumerate(self.in_use) if not any(member is one for one in self.roster)]

    def grow(self, count: int, patience_s: float | None = None) -> None:
        """Have so many members; see Roster."""
        self._roster.grow(count, patience_s)

    def end_spares(self, keep: int = 0, on: Collection[str] | None = None) -> None:
        """End members that the plan does not use; see Roster."""
        self._roster.end_spares(keep, on)

    @property
    def spares(self) -> list[int]:
        """Positions in the roster of members that could become workers at once."""
        ready = [not (member.lost or member.worker is not None) and member.joined for member in self.roster]
        return [at for at, is_ready in enumerate(ready) if is_ready]

    def staying(self, nodes: Collection[str]) -> list[int]:
        """Positions in the roster of all members that are not on these nodes, workers first."""
        return self._roster.staying(nodes)

    def members_besides(self, nodes: Collection[str]) -> list[int]:
        """Positions in the roster of workers 0, 1, ...: those in use, others for those on these nodes; see Roster."""
        return self._roster.besides(nodes, self.in_use)

    def rehearse_spares(self) -> None:
        """Have the spares import what the first optimizer of a process needs, which takes seconds."""
        assert self._run_setup is not None, "configure() comes first"
        spares = [member for member in self.roster if member.worker is None]
        self._join(self._run_setup, spares)
        results([member.actor.rehearse.remote() for member in spares], REHEARSE_TIMEOUT_S, "rehearsing")

    def go_on(self) -> None:
        """Runs that begin from now on are not empty, though ``halt`` was called before."""
        with self._halting:
            self._halted = False

    def _submit(self, run: int, order: Order, schedules: Callable[[RowsKey], Schedule]) -> None:
        self._teach(order.rows, schedules)
        order = with_packed_memo(order)
        for actor in self.actors:
            actor.submit.remote(self._term, run, order)

    def _teach(self, key: RowsKey, schedules: Callable[[RowsKey], Schedule]) -> None:
        if key not in self._rows:
            schedule = schedules(key)
            for worker, actor in enumerate(self.actors):
                actor.set_row.remote(self._term, key, schedule.row(worker), schedule.wiring.alone(worker))
            self._rows.add(key)

    def _gather(self, flight: Flight) -> RaypipeError | None:
        """Wait until some stage has news: more reports, or an end that is too early, which is returned."""
        if not flight.polls and not flight.works:  # all have ended early, and not because of this driver
            return LeaseError("The stages have ended this run for another driver, which took it over. Follow that one.")
        done, _ = ray.wait([*flight.polls, *flight.works], num_returns=1, timeout=None)
        ref = done[0]
        try:
            news = ray.get(ref)
        except RayError:
            return self._release(flight)
        if ref in flight.polls:
            worker = flight.polls.pop(ref)
            flight.received[worker].extend(news)
            if news or worker in flight.works.values():  # one that has ended and told everything says nothing more
                poll = self.actors[worker].reports.remote(flight.run, flight.received[worker].end)
                flight.polls[poll] = worker
        else:
            del flight.works[ref]  # ended in order: all its reports are on their way
        return None

    def _release(self, flight: Flight) -> RaypipeError:
        """Release everybody, take the reports of finished steps, and find the failure that explains the others.

        A failed stage leaves its links in good order and its neighbours follow, so that all of them end after the
        same step, or one later where steps overlap; only who has not ended by then is aborted.
        """
        ray.wait(list(flight.works), num_returns=len(flight.works), timeout=LEAVE_S)
        aborts = [actor.abort.remote(self._term, self._links, "another stage failed") for actor in self.actors]
        ray.wait([*aborts, *flight.works], num_returns=len(aborts) + len(flight.works), timeout=GRACE_S)
        for worker, member in enumerate(self.in_use):
            try:
                last = member.actor.reports.remote(flight.run, flight.received[worker].end, 0.0)
                flight.received[worker].extend(ray.get(last, timeout=GRACE_S))
            except ActorDiedError as error:
                self.watch.explain(member, str(error))
            except RayError:  # what it has not told by now is lost with it
                pass
        return root_cause(flight.works, self._names, flight.complete, self._explain)

    def _explain(self, worker: int, said: str) -> Finding:
        return self.watch.explain(self.in_use[worker], said)

    def by_stage(self, by_worker: Sequence[Sequence[Sequence[StepReport]] | None]) -> list[list[StepReport]]:
        """Reports of one segment in the order of the stages, and of the replicas of each; None of who said nothing."""
        pairs = enumerate(zip(self._held, by_worker, strict=True))
        found = {
            (stage, worker): of_stage
            for worker, (held, of_worker) in pairs
            if of_worker is not None
            for stage, of_stage in zip(held, of_worker, strict=True)
        }
        return [list(found[holder]) for holder in sorted(found)]

    def stop(self) -> None:
        """Close the links, then end the actors; within seconds, whatever state they are in."""
        self.watch.close()
        self._roster.close()
