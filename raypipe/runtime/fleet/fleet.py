"""Fleet: starts the stage actors of a run, configures them, sends them orders, handles failures, and ends them.

An order is the driver's command to run a segment, which completes one or more mini-batches (ir/segment.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raypipe.engine.decoding import DecodeProgram
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.worker_progress import all_hold
from raypipe.errors import LeaseError, RaypipeError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Timeline
from raypipe.planner.liveness import Diagnosis
from raypipe.run.status import Stages
from raypipe.runtime.fleet.actor_decoding import ActorDecoding
from raypipe.runtime.fleet.configuring import Configuring
from raypipe.runtime.fleet.failures import adopted, leave_work, root_cause
from raypipe.runtime.fleet.roster import GRACE_S, Member, Roster, Terms, answers, results
from raypipe.runtime.fleet.watch import MemberEvent, Watch
from raypipe.runtime.worker.orders import Window


@dataclass(slots=True)
class Flight:
    """State of one ``Fleet.run`` in progress.

    Attributes:
        run: number of this call of ``Fleet.run``, which is passed to ``StageActor.work``.
        works: reference of each running call of ``StageActor.work`` -> number of its worker.
        polls: reference of each running call of ``StageActor.reports`` -> number of its worker.
        received: for each worker, the reports received so far, one item for each segment.
    """

    run: int
    works: dict[Any, int]
    polls: dict[Any, int]
    received: list[Window[list[list[StepReport]]]]
    last: bool = False
    """True if this run completes steps that a ``halt`` left unfinished; another ``halt`` does not end it early."""
    limit: float = math.inf
    """Number of segments after which the workers end this run; finite once ``halt`` was called."""

    @property
    def complete(self) -> int:
        """Number of segments that every worker has reported."""
        return min(reports.end for reports in self.received)


REHEARSE_TIMEOUT_S = 150.0
"""Timeout in seconds of a spare's imports, which take a minute in a starved process; no step waits for them."""
LEAVE_S = 0.5
"""Seconds after a first failure in which the other workers may process messages already sent and end their work."""


