"""What the loop knows of recovery: which failures to survive, how often, and where a run goes on after one.

fleet.run raises --> Failures.counted: may this one be survived?  -- no --> raised again
                         | yes
                     Recoverer: survivors, replacements, state of one step   (runtime/workers/recovery.py)
                         |
loop goes on <------ Recovered(position, ...)
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.errors import LinkError, RanOut, RaypipeError, StageError, StageLostError
from raypipe.ir.report import StepReport
from raypipe.planner.replan import Offer
from raypipe.planner.segments import Position
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.replanning import Replanning
from raypipe.runtime.run.spec import PlanInForce

__all__ = ["Failures", "Recovered", "Recoverer", "Regrouper", "Replayer", "Steps", "noticed"]

UNLIMITED = -1
MOST_LOST = 5
"""So often a lost process or link is replaced again without the run getting further."""
MOST_LIGHTER = 5
"""So often a worker that ran out of memory gets less to hold without the run getting further."""
MOST_HERE = 20
"""So many failures of any kinds are survived without the run getting further."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """All stages are ready again, each with the state that it had after the same step.

    Attributes:
        step: optimizer steps that this state has done.
        source: where it came from, for people.
        position: where a checkpoint says that the run stood; None where the state comes from copies in memory.
        replaced: stages that have another process now, for people; empty where only links had failed.
        seconds: of each part of the recovery, by name.
        stages: what people are told of each worker.
        plan: that they have now, where it is another one.
        moved_bytes: of state that workers read of other workers' copies.
        lost: workers that the run goes on without, for people.
        replayed_steps: that workers in place of lost ones did again, while the others waited.
        stopped: the run was stopped while it waited for workers: none is ready, and it ends as this checkpoint left it.
    """

    step: int
    source: str
    position: Position | None = None
    replaced: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[dict[str, Any], ...] = ()
    plan: PlanInForce | None = None
    moved_bytes: int = 0
    stopped: bool = False
    lost: tuple[str, ...] = ()
    replayed_steps: int = 0

    def told(self) -> dict[str, Any]:
        """What events.jsonl says of it."""
        plan: dict[str, Any] = {}
        if self.plan is not None:
            counts = self.plan.plan.partition.replicas
            plan = {"num_stages": len(counts)} | ({"replicas": list(counts)} if max(counts) > 1 else {})
        times = {f"{name}_s": round(took_s, 3) for name, took_s in self.seconds.items()}
        lost = {"lost": list(self.lost)} if self.lost else {}
        return {"replaced": list(self.replaced), **lost, **plan, **times, "moved_bytes": self.moved_bytes}


Steps = Sequence[list[list[StepReport]]]
"""As ``AnyFleet.run`` yields their reports."""


class Regrouper(Protocol):
    """Who has a run with replicas go on without some of them, and take others in."""

    def complete(self, step: int) -> Steps | None:
        """After a failure, have all workers that live at the same step, with no step lost that any of them has made.

        Args:
            step: steps that every stage had finished, as far as the loop was told.

        Returns:
            The steps since then; None where a stage has no worker left, or a step would be lost.

        Raises:
            StageError, LinkError: something failed meanwhile.
        """

    def regroup(self, step: int) -> Recovered:
        """After ``complete``, deal the micro-batches out to those that live.

        Raises:
            StageError, LinkError: something failed meanwhile.
        """

    def join(self, step: int) -> Recovered | None:
        """Between two steps, take spares in where replicas are missing; None where there are none.

        Raises:
            StageError, LinkError: something failed meanwhile; the run can be regrouped.
        """


class Replayer(Protocol):
    """Who has a run go on where it is though workers were lost: others take their place, and do their steps again.

    Attributes:
        why_not: for people, why all had to go back after the last failure; "" where they had not.
    """

    why_not: str

    def heard(self, seconds: float, of_step: Sequence[StepReport]) -> None:
        """What a step took, by which it is decided who goes back."""

    def complete(self, step: int) -> Steps | None:
        """After a failure, have all workers at the same step: those that live, and those in place of lost ones.

        Args:
            step: steps that every stage had finished, as far as the loop was told.

        Returns:
            The steps since then; None where all have to go back, see ``why_not``.

        Raises:
            StageError, LinkError: something failed meanwhile.
        """

    def regroup(self, step: int) -> Recovered:
        """After ``complete``, join them with each other.

        Raises:
            StageError, LinkError: something failed meanwhile.
        """


class Recoverer(Protocol):
    """Who brings the stages of a run back, or gives them another plan.

    Attributes:
        replanning: finds other cuts while the run goes on; None where the planner may not.
        groups: of a run with replicas; None of any other.
        replays: has a run go on where it is though workers were lost; None where nobody does.
        failures: of this submission so far, which a driver that Ray starts again is told.
    """

    failures: int
    replanning: Replanning | None
    groups: Regrouper | None
    replays: Replayer | None

    def keep_copy(self, step: int) -> None:
        """Every stage copies its state in memory: that after ``step`` steps."""

    def lighten(self, ran_out: RanOut) -> None:
        """From the next ``recover`` on, have a plan in which the worker that ran out of memory holds less.

        Raises:
            PlanError: there is none; names worker, bytes and fields.
        """

    def recover(self, steps: Collection[int]) -> Recovered:
        """After a failure, bring all stages to the newest state that every one of them can reach.

        Args:
            steps: to which the run can go back where there are copies; else to its newest checkpoint.

        Where it waits for workers, it may be stopped meanwhile; see ``Recovered.stopped``.

        Raises:
            StageError, LinkError: it failed again meanwhile.
        """

    def resize(
        self,
        num_stages: int,
        step: int,
        planned: Planned | None = None,
        replicas: int | tuple[int, ...] | None = None,
    ) -> Recovered:
        """Between two steps, give the run a plan of so many stages and move what changes hands.

        Args:
            step: steps that every stage has done.
            planned: the plan, where it has been made already; its generation does not count.
            replicas: of every stage, one number for all or one for each; None for as many as were configured.

        Raises:
            PlanError: there is no such plan, or no place for it; the run can go on as it was.
            StageError, LinkError: something failed on the way; ``recover`` is next.
        """

    def move(self, nodes: Collection[str], step: int) -> Recovered | None:
        """Between two steps, have other workers take over from those on these nodes; None where none is there.

        Raises:
            PlanError: there is no place for one; the run can go on as it was.
            StageError, LinkError: something failed on the way; ``recover`` is next.
        """

    def take(self, offer: Offer, step: int) -> Recovered:
        """Between two steps, cut the stages as offered.

        Raises:
            PlanError: they have another plan meanwhile; the run can go on as it was.
            StageError, LinkError: something failed on the way; ``recover`` is next.
        """


def noticed(error: BaseException) -> dict[str, float]:
    """For an event: seconds since something went wrong, as far as the hosts' clocks agree; empty where nobody knows."""
    at_s = getattr(error, "raised_at_s", None)
    return {} if at_s is None else {"seconds": round(max(0.0, time.time() - at_s), 3)}


