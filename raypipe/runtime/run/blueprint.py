"""From a plan to a run: what no plan changes, and the pure step from both to everything that workers and loop need.

    blueprint (client) --+
                         +--> assemble --> RunSetup, GenerationSetup (workers), PlanInForce (loop, controller)
    planned -------------+

The driver actor assembles, and threads of the user's process do it alike: nothing here starts or measures anything.
"""

from __future__ import annotations

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
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Timeline
from raypipe.planner.rows import flow_of, flowing_keys, rows_for
from raypipe.planner.segments import train_segments
from raypipe.planner.simulate.serial import simulate
from raypipe.planner.tune import Request, costs_of
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.retuning import retune_setup
from raypipe.runtime.run.spec import PlanInForce, RunSpec

__all__ = ["Assembled", "Blueprint", "Graph", "OneCut", "assemble", "codecs_of", "predicted_step"]


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
    predicted = predicted_step(plan)
    setup = GenerationSetup(
        programs, plan.schedule.wiring.homes, plan.weights, codecs_of(blueprint.pipeline), plan.generation
    )
    return Assembled(
        blueprint.setup,
        setup,
        PlanInForce(
            plan=plan,
            schedules=_schedules(plan, spec.num_samples, spec.num_steps),
            predicted=predicted,
            predicted_step_s=_step_s(plan, predicted, overlaps=blueprint.turns),
            flow=flow_of(plan),
            retune=retune_setup(blueprint.pipeline, planned) if blueprint.turns else None,
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


def predicted_step(plan: Plan) -> Timeline | None:
    """One step that begins and ends with an empty pipeline; None where the plan was made without a profile."""
    found = plan.prediction
    if found is None:
        return None
    key = RowsKey(plan.num_microbatches, update_interval=plan.weights.interval)
    return simulate(rows_for(plan, key), costs_of(found.stages, found.hops))


def _schedules(plan: Plan, num_samples: Mapping[str, int], num_steps: int) -> dict[RowsKey, Schedule]:
    """Rows for every number of micro-batches that the run will meet: the usual one and short last mini-batches."""
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
    return {key: rows_for(plan, key) for key in (*found, *flowing_keys(plan))}
