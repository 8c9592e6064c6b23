"""Types that describe a run to its loop: spec, plan, fleet of stages, watcher, outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from raypipe.config.early_stopping import EarlyStopping
from raypipe.config.ray import WorkerRange
from raypipe.engine.decoding import DecodePipeline, DecodeProgram
from raypipe.engine.io.checkpoint import FreshOptions, SampleOrder
from raypipe.engine.io.storage import Place
from raypipe.engine.setup import GenerationSetup
from raypipe.ir.communication import LinkEstimate
from raypipe.ir.plan import Plan
from raypipe.ir.report import Numbers, StepRecord, StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.controller import ControllerConfig, ControllerDecision, MemoryBudget
from raypipe.planner.search import Request
from raypipe.planner.segments import Flow, rows_for
from raypipe.run.generate_loop import Generation
from raypipe.run.status import Alert, Stages


class Watcher(Protocol):
    """Protocol of an object that records a run's progress; see run.journal.Journal."""

    def resumed(
        self, records: Sequence[StepRecord], step: int, checkpoint: str, source: str, stages: Stages
    ) -> None: ...

    def step(self, record: StepRecord, reports: Sequence[StepReport], stages: Stages) -> None: ...

    def evaluated(self, record: StepRecord) -> None: ...

    def update(self, **changes: Any) -> None: ...

    def alert(self, kind: str, message: str, step: int | None = None, in_a_row: int = 0) -> None: ...

    @property
    def alerts(self) -> tuple[Alert, ...]: ...

    def planned(self, plan: PlanInForce) -> None: ...

    def counted(self, metric: str, value: float = 1.0) -> None: ...

    def decided(self, decision: ControllerDecision) -> None: ...

    def estimated(self, links: Sequence[LinkEstimate]) -> None: ...


class AnyFleet(Protocol):
    """Protocol of a fleet: the stages of a run, in actors or threads, which execute orders (one or a few steps)."""

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]: ...

    def halt(self) -> None: ...

    def makers(self, reports: Sequence[StepReport]) -> Stages: ...

    def spans(self) -> Sequence[Span]: ...

    def holds(self, step: int) -> bool:
        """Return True if, after a failed ``run``, all stages hold the state after exactly ``step`` optimizer steps."""

    def save(self, folder: str) -> None: ...

    def entries(self, folder: str) -> list[dict[str, Any]]: ...

    def restore(self, folder: str, fresh: FreshOptions) -> None: ...

    def decoding(
        self, programs: Sequence[DecodeProgram], placement: Sequence[int]
    ) -> AbstractContextManager[DecodePipeline]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Policy of checkpoints: when they are saved, and which are kept.

    Attributes:
        interval_steps: steps between two checkpoints; None saves one every run.checkpoints.AUTO_INTERVAL_S seconds.
        num_to_keep, score_attribute, score_order: as in ray.train.CheckpointConfig.
    """

    interval_steps: int | None = None
    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """Policy of evaluations: interval, metrics, early stopping.

    Attributes:
        interval_steps: see PipelineConfig.eval_interval_steps.
        names: names of all numbers that an evaluation returns.
        early_stopping: condition to end the run early; None trains to the last step.
    """

    interval_steps: int | None = None
    names: tuple[str, ...] = ("eval_loss",)
    early_stopping: EarlyStopping | None = None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identity of a run, as JSON values by label.

    Attributes:
        fixed: values that cannot change in a run that has begun.
        free: values that ``resume=True`` may change.
        versions: versions of raypipe and torch. Other versions alone are not another run, but they change the
            comparison of the rest: another version may derive another graph from the same model.
        given: user input from which other values are derived: code and options of the model, loss_reduction.
    """

    fixed: Mapping[str, Any]
    free: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Description of a run for its loop, independent of the plan; small, and without weights.

    Attributes:
        place: folder of the run.
        config_yaml: text that is saved as config.yaml.
        settings: identity of the run, saved as settings.json.
        resume: None resumes if the folder's run is the same, True accepts new free settings, False begins anew.
        num_samples: number of samples of "train", and of "eval" if there is eval_data.
        minibatch_size, microbatch_size: in samples.
        num_steps: optimizer steps of the whole run, earlier submissions included.
        seed: seed of all random numbers, and of the order of the data.
        aliases: further names of shared tensors -> names under which they are stored.
        sums_losses: True if loss_reduction is "sum".
        checkpoints: when to save, what to keep.
        evaluations: when to evaluate, and when that ends the run.
        max_failures: failures that one submission survives, as in ray.train.FailureConfig; -1 is no limit.
        num_workers: number of workers that the user offers. If failures are survived, workers that the plan does not
            use are spares.
        workers: range of the number of workers of an elastic run; None if the number is fixed.
        wanted_workers: workers used by the first plan, which was made for the most workers that the user offers.
        copy_interval_steps: minimum steps between in-memory copies of every stage's state; None takes no copies.
        callbacks: objects that are called while the run trains, see raypipe.callbacks.
        generations: (number of a callback, generation for its ``prompts``), made at every evaluation.
    """

    name: str
    place: Place
    config_yaml: str
    settings: RunIdentity
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
    generations: tuple[tuple[int, Generation], ...] = ()

    @property
    def sample_order(self) -> SampleOrder:
        return SampleOrder(self.seed, self.minibatch_size, self.microbatch_size, self.num_samples["train"])


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan, with further results of planning that the controller needs.

    Attributes:
        budgets: memory budget of each stage, within which the controller may change the schedule.
        microbatch_seconds: (number of micro-batches, seconds) for each number that the controller may choose, as in
            planner.controller.ControllerConfig; empty if the controller may not change the number.
    """

    plan: Plan
    budgets: tuple[MemoryBudget, ...]
    microbatch_seconds: tuple[tuple[int, float], ...] = ()


