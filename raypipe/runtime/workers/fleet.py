"""Stage actors from start to stop: placing them, wiring them, feeding them segments, and what to do when one fails."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.engine.checkpoint import FreshOptions
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import CheckpointError, ConfigError, PlanError, RaypipeError, StageError
from raypipe.ir.order import Order
from raypipe.ir.plan import human_bytes
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.runtime.workers.places import PLACE_TIMEOUT_S, release, reserve
from raypipe.runtime.workers.root_cause import root_cause
from raypipe.runtime.workers.worker import StageActor

__all__ = ["Fleet"]

START_TIMEOUT_S = 150.0
OPEN_TIMEOUT_S = 60.0
SAVE_TIMEOUT_S = 3600.0
LEAST_SHM_BYTES = 256 << 20
LEAVE_S = 0.5
"""After a first failure, how long the other stages have to finish what was sent to them and to follow."""
GRACE_S = 2.0
"""After a first failure, how long to wait for a better explanation from the other stages."""


@dataclass(slots=True)
class _Flight:
    """One ``Fleet.run``: its number, the long calls, the polls under way (with their workers), what came so far."""

    run: int
    works: dict[Any, int]
    polls: dict[Any, int]
    received: list[list[list[list[StepReport]]]]
    last: bool = False
    """It completes what a halt left under way, so that no other halt may cut it short."""
    limit: float = math.inf
    """Segments after which the stages end: a number once the run was halted."""

    @property
    def complete(self) -> int:
        """Segments that every worker has reported."""
        return min(map(len, self.received))


class Fleet:
    """Stage actors, owned by whoever made them: they die with it. ``configure`` makes them a pipeline, again and again.

    Args:
        num_workers: actors to start; a pipeline may use fewer.
        resources: of each, as in ScalingConfig (``{"CPU": 1}``).
        transport: how boundary tensors travel between them; see runtime/links/opening.py.
        link_ports: lowest and highest port that their links may use; None leaves it to the system.
        owner: the driver's name, by which their places can be found after its death.

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
        owner: str = "",
    ) -> None:
        needs = {name: amount for name, amount in resources.items() if amount}
        if not needs:
            raise ConfigError(
                "resources_per_worker asks for nothing, so stages could not be placed; give each at least a share of a "
                'CPU: ScalingConfig(resources_per_worker={"CPU": 0.1}).'
            )
        extra = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        self._links = -1  # times that links were opened
        self._run_setup: RunSetup | None = None
        self._joined: list[Any] = []  # workers that have it
        self.workers: list[Any] = []
        self._places = reserve(owner, num_workers, needs)
        self.actors: list[Any] = []
        self._rows: set[RowsKey] = set()
        self._run = 0
        self._held: list[tuple[int, ...]] = []  # stages, by worker
        self._names: list[str] = []  # of the workers, for people: "Stage 1", "Stages 0 and 3"
        self._halting = threading.Lock()
        self._halted = False
        self._flight: _Flight | None = None
        try:
            for place in self._places:
                options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": extra}
                strategy = PlacementGroupSchedulingStrategy(placement_group=place)
                self.workers.append(StageActor.options(scheduling_strategy=strategy, **options).remote())
            self.members = self._start(transport, link_ports)
            self.notes = _shared_memory_notes(self.members)
        except BaseException:
            self.stop()
            raise

    def configure(self, run: RunSetup, setup: GenerationSetup, states: Sequence[Any]) -> None:
        """Give the first workers their stages and open links anew; processes stay.

        Args:
            run: sent to each worker when a plan first uses it, however often the run is planned anew.
            setup: what the plan says; addresses are filled in here.
            states: references to each worker's packed tensors, or None for one that keeps what it has.

        Raises:
            RaypipeError: what went wrong on the first stage that failed.
        """
        self._links += 1
        count = setup.num_workers
        self.actors = self.workers[:count]
        self._rows, self._halted = set(), False
        team = setup.team(0)
        self._held = [team.stages_of(worker) for worker in range(count)]
        self._names = [team.name_of(worker).capitalize() for worker in range(count)]
        if run is not self._run_setup:
            self._run_setup, self._joined = run, []
        if new := [actor for actor in self.actors if not any(actor is known for known in self._joined)]:
            shared = ray.put(run)
            self._all([actor.join.remote(shared) for actor in new], PLACE_TIMEOUT_S, "joining the run")
            self._joined += new
        addressed = ray.put(replace(setup, addresses=tuple(member["address"] for member in self.members[:count])))
        self._all(
            [
                actor.configure.remote(worker, addressed, self._links, state)
                for worker, (actor, state) in enumerate(zip(self.actors, states, strict=True))
            ],
            OPEN_TIMEOUT_S + PLACE_TIMEOUT_S,
            "configuring",
        )

    def _start(self, transport: str, link_ports: tuple[int, int] | None) -> list[dict[str, Any]]:
        """Start an actor in each place; its process imports torch, which takes a while on a busy machine."""
        refs = [worker.listen.remote(transport, link_ports) for worker in self.workers]
        _, waiting = ray.wait(refs, num_returns=len(refs), timeout=START_TIMEOUT_S)
        if waiting:
            raise PlanError(
                f"Worker {refs.index(waiting[0])} has its place, but its process did not start within "
                f"{START_TIMEOUT_S:g} s. Look at that node's load and at Ray's worker logs."
            )
        members = self._all(refs, GRACE_S, "starting")
        for worker, member in enumerate(members):
            if member["versions"] != members[0]["versions"]:
                raise PlanError(
                    f"Worker {worker} on {member['host']} runs {member['versions']}, but worker 0 on "
                    f"{members[0]['host']} runs {members[0]['versions']}. Install the same versions on every node."
                )
        return members

    def run(
        self,
        orders: Iterator[Order],
        schedules: Callable[[RowsKey], Schedule],
        *,
        ahead: int = 3,
        last: bool = False,
    ) -> Iterator[list[list[StepReport]]]:
        """Feed orders to all stages, ``ahead`` of them at a time; yields the reports of each, by stage.

        Ends early, after a segment that every stage has carried out, when ``halt`` is called from another thread.

        Args:
            schedules: the lowered rows by key.
            last: these orders complete what ``halt`` left under way, and are carried out after it.

        Raises:
            StageError, LinkError: the root cause of the first failure; every stage has been released.
        """
        self._run += 1
        flight = _Flight(
            self._run,
            {actor.work.remote(self._run): worker for worker, actor in enumerate(self.actors)},
            {actor.reports.remote(self._run, 0): worker for worker, actor in enumerate(self.actors)},
            [[] for _ in self.actors],
            last,
        )
        with self._halting:
            self._flight = flight
        submitted = yielded = 0
        more = True
        while more or yielded < min(submitted, flight.limit):
            while more and submitted < yielded + ahead:
                following = None if self._halted and not last else next(orders, None)
                more = following is not None
                if following is not None:
                    self._submit(flight.run, following, schedules)
                    submitted += 1
                else:
                    for actor in self.actors:
                        actor.submit.remote(flight.run, None)
            failure = None
            while failure is None and yielded < min(submitted, flight.limit) and flight.complete <= yielded:
                failure = self._gather(flight)
            while yielded < flight.complete and (failure is not None or yielded < submitted):
                yield self._by_stage([reports[yielded] for reports in flight.received])
                yielded += 1
            if failure is not None:
                raise failure
        with self._halting:
            self._flight = None
        self._all(list(flight.works), GRACE_S, "finishing")

    def halt(self) -> None:
        """From another thread: end after the segments that some stage has begun; runs that begin later are empty."""
        with self._halting:
            self._halted, flight = True, self._flight
            if flight is None or flight.last or flight.limit < math.inf:
                return
            with contextlib.suppress(RayError):  # a stage that failed meanwhile is run()'s affair
                begun = ray.get([actor.halt.remote(flight.run) for actor in self.actors], timeout=GRACE_S)
                flight.limit = max(begun)
                ray.get([a.finish_after.remote(flight.run, max(begun)) for a in self.actors], timeout=GRACE_S)

    def _submit(self, run: int, order: Order, schedules: Callable[[RowsKey], Schedule]) -> None:
        key = order.rows
        if key not in self._rows:
            schedule = schedules(key)
            for worker, actor in enumerate(self.actors):
                actor.set_row.remote(key, schedule.row(worker), schedule.wiring.norm_per_stage)
            self._rows.add(key)
        for actor in self.actors:
            actor.submit.remote(run, order)

    def _gather(self, flight: _Flight) -> RaypipeError | None:
        """Wait until some stage has news: more reports, or an end that is too early, which is returned."""
        done, _ = ray.wait([*flight.polls, *flight.works], num_returns=1, timeout=None)
        ref = done[0]
        try:
            news = ray.get(ref)
        except RayError:
            return self._release(flight)
        if ref in flight.polls:
            worker = flight.polls.pop(ref)
            flight.received[worker] += news
            if news or worker in flight.works.values():  # one that has ended and told everything says nothing more
                poll = self.actors[worker].reports.remote(flight.run, len(flight.received[worker]))
                flight.polls[poll] = worker
        else:
            del flight.works[ref]  # ended in order: all its reports are on their way
        return None

    def _release(self, flight: _Flight) -> RaypipeError:
        """Release everybody, take the reports of finished steps, and find the failure that explains the others.

        A failed stage leaves its links in good order and its neighbours follow, so that all of them end after the
        same step, or one later where steps overlap; only who has not ended by then is aborted.
        """
        ray.wait(list(flight.works), num_returns=len(flight.works), timeout=LEAVE_S)
        aborts = [actor.abort.remote(self._links, "another stage failed") for actor in self.actors]
        ray.wait([*aborts, *flight.works], num_returns=len(aborts) + len(flight.works), timeout=GRACE_S)
        for worker, actor in enumerate(self.actors):
            with contextlib.suppress(RayError):
                last = actor.reports.remote(flight.run, len(flight.received[worker]), 0.0)
                flight.received[worker] += ray.get(last, timeout=GRACE_S)
        return root_cause(flight.works, self._names, flight.complete)

    def _by_stage(self, by_worker: Sequence[list[list[StepReport]]]) -> list[list[StepReport]]:
        """Reports of one segment in the order of the stages."""
        pairs = zip(self._held, by_worker, strict=True)
        found = {stage: of_stage for held, of_worker in pairs for stage, of_stage in zip(held, of_worker, strict=True)}
        return [found[stage] for stage in sorted(found)]

    def _all(self, refs: Sequence[Any], timeout_s: float, doing: str) -> list[Any]:
        try:
            return ray.get(list(refs), timeout=timeout_s)
        except GetTimeoutError:
            raise StageError(f"The stages did not finish {doing} within {timeout_s:g} s.") from None
        except RayTaskError as error:
            if isinstance(error.cause, RaypipeError):
                raise error.cause from None
            raise StageError(f"A stage failed while {doing}: {error}") from None
        except RayActorError as error:
            raise StageError(f"A stage died while {doing}: {error}") from None

    def save(self, folder: str) -> None:
        """Every stage takes a snapshot, between two runs, and writes it to ``folder``; see ``entries``."""
        self._all([actor.save.remote(folder) for actor in self.actors], SAVE_TIMEOUT_S, "taking a snapshot")

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until every stage has written its part of checkpoint ``folder``; the manifest's entries.

        Raises:
            CheckpointError: one of them could not.
        """
        deadline_s = time.monotonic() + SAVE_TIMEOUT_S
        found: dict[int, dict[str, Any]] = {}  # by stage
        missing = set(range(len(self.actors)))
        while missing and time.monotonic() < deadline_s:
            asked = {worker: self.actors[worker].entries.remote(folder) for worker in sorted(missing)}
            answers = self._all(list(asked.values()), SAVE_TIMEOUT_S, "writing a checkpoint")
            for worker, entries in zip(asked, answers, strict=True):
                if entries is not None:
                    found |= zip(self._held[worker], entries, strict=True)
                    missing.discard(worker)
        if missing:
            raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
        return [found[stage] for stage in sorted(found)]

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Every stage goes back to the state of checkpoint ``folder``, but for these options of the optimizer.

        Raises:
            CheckpointError: it does not fit this model, or cannot be read.
        """
        reads = [actor.restore.remote(folder, fresh) for actor in self.actors]
        self._all(reads, SAVE_TIMEOUT_S, "reading a checkpoint")

    def spans(self) -> list[Any]:
        """Spans of the last segment run with keep_spans, of all stages."""
        return [
            span
            for spans in self._all([a.spans.remote() for a in self.actors], 60.0, "sending spans")
            for span in spans
        ]

    def stop(self) -> None:
        """Close the links, then end the actors; within seconds, whatever state they are in."""
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get([worker.close.remote() for worker in self.workers], timeout=GRACE_S)
        for actor in self.workers:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        release(self._places)


def _shared_memory_notes(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for every host whose /dev/shm is too small for Ray's object store; a container's default is 64 MiB."""
    small = {m["host"]: m["shm_bytes"] for m in members if 0 < m["shm_bytes"] < LEAST_SHM_BYTES}
    return [
        f"/dev/shm on {host} has {human_bytes(size)}, so Ray's object store spills to disk: give it more "
        "(docker run --shm-size=8g)."
        for host, size in small.items()
    ]