class Failures:
    """Counts failures against ``FailureConfig(max_failures)``; -1 is no limit, 0 survives none.

    A failure that the same state leads to again, such as an exception of the user's code or a loss that is not finite,
    is tried once more. A process or a link that is lost again and again before the run gets any further is tried
    a few times more, and so is memory that runs out, each time with a plan that needs less.

    Args:
        count: of those that drivers before this one have survived.
    """

    def __init__(self, most: int, count: int = 0) -> None:
        self._most = most
        self.count = count
        self._last, self._furthest = (-1, ""), -1
        self._again = self._here = 0

    def survivable(self, error: RaypipeError) -> bool:
        """Whether a failure of this kind is to be survived at all."""
        return self._most != 0 and isinstance(error, StageError | LinkError)

    def counted(self, error: RaypipeError, step: int) -> str:
        """Count a failure; "" where the run may go on after it, else why not.

        Args:
            step: steps that every stage had finished.
        """
        self.count += 1
        if self._most != UNLIMITED and self.count > self._most:
            return f"it is failure {self.count} of this run, and FailureConfig(max_failures={self._most}) ends it"
        # Numbers differ from one try to the next: processes, times, addresses.
        kind = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", (str(error).splitlines() or [""])[0])
        lost = isinstance(error, StageLostError | LinkError)
        at, before = self._last
        # What is computed fails where it failed, of which a driver may hear a step earlier once all went back. A
        # process may be lost anywhere on the way there.
        stuck = step == at if lost else step <= self._furthest
        self._here = self._here + 1 if stuck else 0
        self._again = self._again + 1 if stuck and kind == before else 0
        self._last, self._furthest = (step, kind), max(step, self._furthest)
        tries = MOST_LOST if lost else 0
        tries = MOST_LIGHTER if error.ran_out is not None else tries
        if self._again <= tries:
            more = f"{self._here + 1} failures came after {step} steps, and the run got no further between them"
            return "" if self._here < MOST_HERE else more
        times = "again" if self._again == 1 else f"{self._again + 1} times in a row"
        return f"the same failure came {times} after {step} steps, so trying once more would not help"
