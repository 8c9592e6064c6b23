"""What a run is to the loop that trains it: its spec, its stages, who watches it, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.config.ray import WorkerRange
from raypipe.engine.checkpoint import FreshOptions
from raypipe.engine.storage import Place
from raypipe.ir.links import LinkEstimate
from raypipe.ir.plan import Plan
from raypipe.ir.report import Numbers, StepRecord, StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Span, Timeline
from raypipe.ir.work_order import Order
from raypipe.planner.control import ControllerConfig, ControllerDecision
from raypipe.planner.rows import rows_for
from raypipe.planner.segments import Flow
from raypipe.runtime.run.checkpoints import CheckpointPolicy
from raypipe.runtime.run.evaluations import EvaluationPolicy
from raypipe.runtime.run.same_run import Settings

__all__ = ["AnyFleet", "Outcome", "PlanInForce", "RunSpec", "Watcher"]


class Watcher(Protocol):
    """Who is told how a run goes; see runtime.journal.Journal."""

    def resumed(self, records: Sequence[StepRecord], step: int, checkpoint: str, source: str) -> None: ...

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None: ...

    def evaluated(self, record: StepRecord) -> None: ...

    def tell(self, **changes: Any) -> None: ...

    def alert(self, message: str) -> None: ...

    def planned(self, plan: PlanInForce) -> None: ...

    def counted(self, metric: str, value: float = 1.0) -> None: ...

    def decided(self, decision: ControllerDecision) -> None: ...

    def estimated(self, links: Sequence[LinkEstimate]) -> None: ...


class AnyFleet(Protocol):
    """Stages that carry out orders: actors or threads."""

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]: ...

    def halt(self) -> None: ...

    def spans(self) -> Sequence[Span]: ...

    def save(self, folder: str) -> None: ...

    def entries(self, folder: str) -> list[dict[str, Any]]: ...

    def restore(self, folder: str, fresh: FreshOptions) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the loop knows of a run, whatever the plan is; small, and without a tensor.

    Attributes:
        name: of the run.
        place: the run's folder.
        config_yaml: saved as config.yaml.
        settings: what the run is, saved as settings.json.
        resume: None goes on where the folder's run is the same, True takes over what may change, False begins anew.
        num_samples: of "train" and perhaps "eval".
        num_steps: of the whole run, those of earlier submissions included.
        seed: of randomness and of the data's order.
        aliases: further names of shared tensors -> the names that they are stored under.
        sums_losses: loss_reduction is "sum".
        checkpoints: when to save, what to keep.
        evaluations: when to evaluate, and when that ends the run.
        max_failures: to survive in one submission, as in ray.train.FailureConfig; -1 is no limit.
        num_workers: that the user offered; those that no plan uses are spares, where failures are to be survived.
        workers: that it may have, where their number may change while it trains; None where it is to stay.
        wanted_workers: by the plan for the most of them.
        copy_interval_steps: every stage keeps a copy of its state in memory after so many steps; None keeps none.
        callbacks: called while it trains, see raypipe.callbacks.
    """

    name: str
    place: Place
    config_yaml: str
    settings: Settings
    num_samples: Mapping[str, int]
    minibatch_size: int
    microbatch_size: int
    num_steps: int
    seed: int
    aliases: Mapping[str, str]
    sums_losses: bool
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    evaluations: EvaluationPolicy = field(default_factory=EvaluationPolicy)
    resume: bool | None = None
    max_failures: int = 0
    num_workers: int | None = None
    workers: WorkerRange | None = None
    wanted_workers: int = 0
    copy_interval_steps: int | None = None
    callbacks: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """What the loop knows of the plan that the workers are configured for.

    Attributes:
        plan: saved as plan.json.
        schedules: lowered rows.
        predicted: the simulated timeline of one step, for the trace; None where the plan was made without a profile.
        predicted_step_s: seconds of one step; of an asynchronous schedule, in the steady state; 0 where unknown.
        flow: of an asynchronous schedule; None runs empty after every step.
        retune: what the controller may turn; None where it is to turn nothing.
    """

    plan: Plan
    schedules: dict[RowsKey, Schedule]
    predicted: Timeline | None
    predicted_step_s: float
    flow: Flow | None = None
    retune: ControllerConfig | None = None

    def rows(self, key: RowsKey) -> Schedule:
        """The lowered rows of this key, made when they are wanted first."""
        if key not in self.schedules:
            self.schedules[key] = rows_for(self.plan, key)
        return self.schedules[key]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        evaluation: the last one, eval_loss and the metrics; empty without eval_data, or where none came yet.
        checkpoint: the last one, empty when a run was stopped before its first step.
        step: optimizer steps done.
        stopped: why the run ended early; empty when it did not.
    """

    evaluation: Numbers
    checkpoint: str
    step: int
    stopped: str = ""
