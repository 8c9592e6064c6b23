"""Stage actors from start to stop: placing them, wiring them, feeding them segments, and what to do when one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raypipe.errors import LinkError, PlanError, RaypipeError, StageError
from raypipe.ir.plan import Segment
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.runtime.worker import StageActor, StageSetup

__all__ = ["Fleet"]

PLACE_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 60.0
GRACE_S = 2.0
"""After a first failure, how long to wait for a better explanation from the other stages."""


@dataclass(slots=True)
class _Pending:
    segment: Segment
    refs: list[Any]


class Fleet:
    """Stage actors, owned by whoever made them: they die with it. ``configure`` makes them a pipeline, again and again.

    Args:
        num_workers: actors to start; a pipeline may use fewer.
        resources: of each, as in ScalingConfig (``{"CPU": 1}``).

    Raises:
        PlanError: a worker found no place in time, or versions differ between nodes.
    """

    def __init__(self, num_workers: int, resources: Mapping[str, float]) -> None:
        extra = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": resources.get("CPU", 1), "num_gpus": resources.get("GPU", 0), "resources": extra}
        self.generation = -1
        self.workers = [StageActor.options(**options).remote() for _ in range(num_workers)]
        self.actors: list[Any] = []
        self._rows: set[tuple[int, bool]] = set()
        try:
            self.members = self._place(options)
        except BaseException:
            self.stop()
            raise

    def configure(self, setups: Sequence[StageSetup], states: Sequence[Any]) -> None:
        """Give the first workers a stage each and open the links of a new generation; processes stay.

        Args:
            setups: one per stage, in order.
            states: references to each stage's packed tensors, or None for a stage that keeps what it has.

        Raises:
            RaypipeError: what went wrong on the first stage that failed.
        """
        self.generation += 1
        self.actors = self.workers[: len(setups)]
        self._rows = set()
        addresses = [member["address"] for member in self.members[: len(setups)]]
        self._all(
            [
                actor.configure.remote(setup, addresses, self.generation, state)
                for actor, setup, state in zip(self.actors, setups, states, strict=True)
            ],
            OPEN_TIMEOUT_S + PLACE_TIMEOUT_S,
            "configuring",
        )

    def _place(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        refs = [worker.listen.remote() for worker in self.workers]
        ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=PLACE_TIMEOUT_S)
        if waiting:
            total, free = ray.cluster_resources(), ray.available_resources()
            stage = refs.index(waiting[0])
            needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
            has = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k} free" for k, v in needs.items() if v)
            wanted = ", ".join(f"{v:g} {k}" for k, v in needs.items() if v)
            raise PlanError(
                f"Stage {stage} found no place within {PLACE_TIMEOUT_S:g} s: each of the {len(refs)} stages needs "
                f"{wanted}, {len(ready)} could start, and the cluster has {has}. Add workers, lower num_stages, or ask "
                "for less in ScalingConfig(resources_per_worker=...)."
            )
        members = [ray.get(ref) for ref in refs]
        for stage, member in enumerate(members):
            if member["versions"] != members[0]["versions"]:
                raise PlanError(
                    f"Stage {stage} on {member['host']} runs {member['versions']}, but stage 0 on {members[0]['host']} "
                    f"runs {members[0]['versions']}. Install the same versions on every node."
                )
        return members

    def run(
        self, segments: Iterator[tuple[Segment, bool]], schedules: Any, *, training: bool, ahead: int = 2
    ) -> Iterator[list[list[StepReport]]]:
        """Feed segments to all stages, ``ahead`` of them at a time; yields the reports of each, by stage.

        Args:
            segments: with whether to keep the spans of each.
            schedules: (number of micro-batches) -> lowered Schedule.

        Raises:
            StageError, LinkError: the root cause of the first failure; every stage has been released.
        """
        queue: list[_Pending] = []
        exhausted = False
        while True:
            while not exhausted and len(queue) < ahead:
                following = next(segments, None)
                if following is None:
                    exhausted = True
                    break
                queue.append(self._submit(*following, schedules, training))
            if not queue:
                return
            oldest = queue.pop(0)
            yield self._collect(oldest, queue)

    def _submit(self, segment: Segment, keep_spans: bool, schedules: Any, training: bool) -> _Pending:
        known = (segment.schedule_id, training)
        if known not in self._rows:
            schedule: Schedule = schedules(segment.schedule_id)
            for stage, actor in enumerate(self.actors):
                actor.set_row.remote(segment.schedule_id, training, schedule.row(stage, segment.repeats))
            self._rows.add(known)
        return _Pending(segment, [actor.run.remote(segment, training, keep_spans) for actor in self.actors])

    def _collect(self, pending: _Pending, later: Sequence[_Pending]) -> list[list[StepReport]]:
        waiting = list(pending.refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=None)
            try:
                ray.get(done)
            except RayError:
                raise self._root_cause(pending, later) from None
        return ray.get(pending.refs)

    def _root_cause(self, pending: _Pending, later: Sequence[_Pending]) -> RaypipeError:
        """Release everybody, then the failure that explains the others: the user's error, a death, a link."""
        for stage, ref in enumerate(pending.refs):
            done, _ = ray.wait([ref], timeout=0)
            if not done:
                self.actors[stage].abort.remote("another stage failed")
        ray.wait(pending.refs, num_returns=len(pending.refs), timeout=GRACE_S)
        found: list[tuple[int, RaypipeError]] = []
        for stage, ref in enumerate(pending.refs):
            try:
                ray.get(ref, timeout=0)
            except GetTimeoutError:
                found.append((3, LinkError(f"Stage {stage} did not stop within {GRACE_S:g} s.")))
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, StageError):
                    found.append((0, cause))
                elif isinstance(cause, LinkError):
                    found.append((2, cause))
                else:
                    found.append((0, StageError(f"Stage {stage} failed: {error}")))
            except RayActorError as error:
                step = pending.segment.first_step
                found.append((1, StageError(f"Stage {stage} died during step {step}: {str(error).splitlines()[0]}")))
        return min(found, key=lambda item: item[0])[1]

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

    def save(self, folder: str) -> list[dict[str, Any]]:
        """Every stage writes its shard; the manifest's entries."""
        return self._all([actor.save.remote(folder) for actor in self.actors], 3600.0, "saving")

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