class Fleet(Configuring):
    """Stage actors of a run. ``configure`` applies a plan, and later others; ``stop`` ends the actors.

    A member is one of these actors: a worker, which has stages of the plan, or a spare, which has none.

    Args:
        num_workers: number of members to have; a plan may use fewer.
        terms: settings of each member.
        roster: members that are alive already; others are started until there are ``num_workers``.
        on_event: called from another thread when a member is lost or slow; must not raise.

    Attributes:
        recovering: True from a failure until the next step. Meanwhile no spares are started: their imports would take
            seconds of a core, which the replacement of the lost worker needs.

    Raises:
        ConfigError: the transport cannot be restricted to ``terms.link_ports``, or resources are all 0.
        PlanError: a worker got no placement group in time, or versions of packages differ between nodes.
    """

    def __init__(
        self,
        num_workers: int,
        terms: Terms,
        roster: Sequence[Member] = (),
        on_event: Callable[[MemberEvent], None] = lambda event: None,
    ) -> None:
        super().__init__(terms.owner.term, Roster(num_workers, terms, roster))
        self._run = 0
        self._halting = threading.Lock()
        self._flight: Flight | None = None
        self._broken: Flight | None = None  # the last one that a failure ended
        self.recovering = False
        self.watch = Watch(lambda: self.roster, terms.lease_s, on_event, terms.owner.term)

    @property
    def members(self) -> list[Mapping[str, Any]]:
        """Facts of each member (see ``facts_of`` in stage_process.py), in the roster's order."""
        return [member.facts for member in self.roster]

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes on which this fleet has members."""
        return {member.facts["node"] for member in self.roster}

    @property
    def facts(self) -> Stages:
        """Facts of each worker for display; of all members if no worker has facts yet.

        The address is left out: it may contain an actor handle, which would keep the actor alive.
        """
        return tuple(map(_shown, [member for member in self.in_use if member.facts] or self.roster))

    def makers(self, reports: Sequence[StepReport]) -> Stages:
        """Return the ``facts`` of the workers that sent these reports; facts of all workers if there are no reports."""
        workers = {report.worker for report in reports}
        return tuple(_shown(m) for at, m in enumerate(self.in_use) if at in workers) if reports else self.facts

    def expect(self, predicted: Timeline | None) -> None:
        """Set the predicted timeline of a step, from which the longest action of a step is taken.

        The watch reports an action that takes much longer as slow, and later as hung. None keeps the previous duration.
        """
        if predicted is not None:
            self.watch.planned_s = max(span.end_s - span.start_s for span in predicted.spans)

    def adopt(self, run: RunSetup, setup: GenerationSetup) -> None:
        """Take over the members of a lost driver as the workers of the plan that they already have.

        The members end their work, and obey this driver from now on. If the member of a worker is missing, the worker
        counts as lost. The caller has to recover the run afterwards (see Recovery).

        Args:
            run: setup of the run.
            setup: setup of that plan.

        Raises:
            LeaseError: a driver of a higher term has adopted a member.
        """
        members = adopted(self.roster, self._term)
        self._run_setup = run
        self._links = max((attached.links for _, attached in members), default=-1)
        self._run = max((attached.run for _, attached in members), default=-1)
        for member, _ in members:
            member.joined = True
        workers = {attached.worker: member for member, attached in members}
        self._assign([workers.get(worker, Member(lost=True)) for worker in range(setup.num_workers)], setup)

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, ahead: int = 3, last: bool = False
    ) -> Iterator[list[list[StepReport]]]:
        """Send orders to all workers, and yield the reports of each order, regrouped by ``by_stage``.

        If another thread calls ``halt``, the iterator ends early; all workers then end after the same order.

        Args:
            orders: commands to run; each has a segment, which completes one or more mini-batches.
            schedules: returns the schedule of a RowsKey. Each worker gets its row of a schedule once, before the first
                order that needs it.
            ahead: maximum number of orders that were sent and whose reports were not yielded yet.
            last: True if these orders complete steps that ``halt`` left unfinished. They are run although the fleet is
                halted, and another ``halt`` does not end them.

        Raises:
            StageError, LinkError: the root cause of the first failure; all other workers have been aborted.
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
                self.recovering &= failure is not None
                yield self.by_stage([reports.take(yielded) for reports in flight.received])
                yielded += 1
            if failure is not None:
                raise failure
        with self._halting:
            self._flight = None
        results(list(flight.works), GRACE_S, "finishing")

    def _begin(self, last: bool) -> Flight:
        """Call ``work`` and ``reports`` of every worker.

        A later ``halt`` ends the returned Flight unless it is ``last``.
        """
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
        """End the current ``run`` after the newest order that any worker has begun; callable from another thread.

        Later calls of ``run`` do nothing until ``accept_orders`` or ``configure`` is called, except with ``last=True``.
        """
        with self._halting:
            self._halted, flight = True, self._flight
            if flight is None or flight.last or flight.limit < math.inf:
                return
            with contextlib.suppress(RayError):  # run() handles a stage that failed meanwhile
                begun = answers([actor.halt.remote(self._term, flight.run) for actor in self.actors])
                flight.limit = max(begun)
                answers([actor.finish_after.remote(self._term, flight.run, max(begun)) for actor in self.actors])

    def settle(self) -> None:
        """Have every worker end its work after a failure; kill workers that do not end it, and mark them lost.

        Raises:
            LeaseError: a later driver has taken the workers over.
        """
        self.recovering = True
        flight, self._flight = self._flight, None
        self._broken = flight or self._broken
        works = flight.works if flight is not None else {}
        leave_work(self.in_use, works, self._term, self._links, self.watch.planned_s)

    def drop_lost(self) -> int:
        """Remove members that do not answer, after ``configure`` failed before the first order; return their number.

        Raises:
            LeaseError: a later driver has taken the members over.
        """
        leave_work(self.roster, {}, self._term, self._links)
        before = len(self.roster)
        self.places.drop_lost()
        return before - len(self.roster)

    def holds(self, step: int) -> bool:
        """End all work after a failed ``run``.

        Returns:
            True if all workers live and hold the parameters after exactly ``step`` optimizer steps.
        """
        self.settle()
        return not self.lost and all_hold(self.reached(), step)

    def undelivered_reports(
        self, count: int, last: Mapping[int, list[list[StepReport]]]
    ) -> list[list[list[StepReport]]]:
        """Return the reports of steps that living workers completed, but that the failed ``run`` did not yield.

        Args:
            count: number of these steps.
            last: reports of the last of these steps, by worker, as ``come_to`` returns them: only of workers that
                completed this step after the failure.

        Returns:
            One item for each step, as ``run`` yields them; empty if no ``run`` has failed since the last call.
        """
        broken, self._broken = self._broken, None
        if broken is None:
            return []
        received = [reports.since(reports.first) for reports in broken.received]
        steps = []
        for at in range(count):
            of_worker = [reports[at] if at < len(reports) else None for reports in received]
            if at == count - 1:
                of_worker = [last.get(worker, reports) for worker, reports in enumerate(of_worker)]
            steps.append(self.by_stage(of_worker))
        return steps

    def forget_lost(self) -> tuple[str, ...]:
        """Remove lost members from the roster; return the names ("Stage 1") of lost workers, for messages.

        ``in_use`` keeps the lost workers until the next ``configure``.
        """
        self.places.drop_lost()
        return tuple(self._names[worker] for worker in self._dropped())

    def replace_lost(self, count: int) -> tuple[str, ...]:
        """Start new members until ``count`` are living, and let spares replace lost workers.

        Returns:
            Names of the lost workers ("Stage 1"), for messages.

        Raises:
            PlanError: a new member got no placement group in time, or did not start.
        """
        self.places.drop_lost()
        lost = self._dropped()
        self.places.grow(count)
        spares = [member for member in self.roster if member.worker is None]
        for worker, member in zip(lost, spares, strict=False):
            self.in_use[worker], member.worker = member, worker
        return tuple(self._names[worker] for worker in lost)

    def _dropped(self) -> list[int]:
        """List the numbers of the plan's workers whose actor is no longer in the roster (list of all stage actors)."""
        return [at for at, member in enumerate(self.in_use) if not any(member is one for one in self.roster)]

    @property
    def spares(self) -> list[int]:
        """Roster positions of living spares that have the run's setup, so that they can become workers at once."""
        ready = [not (member.lost or member.worker is not None) and member.joined for member in self.roster]
        return [at for at, is_ready in enumerate(ready) if is_ready]

    def rehearse_spares(self) -> None:
        """Send all spares the run's setup and have them import the optimizer's modules, which takes seconds."""
        assert self._run_setup is not None, "configure() comes first"
        spares = [member for member in self.roster if member.worker is None]
        self._join(self._run_setup, spares)
        results([member.actor.rehearse.remote() for member in spares], REHEARSE_TIMEOUT_S, "rehearsing")

    def accept_orders(self) -> None:
        """Undo ``halt``, so that later calls of ``run`` execute their orders."""
        with self._halting:
            self._halted = False

    def _submit(self, run: int, order: Order, schedules: Callable[[RowsKey], Schedule]) -> None:
        """Send an order to all workers; first send each worker its row (actions) of the schedule if it is a new one."""
        if order.rows not in self._rows:
            schedule = schedules(order.rows)
            for worker, actor in enumerate(self.actors):
                actor.set_row.remote(self._term, order.rows, schedule.row(worker), schedule.wiring.alone(worker))
            self._rows.add(order.rows)
        for actor in self.actors:
            actor.submit.remote(self._term, run, order)

    def _gather(self, flight: Flight) -> RaypipeError | None:
        """Wait until any worker sends reports or ends its work; add new reports to ``flight`` in place.

        Returns:
            The failure that caused the others if a worker failed; None if no worker failed.
        """
        if not flight.polls and not flight.works:  # all ended early, without an order of this driver
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
            if news or worker in flight.works.values():  # a worker that has ended and reported all is not polled again
                poll = self.actors[worker].reports.remote(flight.run, flight.received[worker].end)
                flight.polls[poll] = worker
        else:
            del flight.works[ref]  # ended in order: all its reports are on their way
        return None

    def _release(self, flight: Flight) -> RaypipeError:
        """End the work of all workers after a failure, fetch their last reports, and return the root cause.

        A worker whose stage failed closes its links after the messages already sent; then its neighbours do the same.
        So all workers end after the same step, or one step later if steps overlap. Workers that have not ended within
        LEAVE_S are aborted.
        """
        self.recovering = True
        ray.wait(list(flight.works), num_returns=len(flight.works), timeout=LEAVE_S)
        aborts = [actor.abort.remote(self._term, self._links, "another stage failed") for actor in self.actors]
        ray.wait([*aborts, *flight.works], num_returns=len(aborts) + len(flight.works), timeout=GRACE_S)
        for worker, member in enumerate(self.in_use):
            try:
                last = member.actor.reports.remote(flight.run, flight.received[worker].end, 0.0)
                flight.received[worker].extend(ray.get(last, timeout=GRACE_S))
            except ActorDiedError as error:  # root_cause explains only deaths of workers that were still at work
                self.watch.explain(member, str(error))
            except RayError:  # its remaining reports are lost
                pass
        return root_cause(flight.works, self._names, flight.complete, self._explain)

    def _explain(self, worker: int, message: str) -> Diagnosis:
        return self.watch.explain(self.in_use[worker], message)

    def by_stage(self, by_worker: Sequence[Sequence[Sequence[StepReport]] | None]) -> list[list[StepReport]]:
        """Regroup the reports of one order from workers to stages.

        Args:
            by_worker: for each worker and each of its stages, one report per mini-batch; None for a worker without
                reports, which is left out.

        Returns:
            For each replica of each stage, its reports by mini-batch. Replicas are ordered by stage, then by worker.
        """
        pairs = enumerate(zip(self._held, by_worker, strict=True))
        by_holder = {
            (stage, worker): of_stage
            for worker, (held, of_worker) in pairs
            if of_worker is not None
            for stage, of_stage in zip(held, of_worker, strict=True)
        }
        return [list(by_holder[holder]) for holder in sorted(by_holder)]

    def decoding(self, programs: Sequence[DecodeProgram], placement: Sequence[int]) -> ActorDecoding:
        """Return a context manager of the stages as a pipeline that generates text, with their present weights.

        Args:
            programs: program of each stage.
            placement: worker of each stage.
        """
        return ActorDecoding([self.actors[worker] for worker in placement], programs, self._term)

    def stop(self) -> None:
        """Stop the watch, close the links, and end the actors within seconds, even if some are stuck or dead."""
        self.watch.close()
        self.places.close()


def _shown(member: Member) -> dict[str, Any]:
    return {name: value for name, value in member.facts.items() if name != "address"}