class RequestedSize(NamedTuple):
    """Size that the user requested by ``handle.resize``.

    Attributes:
        num_stages: number of stages.
        workers: number of workers that a plan of this size uses.
        replicas: replicas by stage; empty for one each.
    """

    num_stages: int
    workers: int
    replicas: tuple[int, ...] = ()

    def of(self, request: Request) -> Request:
        """Return a run's planning request with this size in place of the configured one."""
        return replace(request, num_stages=self.num_stages, split_points=(), replicas=self.replicas or 1)


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """Plan for which the workers are configured, and everything that is derived from it.

    Attributes:
        planned: plan, which is saved as plan.json, and its memory budgets.
        setup: configuration of the workers.
        schedules: actions of all workers, by kind of segment; ``rows`` adds further kinds.
        predicted: simulated timeline of one step, for the trace; None if the plan was made without a profile.
        predicted_step_s: predicted seconds of one step, in the steady state if asynchronous; 0 if unknown.
        flow: flow of mini-batches of an asynchronous schedule; None if the pipeline drains after every step.
        retune: configuration of the controller; None runs without a controller.
    """

    planned: Planned
    setup: GenerationSetup
    schedules: dict[RowsKey, Schedule]
    predicted: Timeline | None
    predicted_step_s: float
    flow: Flow | None = None
    retune: ControllerConfig | None = None

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def rows(self, key: RowsKey) -> Schedule:
        """Return the actions of all workers for the kind of segment ``key``; they are derived at the first call."""
        if key not in self.schedules:
            self.schedules[key] = rows_for(self.plan, key)
        return self.schedules[key]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run that ended without an error.

    Attributes:
        evaluation: last eval_loss and metrics; empty without eval_data, or before the first evaluation.
        checkpoint: path of the last checkpoint; "" if the run was stopped before its first step.
        step: optimizer steps done.
        stopped: reason why the run ended before its last step; "" if it did not.
    """

    evaluation: Numbers
    checkpoint: str
    step: int
    stopped: str = ""
