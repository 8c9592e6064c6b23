"""A run goes on where it is though a worker was lost: a new one does the steps since its copy again, nobody else does.

    complete   who lives comes to the newest step that any of them has made (engine/reached.py); whoever takes the place
               of a lost worker takes its copy and comes to that step too, on the messages that its neighbours have kept
    regroup    links are opened anew; the step that was begun is begun anew by all

Where that cannot be, or would take longer, all go back to copies: planner/recovery.py says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raypipe.engine.reached import newest
from raypipe.errors import CheckpointError, PlanError, StageLostError
from raypipe.ir.report import StepReport
from raypipe.planner.recovery import Copy, Log, Lost, Replay, StepTimes, newest_common, replay_or_why_not
from raypipe.runtime.run.blueprint import Assembled
from raypipe.runtime.run.plans import Plans
from raypipe.runtime.run.recovery import Recovered, Steps
from raypipe.runtime.workers.copies import CopyFacts
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.laps import Laps
from raypipe.runtime.workers.newest_copies import remote
from raypipe.runtime.workers.replaying_actor import Todo

__all__ = ["Replaying"]

Held = Sequence[tuple[Any, CopyFacts]]


class Replaying:
    """Of one run; see Replayer.

    Args:
        keep_charter: has workers keep what a later driver needs to know of this plan.
        refill: has spares start where workers are missing.

    Attributes:
        why_not: for people, why all had to go back after the last failure; "" before one.
        no_place: that ``complete`` found for another worker.
    """

    def __init__(
        self, fleet: Fleet, plans: Plans, keep_charter: Callable[[Assembled], None], refill: Callable[[], None]
    ) -> None:
        self._fleet, self._plans = fleet, plans
        self._keep_charter, self._refill = keep_charter, refill
        self._times = StepTimes()
        self._laps, self._moved_bytes = Laps(), 0
        self._replaced: tuple[str, ...] = ()
        self._replayed_steps = 0
        self.why_not = ""
        self.no_place: PlanError | None = None
        self._begun_at = -1  # number of the links when a worker was replaced last that has not been replayed

    def heard(self, seconds: float, of_step: Sequence[StepReport]) -> None:
        """See Replayer."""
        busy_s: dict[int, float] = {}
        for report in of_step:
            if report.worker is not None:
                busy_s[report.worker] = busy_s.get(report.worker, 0.0) + report.busy_s
        self._times = StepTimes(seconds, busy_s)

    def complete(self, step: int) -> Steps | None:
        """See Replayer."""
        self._laps, self.no_place = Laps(), None
        self._replaced, self._replayed_steps, self._moved_bytes = (), 0, 0
        fleet, made = self._fleet, self._plans.made
        self.why_not = self._impossible(made)
        if not self.why_not and self._begun_at == fleet.links:  # its state is none, or that of an older step
            self.why_not = "another worker was lost while one was replayed"
        if self.why_not:
            return None
        fleet.settle()
        self._laps.lap("settle")
        living = [worker for worker in range(len(fleet.in_use)) if worker not in fleet.lost]
        known = newest(fleet.reached(), step) if living else None
        if known is None:
            self.why_not = "those that are left cannot come to the same step, as where steps overlap"
            return None
        newer, totals = known
        if newer > step and not fleet.ordered:
            self.why_not = f"nobody knows all of the records of steps {step} to {newer - 1}"
            return None
        told = fleet.come_to(newer, totals)  # before logs are asked for, which then have that step too
        self._laps.lap("complete")
        held = [(actor, f) for actor, f in fleet.copies() if f.generation == made.setup.generation]
        found = self._decided(made, step, newer, held)
        if isinstance(found, str):
            self.why_not = found
            return None
        replayed: Mapping[int, Sequence[list[list[StepReport]]]] = {}
        if found.begins:
            self._begun_at = fleet.links
            try:
                self._replaced = fleet.replace_lost(made.setup.num_workers)
            except PlanError as error:
                self.why_not, self.no_place = "there is no place for another worker", error
                return None
            self._laps.lap("replace")
            replayed = self._replay(made, found, living, held)
            self._begun_at = -1
            self._laps.lap("replay")
        steps = fleet.unheard(newer - step, told, replayed)
        # Of a step that somebody tells nothing of there would be no record: after a driver was lost, too.
        if len(steps) == newer - step and all(len(of_step) == len(made.setup.programs) for of_step in steps):
            return steps
        self.why_not = f"nobody knows all of the records of steps {step} to {newer - 1}"
        return None

    def regroup(self, step: int) -> Recovered:
        """See Replayer."""
        fleet, made = self._fleet, self._plans.made
        fleet.regroup(made.run, made.setup, fleet.positions())
        self._laps.lap("links")
        self._keep_charter(made)
        self._refill()
        self._laps.lap("charter")
        return Recovered(
            step, "where it was", None, self._replaced, self._laps.laps_s, fleet.facts, moved_bytes=self._moved_bytes,
            replayed_steps=self._replayed_steps,
        )  # fmt: skip

    def _impossible(self, made: Assembled) -> str:
        """Why this run replays nobody, whoever is lost; "" where it may."""
        if not made.run.replays:
            return "replay='off'"
        if made.plan.flow is not None or made.plan.plan.schedule.wiring.norm_per_stage:
            return "steps overlap, or stages take their norms alone"
        return "stages have replicas" if self._plans.replicas else ""

    def _decided(self, made: Assembled, step: int, newer: int, held: Held) -> Replay | str:
        """See ``replay_or_why_not``. A copy of a step that the loop has not heard of leaves that without a record."""
        fleet, setup = self._fleet, made.setup
        logs = {}
        for worker, logged in fleet.logged().items():
            if logged is None:
                return f"worker {worker} keeps nothing of what it sends"
            logs[worker] = Log(*logged)
        lost = {}
        for worker in fleet.lost:
            placement = setup.placement(worker)
            of_stages = [{at for _, f in held if f.stage == stage for at in f.steps} for stage in placement.stages]
            copies = {at for at in set.intersection(*of_stages) if at <= step}
            lost[worker] = Lost(frozenset(placement.neighbours(setup.programs)), copies)
        common = newest_common(
            [Copy(actor, f.stage, f.steps, f.piece, f.pieces) for actor, f in held],
            len(setup.programs),
            range(newer + 1),
        )
        return replay_or_why_not(newer, lost, logs, None if common is None else common[0], self._times)

    def _replay(
        self, made: Assembled, found: Replay, living: Sequence[int], held: Held
    ) -> dict[int, list[list[list[StepReport]]]]:
        """By worker that takes the place of a lost one, its reports of the steps that it does again."""
        fleet, setup = self._fleet, made.setup
        copies, todo = {}, {}
        for worker, begins in found.begins.items():
            placement = setup.placement(worker)
            copies[worker] = [
                next(remote(actor, f, begins) for actor, f in held if f.stage == stage and begins in f.steps)
                for stage in placement.stages
            ]
            peers = {peer: fleet.actors[peer] for peer in sorted(placement.neighbours(setup.programs))}
            steps = fleet.logged_steps(min(peers, default=living[0]), begins, found.step)
            rows = {key: made.plan.rows(key).row(worker) for key in {step.order.rows for step in steps}}
            todo[worker] = Todo(begins, steps, rows, peers, fleet.links)
        try:
            reports = fleet.replay(made.run, setup, copies, todo)
        except CheckpointError as error:  # a failure as any other, after which all go back
            raise StageLostError(f"A worker could not take the state of the lost one: {error}") from None
        self._moved_bytes = fleet.moved_bytes
        self._replayed_steps = max(found.step - begins for begins in found.begins.values())
        return reports
