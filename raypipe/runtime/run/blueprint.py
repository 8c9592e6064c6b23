"""From a plan to a run: what no plan changes, and the pure step from both to everything that workers and loop need.

    blueprint (client) --+
                         +--> assemble --> RunSetup, GenerationSetup (workers), PlanInForce (loop, controller)
    planned -------------+

The driver actor assembles, and threads of the user's process do it alike: nothing here starts or measures anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage import StageProgram
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Phase, RowsKey
from raypipe.ir.timeline import Timeline
from raypipe.planner.schedule.asynchronous import finite, minibatches_to_drain, part
from raypipe.planner.schedule.forward import forward_only
from raypipe.planner.schedule.validate import lowered_and_checked
from raypipe.planner.segments import Flow, train_segments
from raypipe.planner.simulate.serial import simulate
from raypipe.planner.tune import Request, build_schedule, costs_of
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.retuning import retune_setup
from raypipe.runtime.run.spec import PlanInForce, RunSpec

__all__ = ["Assembled", "Blueprint", "Graph", "OneCut", "PlanRows", "assemble", "codecs_of"]


class Graph(Protocol):
    """A captured model that can be cut: ``engine.capture.Capture``, or what travels in its place."""

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]: ...


@dataclass(frozen=True, slots=True)
class OneCut:
    """A captured model that was cut already, and can be cut in no other way."""

    stages: tuple[StageProgram, ...]
    cuts: tuple[int, ...]
    order: tuple[int, ...] = ()

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]:
        """The stages.

        Raises:
            PlanError: other cuts are asked for.
        """
        if (tuple(cuts), tuple(order)) != (self.cuts, self.order):
            raise PlanError(f"The model was cut at {list(self.cuts)} before it travelled, and not at {list(cuts)}.")
        return self.stages


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What no plan of a run changes. It holds no parameter and can be sent anywhere.

    Attributes:
        graph: the model.
        request: what the planner knows of the configuration, settled.
        setup: what workers know of the run.
        spec: what the loop knows of it.
        turns: whether a controller may turn anything; threads of one process have no links to measure.
    """

    graph: Graph
    request: Request
    pipeline: PipelineConfig
    setup: RunSetup
    spec: RunSpec
    turns: bool = True


class Assembled(NamedTuple):
    """What workers, loop and controller take."""

    run: RunSetup
    setup: GenerationSetup
    plan: PlanInForce


def assemble(blueprint: Blueprint, planned: Planned) -> Assembled:
    """Programs, setups, rows and the controller's configuration of a plan; the same wherever it is called."""
    plan, spec = planned.plan, blueprint.spec
    programs = blueprint.graph.programs(plan.partition.cuts, plan.partition.order)
    first = programs[0].first_trainable
    rows = PlanRows(plan, blueprint.request, first)
    predicted = rows.predicted()
    setup = GenerationSetup(
        programs, plan.schedule.wiring.homes, plan.weights, codecs_of(blueprint.pipeline), plan.generation
    )
    return Assembled(
        blueprint.setup,
        setup,
        PlanInForce(
            plan=plan,
            schedules=_schedules(rows, spec.num_samples, spec.num_steps),
            predicted=predicted,
            predicted_step_s=_step_s(plan, predicted, overlaps=blueprint.turns),
            flow=rows.flow,
            retune=retune_setup(blueprint.pipeline, blueprint.request, planned, first) if blueprint.turns else None,
            first_trainable=first,
        ),
    )


def _step_s(plan: Plan, predicted: Timeline | None, *, overlaps: bool) -> float:
    """Seconds of one step as the plan predicts them; 0 where it was made without a profile.

    Args:
        overlaps: whether a step may begin before the one before it has ended on every stage, as between processes.
    """
    if plan.prediction is None or predicted is None:
        return 0.0
    return plan.prediction.step_s if overlaps or plan.weights.interval is not None else predicted.makespan_s


def codecs_of(pipeline: PipelineConfig) -> Codecs:
    """That were configured; of "auto", what a run begins with."""
    names = (pipeline.codec_forward, pipeline.codec_backward)
    return Codecs(*(Codec("none" if name == "auto" else name) for name in names))


@dataclass(frozen=True, slots=True)
class PlanRows:
    """Rows of a plan for any segment.

    Attributes:
        first_trainable: lowest stage with a backward.
    """

    plan: Plan
    request: Request
    first_trainable: int

    @property
    def flow(self) -> Flow | None:
        """How mini-batches follow each other without a flush; None for a synchronous schedule."""
        interval = self.plan.weights.interval
        if interval is None:
            return None
        warmups = tuple(map(len, self.plan.schedule.prologue))
        return Flow(interval, minibatches_to_drain(self.plan.num_microbatches, warmups))

    def predicted(self) -> Timeline | None:
        """One step that begins and ends with an empty pipeline; None where the plan was made without a profile."""
        found = self.plan.prediction
        if found is None:
            return None
        key = RowsKey(self.plan.num_microbatches, update_interval=self.plan.weights.interval)
        return simulate(self.rows(key), costs_of(found.stages, found.hops))

    def rows(self, key: RowsKey) -> Schedule:
        """Lowered and checked rows of a segment that begins and ends with an empty pipeline."""
        wiring = self.plan.schedule.wiring
        if not key.training:
            return forward_only(wiring.placement, key.num_microbatches)
        if key.update_interval is None:
            # A mini-batch smaller than the others runs by itself in any case.
            alone = self.flow is not None
            request = dataclasses.replace(self.request, schedule="1f1b", slack=None) if alone else self.request
            schedule = build_schedule(request, wiring.num_stages, key.num_microbatches, self.first_trainable)
        else:
            schedule = finite(self.plan.schedule, key.num_minibatches)
        return lowered_and_checked(schedule)

    def flowing(self) -> dict[RowsKey, Schedule]:
        """Rows of all segments of a schedule that runs on without a flush; none of a synchronous one."""
        flow = self.flow
        if flow is None:
            return {}
        count, drained, interval = self.plan.num_microbatches, flow.num_to_drain, flow.interval
        wholes = (RowsKey(count, n, update_interval=interval) for n in range(1, max(1, drained) + 1))
        found = {key: self.rows(key) for key in wholes}
        if drained:
            lowered = lowered_and_checked(self.plan.schedule)
            for phase, completed in ((Phase.FILL, 1), (Phase.STEADY, 1), (Phase.DRAIN, drained)):
                found[RowsKey(count, completed, phase, update_interval=interval)] = part(lowered, phase)
        return found


def _schedules(rows: PlanRows, num_samples: Mapping[str, int], num_steps: int) -> dict[RowsKey, Schedule]:
    """Rows for every number of micro-batches that the run will meet: the usual one and short last mini-batches."""
    plan = rows.plan
    lengths = {"train": min(num_samples["train"], num_steps * plan.minibatch_size)}
    if "eval" in num_samples:
        lengths["eval"] = num_samples["eval"]
    found: dict[RowsKey, None] = {}
    for mode, samples in lengths.items():
        per_epoch = min(samples, num_samples.get(mode, 0))
        for segment, _ in train_segments(per_epoch, plan.minibatch_size, plan.microbatch_size, 1):
            found[segment.rows(training=mode == "train")] = None
        rest = num_samples.get(mode, 0) % plan.minibatch_size
        if rest:
            found[RowsKey(-(-rest // plan.microbatch_size), training=mode == "train")] = None
    return {key: rows.rows(key) for key in found} | rows.flowing()
