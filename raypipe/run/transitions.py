"""Transitions of a run's stages (recovery, resize, move): types, results, protocol of runtime/fleet/recovery.py."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from raypipe.errors import RanOut
from raypipe.ir.report import StepReport
from raypipe.planner.repartition import Offer
from raypipe.planner.segments import Position
from raypipe.run.plans.replanning import Replanning
from raypipe.run.requests import Resize
from raypipe.run.spec import PlanInForce
from raypipe.run.status import Stages

Steps = Sequence[list[list[StepReport]]]
"""Reports of completed orders, as ``AnyFleet.run`` yields them."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of a recovery or another transition, after which all stages have the state of the same step.

    Attributes:
        step: optimizer steps done in this state.
        source: description of the copies or the checkpoint from which the state was loaded, for events.
        position: data position saved in the checkpoint; None if the state comes from in-memory copies.
        replaced: names of workers whose process was replaced; empty if only links had failed. In a move: the hosts that
            workers have left.
        seconds: duration of each phase of the recovery, by name.
        stages: host, process id and versions of each worker, for the status.
        plan: new plan in force; None if it is unchanged.
        moved_bytes: bytes of state that workers read from copies of other workers.
        lost: names of workers without which the run continues.
        stopped: True if the run was stopped while it waited for workers. Then no stage is ready, and the run ends at
            this checkpoint.
    """

    step: int
    source: str
    position: Position | None = None
    replaced: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages: Stages = ()
    plan: PlanInForce | None = None
    moved_bytes: int = 0
    stopped: bool = False
    lost: tuple[str, ...] = ()

    def to_event(self) -> dict[str, Any]:
        """Return the fields of the event in events.jsonl."""
        plan: dict[str, Any] = {}
        if self.plan is not None:
            counts = self.plan.plan.partition.replicas
            plan = {"num_stages": len(counts)} | ({"replicas": list(counts)} if max(counts) > 1 else {})
        times = {f"{name}_s": round(took_s, 3) for name, took_s in self.seconds.items()}
        lost = {"lost": list(self.lost)} if self.lost else {}
        return {"replaced": list(self.replaced), **lost, **plan, **times, "moved_bytes": self.moved_bytes}


class Laps:
    """Stopwatch for consecutive phases, started when it is created.

    Attributes:
        laps_s: seconds of each phase, by its name.
    """

    def __init__(self) -> None:
        self._then_s = time.monotonic()
        self.laps_s: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Record the time since the last call, or since the start, as the duration of phase ``name``."""
        now_s = time.monotonic()
        self.laps_s[name] = now_s - self._then_s
        self._then_s = now_s


class Join(NamedTuple):
    """Request that spare workers join stages that lack replicas."""


class Move(NamedTuple):
    """Request that stages move away from nodes that are about to be removed.

    Attributes:
        nodes: Ray's ids of the nodes.
    """

    nodes: Collection[str]


Change = Join | Move | Resize | Offer
"""Request for a transition between two steps, when all stages have the state of the same step."""


class Transitions(Protocol):
    """Transitions of a run's stages to another plan, other workers or an older step.

    Attributes:
        failures: number of failures in this submission so far; a driver restarted by Ray continues the count.
        replanning: replanner, which searches for better partitions during training; None if the partition is fixed.
    """

    failures: int
    replanning: Replanning | None

    def keep_copy(self, step: int) -> None:
        """Have every stage copy its present state to memory, and wait until all have.

        The pipeline must be empty. Sending the copies to other workers goes on afterwards.

        Args:
            step: number of optimizer steps that every stage has completed, with which the copy is labelled.
        """

    def lighten(self, ran_out: RanOut) -> None:
        """Make the plan of the next rollback, in which the worker that ran out of memory holds less.

        Raises:
            PlanError: no such plan exists; the message has worker, bytes and fields.
        """

    def catch_up(self, step: int) -> Steps | None:
        """Bring the surviving replicas, after a failure, to the newest step that any of them has completed.

        Args:
            step: number of steps that every stage has completed, according to the reports that the loop has processed.

        Returns:
            Reports of the steps since then. None if that is impossible: the run has no replicas, a stage has no worker
            left, or the reports of a step are lost.

        Raises:
            StageError, LinkError: something failed meanwhile.
        """

    def roll_back(self, steps: Collection[int]) -> Recovered:
        """Roll all stages back, after a failure, to the state of the newest step that all of them can load.

        A rollback that waits for workers ends early if the run is stopped; see ``Recovered.stopped``.

        Args:
            steps: steps of the in-memory copies whose data position is known. If no copy can be loaded, the stages load
                the newest checkpoint.

        Raises:
            PlanError: too few workers became available before the deadline.
            StageError, LinkError: the rollback failed; another one must follow.
        """

    def regroup(self, step: int) -> Recovered:
        """Continue without the lost replicas, after ``catch_up`` has brought the others to ``step``.

        Raises:
            StageError, LinkError: the transition failed half-way; a rollback must follow.
        """

    def carry_out(self, change: Change, step: int) -> Recovered | None:
        """Apply a change of the stages between two steps; return None if nothing has to change.

        Args:
            step: steps that every stage has done.

        Raises:
            PlanError: no such plan exists, or no workers for it; the run can continue unchanged.
            StageError, LinkError: the transition failed half-way; a rollback must follow.
        """
