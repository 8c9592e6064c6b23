"""Blueprint of a run (its part that does not depend on a plan), and ``assemble``, which joins it with a plan.

    blueprint --plan_for--> planned        (planning.py)
        |                      |
        +------ assemble ------+--> PlanInForce: setup of the workers, schedules, controller

The driver actor and runs in threads of the user's process both use it: nothing here starts or measures anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raypipe.config.combinations import turns_schedule
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.host import codec_cost
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.schedule_spec import kinds_to_search
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Timeline
from raypipe.planner.controller import Choice, CodecCost, ControllerConfig
from raypipe.planner.search import costs_of
from raypipe.planner.segments import flow_of, flowing_keys, rows_for, train_segments
from raypipe.planner.simulator import simulate
from raypipe.run.plans.planning import PlanBasis
from raypipe.run.spec import PlanInForce, Planned, RequestedSize, RunSpec

FORWARD_CODECS = ("bf16", "int8")
BACKWARD_CODECS = ("bf16",)
"""Codecs that "auto" may choose, the most accurate first; gradients need more accurate codecs than activations."""


def permitted_codecs(pipeline: PipelineConfig) -> tuple[tuple[CodecCost, ...], tuple[CodecCost, ...]]:
    """Measure the codecs of activations and of gradients that "auto" permits; empty for a direction without "auto"."""
    forward, backward = (
        tuple(CodecCost(name, *codec_cost(name)) for name in names) if setting == "auto" else ()
        for setting, names in ((pipeline.codec_forward, FORWARD_CODECS), (pipeline.codec_backward, BACKWARD_CODECS))
    )
    return forward, backward


def controller_config(pipeline: PipelineConfig, planned: Planned) -> ControllerConfig | None:
    """Return the configuration of a run's controller; None if the controller could change nothing.

    It can change nothing with one stage, with an asynchronous schedule, with several stages on a worker, if no setting
    is "auto", and with retune_interval_steps=0.
    """
    spec = planned.plan.spec
    # A loss over the whole mini-batch keeps the schedule.
    kinds = turns_schedule(pipeline) and (spec is None or spec.kind in kinds_to_search(pipeline.schedule))
    codecs = "auto" in (pipeline.codec_forward, pipeline.codec_backward)
    never = pipeline.retune_interval_steps == 0 or not (kinds or codecs or planned.microbatch_seconds)
    if never or planned.plan.partition.num_stages < 2 or spec is None or not spec.of_kind.turned:
        return None
    thresholds = {
        "retune_interval_steps": pipeline.retune_interval_steps,
        "link_drift_threshold": pipeline.link_drift_threshold,
        "min_gain": pipeline.min_gain,
    }
    return ControllerConfig(
        pipeline.schedule if kinds else "fixed",
        Choice(spec),
        planned.budgets,
        *permitted_codecs(pipeline),
        planned.microbatch_seconds,
        **{name: value for name, value in thresholds.items() if value != "auto"},  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Part of a run that does not depend on a plan. It has no parameters of the model and can be sent to any process.

    Attributes:
        basis: input of the run's plans; see ``plan_for``.
        pipeline: configuration of the pipeline.
        setup: description of the run for workers.
        spec: description of the run for the loop.
        turns: True if a controller may change settings during training; False for stages in threads, without links.
        resources: resources of one worker, as in ScalingConfig.
    """

    basis: PlanBasis
    pipeline: PipelineConfig
    setup: RunSetup
    spec: RunSpec
    turns: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)


class Charter(NamedTuple):
    """Input of a run's driver actor. The stages store it too, so that another driver can continue the run.

    Attributes:
        planned: plan in force; for a new run, its first plan.
        requested: size of the last resize; None without a resize.
        failures: number of failures that the run has survived since it was submitted.
    """

    blueprint: Blueprint
    planned: Planned
    requested: RequestedSize | None = None
    failures: int = 0


def assemble(blueprint: Blueprint, planned: Planned) -> PlanInForce:
    """Derive all that the workers and the training loop need to execute a plan.

    The result has stage programs and the workers' setup, schedules, the predicted step, and the controller's
    configuration. It depends on the arguments only, so all processes compute equal results.
    """
    plan, spec = planned.plan, blueprint.spec
    # Other sizes would change bits; later plans keep them.
    assert (plan.minibatch_size, plan.microbatch_size) == (spec.minibatch_size, spec.microbatch_size)
    programs = blueprint.basis.recipe.programs(plan.partition.cuts, plan.partition.order)
    predicted = predicted_step(plan)
    return PlanInForce(
        planned,
        setup=generation_setup(plan, programs, codecs_of(blueprint.pipeline)),
        schedules=_schedules(plan, spec.num_samples, spec.num_steps),
        predicted=predicted,
        predicted_step_s=_step_s(plan, predicted, overlaps=blueprint.turns),
        flow=flow_of(plan),
        retune=controller_config(blueprint.pipeline, planned) if blueprint.turns else None,
    )


def generation_setup(plan: Plan, programs: Sequence[StageProgram], codecs: Codecs) -> GenerationSetup:
    """Create the workers' configuration for a plan."""
    wiring = plan.schedule.wiring
    return GenerationSetup(
        programs, wiring.homes, plan.weights, codecs, plan.generation, recompute=plan.recompute, lanes=wiring.lanes
    )


def _step_s(plan: Plan, predicted: Timeline | None, *, overlaps: bool) -> float:
    """Return the predicted seconds of one step; 0 if the plan was made without a profile.

    Args:
        predicted: simulated timeline of one step that begins and ends with an empty pipeline.
        overlaps: True if the next step may begin on some stages before the previous one has ended on all, as with
            stages in separate processes; False for stages in threads, which run one step after the other.
    """
    if plan.prediction is None or predicted is None:
        return 0.0
    if overlaps or plan.weights.interval is not None:
        return plan.prediction.step_s
    return predicted.makespan_s + plan.prediction.loss_s


def codecs_of(pipeline: PipelineConfig) -> Codecs:
    """Return the codecs with which a run begins: the configured ones, and no codec for "auto"."""
    names = (pipeline.codec_forward, pipeline.codec_backward)
    return Codecs(*(Codec("none" if name == "auto" else name) for name in names))


def predicted_step(plan: Plan) -> Timeline | None:
    """Simulate one step that begins and ends with an empty pipeline; None if the plan was made without a profile."""
    prediction = plan.prediction
    if prediction is None:
        return None
    key = RowsKey(plan.num_microbatches, update_interval=plan.weights.interval)
    return simulate(rows_for(plan, key), costs_of(prediction.stages, prediction.hops))


def _schedules(plan: Plan, num_samples: Mapping[str, int], num_steps: int) -> dict[RowsKey, Schedule]:
    """Make the schedules for all numbers of micro-batches that occur: an epoch's last mini-batch may have fewer."""
    lengths = {"train": min(num_samples["train"], num_steps * plan.minibatch_size)}
    if "eval" in num_samples:
        lengths["eval"] = num_samples["eval"]
    keys: dict[RowsKey, None] = {}
    for mode, samples in lengths.items():
        for segment, _ in train_segments(samples, plan.minibatch_size, plan.microbatch_size, 1):
            keys[segment.rows(training=mode == "train")] = None
        rest = num_samples[mode] % plan.minibatch_size
        if rest:
            keys[RowsKey(-(-rest // plan.microbatch_size), training=mode == "train")] = None
    return {key: rows_for(plan, key) for key in (*keys, *flowing_keys(plan))}
