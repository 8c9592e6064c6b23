"""From a plan to a run: what no plan changes, and the pure step from both to everything that workers and loop need.

    blueprint --plan_for--> planned        (planning.py)
        |                      |
        +------ assemble ------+--> RunSetup, GenerationSetup (workers), PlanInForce (loop, controller)

The driver actor plans and assembles, and threads of the user's process do it alike: nothing here starts or measures
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Timeline
from raypipe.planner.rows import flow_of, flowing_keys, rows_for
from raypipe.planner.segments import train_segments
from raypipe.planner.simulate.serial import simulate
from raypipe.planner.tune import costs_of
from raypipe.runtime.run.controller_config import controller_config
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis
from raypipe.runtime.run.spec import PlanInForce, RunSpec

__all__ = ["Assembled", "Blueprint", "assemble", "codecs_of", "predicted_step"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What no plan of a run changes. It holds no parameter and can be sent anywhere.

    Attributes:
        basis: what its plans are made from; see ``plan_for``.
        setup: what workers know of the run.
        spec: what the loop knows of it.
        turns: whether a controller may turn anything; threads of one process have no links to measure.
    """

    basis: PlanBasis
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
    """Programs, setups, rows and the controller's configuration of a plan; the same wherever it is called.

    Raises:
        PlanError: the plan parts mini-batches in another way than the run, whose bits would change.
    """
    plan, spec = planned.plan, blueprint.spec
    if (plan.minibatch_size, plan.microbatch_size) != (spec.minibatch_size, spec.microbatch_size):
        raise PlanError(
            f"The run has mini-batches of {spec.minibatch_size} samples in micro-batches of {spec.microbatch_size}, "
            f"but the plan made for it has {plan.minibatch_size} in {plan.microbatch_size}. Give minibatch_size and "
            "num_microbatches in PipelineConfig, and install one version of raypipe on all nodes."
        )
    programs = blueprint.basis.recipe.programs(plan.partition.cuts, plan.partition.order)
    predicted = predicted_step(plan)
    setup = GenerationSetup(
        programs,
        plan.schedule.wiring.homes,
        plan.weights,
        codecs_of(blueprint.pipeline),
        plan.generation,
        recompute=plan.recompute,
        lanes=plan.schedule.wiring.lanes,
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
            retune=controller_config(blueprint.pipeline, planned) if blueprint.turns else None,
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
