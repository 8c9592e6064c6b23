"""Everything between the user's arguments and the first actor: data, capture, plan. Nothing is started here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.capture import Capture
from raypipe.engine.optimizer_trial import try_optimizers
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.engine.verify import verify
from raypipe.errors import ConfigError, PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.columns import workspace_lines
from raypipe.planner.control import Room, rooms_of, unknown_rooms
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.tune import (
    Decision,
    Request,
    decide,
    make_partition,
    make_plan,
    plan_of,
    seconds_by_count,
)
from raypipe.prepare.arguments import in_one_paragraph
from raypipe.prepare.identity import model_labels
from raypipe.prepare.inputs import Opened, example_of, needs_profile, open_arguments, wants_curve
from raypipe.prepare.job import Job
from raypipe.prepare.loss_reduction import find_reduction
from raypipe.prepare.profile import (
    crowded_notes,
    further_of,
    optimizer_factor,
    profile_of,
    refuse_other_graph,
    speed_notes,
    stale_notes,
)
from raypipe.prepare.stage_words import stage_words
from raypipe.runtime.run.blueprint import codecs_of

__all__ = ["prepare", "profile"]

MESSAGE_TIMEOUT_S = 300.0
"""Longest wait for one boundary message; a slower stage is taken for dead."""
ONE_SIZE = "retune_microbatches has no effect: only one size of micro-batches is possible or was measured."


@in_one_paragraph()
def prepare(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    optimizer: MakeOptimizer,
    lr_scheduler: MakeScheduler | None,
    train_data: Any,
    eval_data: Any,
    pipeline: PipelineConfig,
    num_workers: int | None,
    cluster: Cluster | None = None,
    profiled: Profile | None = None,
    *,
    predict: bool = False,
) -> Job:
    """Open the data, capture the model, profile it where the plan needs that, make the plan.

    Args:
        cluster: what to plan for; None for ``num_workers`` equal places.
        profiled: of this model, measured before; None measures here.
        predict: measure for a prediction, even where the plan itself needs no seconds.

    Raises:
        RaypipeError: one paragraph that says what to change.
    """
    found = open_arguments(model, loss_fn, train_data, eval_data, pipeline, None if cluster else num_workers)
    captured, request = found.captured, found.request
    reduction, counted = find_reduction(found.model, loss_fn, captured, found.example, pipeline)
    here = profiled is None and (predict or needs_profile(pipeline, cluster))
    if here:
        profiled = profile_of(captured, found.example, found.larger, by_size=wants_curve(pipeline))
    counts: tuple[tuple[int, float], ...] = ()
    if profiled is None:
        partition = make_partition(captured.graph, request)
        programs = captured.programs(partition.cuts)
        request = dataclasses.replace(request, ties=_ties(programs))
        plan = make_plan(request, partition, programs[0].first_trainable, _notes(captured, programs))
        rooms = unknown_rooms(len(programs))
    else:
        refuse_other_graph(captured, profiled)
        factor = optimizer_factor(optimizer, captured)
        decision = _decided(request, profiled, factor, cluster)
        if here and wants_curve(pipeline):
            read = partial(example_of, found.sources["train"], found.with_loss_fn)
            further = further_of(captured, profiled, decision.microbatch_size, read)
            if further is not profiled:
                profiled, decision = further, _decided(request, further, factor, cluster)
        partition = decision.partition
        programs = captured.programs(partition.cuts, partition.order)
        request = dataclasses.replace(decision.request, ties=_ties(programs))
        decision = dataclasses.replace(decision, request=request)
        notes = _notes(captured, programs)
        if cluster is not None:
            notes += speed_notes(profiled)
        elif here:
            notes += crowded_notes(len({device for stage in partition.stages for device in stage.devices}))
        plan = plan_of(decision, programs[0].first_trainable, notes)
        rooms = _rooms(decision)
        if pipeline.retune_microbatches:
            sizes = decision.minibatch_size, decision.num_microbatches, request.least_microbatch
            counts = seconds_by_count(profiled, *sizes)
    try_optimizers(programs, captured.parameters, optimizer, lr_scheduler)
    plan = _with_shares(plan, captured, programs)
    still = [ONE_SIZE] if pipeline.retune_microbatches and len(counts) < 2 else []
    plan = dataclasses.replace(
        plan,
        notes=(*plan.notes, *stale_notes(plan, optimizer, captured), *still),
        reasons=(
            *stage_words(found.model, captured.graph, partition),
            *plan.reasons,
            *_found(programs, counted, () if profiled is None else profiled.notes),
        ),
    )
    example = example_of(found.sources["train"], found.with_loss_fn, plan.microbatch_size)
    return Job(
        plan=plan,
        programs=programs,
        tensors={**captured.parameters, **captured.buffers},
        persistent=frozenset(captured.parameters) | captured.persistent,
        example={name: x[: plan.microbatch_size] for name, x in example.items()},
        sources=found.sources,
        settings=Settings(
            pipeline.seed,
            reduction,
            pipeline.max_grad_norm,
            MESSAGE_TIMEOUT_S,
            pipeline.on_nonfinite,
        ),
        codecs=codecs_of(pipeline),
        make_optimizer=optimizer,
        make_scheduler=lr_scheduler,
        request=request,
        aliases=_aliases(found.model),
        rooms=rooms,
        check=partial(_check, found, programs, plan.microbatch_size, pipeline),
        model_labels=model_labels(found.model, captured),
        microbatch_seconds=counts,
    )


@in_one_paragraph()
def profile(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    train_data: Any,
    pipeline: PipelineConfig,
    num_workers: int | None,
) -> Profile:
    """Seconds and bytes of every operation of the model, on this machine.

    Raises:
        RaypipeError: one paragraph that says what to change.
    """
    found = open_arguments(model, loss_fn, train_data, None, pipeline, num_workers)
    return profile_of(found.captured, found.example, found.larger, by_size=True)


def _check(found: Opened, programs: tuple[StageProgram, ...], size: int, pipeline: PipelineConfig) -> None:
    """Two micro-batches through the user's own module and through the stages, unless verify="off"."""
    found.memory.restore()
    if pipeline.verify == "off":
        return
    captured, source = found.captured, found.sources["train"]
    tensors = {**captured.parameters, **captured.buffers}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ConfigError(
            "verify='first_step' runs the model once, but it has parameters on the meta device, which hold no numbers. "
            "Build it with numbers, or set verify='off' to train what was captured unseen."
        )
    columns = tuple(found.example)
    rows = source.read(0, 0, min(2 * size, source.num_samples), columns)
    named = rows if isinstance(rows, Mapping) else dict(zip(columns, rows, strict=True))
    first = {name: column[:size] for name, column in named.items()}
    # Too few rows for a second micro-batch of this size: the same ones in the other order.
    full = source.num_samples >= 2 * size
    second = {name: column[size:] if full else column[:size].flip(0) for name, column in named.items()}
    batches = (first, second)
    verify(found.model, captured.loss_fn, programs, tensors, batches, pipeline.seed)


def _decided(request: Request, profiled: Profile, factor: float, cluster: Cluster | None) -> Decision:
    known = dataclasses.replace(request, optimizer_factor=factor, least_microbatch=_least_microbatch(profiled))
    return decide(known, profiled, cluster)


def _rooms(decision: Decision) -> tuple[Room, ...]:
    memory = decision.limits.memory
    if not memory.spec.of_kind.turned:
        return unknown_rooms(decision.partition.num_stages)
    graph, partition = decision.graph, decision.partition
    order = partition.order or range(len(graph.nodes))
    lines = [workspace_lines(graph, order[stage.start : stage.stop]) for stage in partition.stages]
    limits = [stage.limit_bytes for stage in decision.prediction.stages]
    return rooms_of(memory_of(graph, partition, memory), memory, limits, lines)


def _least_microbatch(profiled: Profile) -> int:
    """The fewest samples that the model ran with; 1 where one size was tried only."""
    sizes = [size for size, _ in profiled.seconds_by_size]
    return min(sizes) if len(sizes) > 1 else 1


def _with_shares(plan: Plan, captured: Capture, programs: tuple[StageProgram, ...]) -> Plan:
    """The plan with each stage's share of what learns, where stages clip their own norms.

    Raises:
        PlanError: stages that do not wait for each other share a parameter.
    """
    interval = plan.weights.interval
    if interval is None:
        return plan
    shared = sorted({name for program in programs for name in program.shared_with})
    if shared and interval < len(programs):
        raise PlanError(
            f"{shared[0]!r} belongs to several stages, which add its gradients before every update; with one every "
            f"{interval} micro-batches they would wait for each other all the time. Take schedule='2bw', an "
            f"update_interval of at least {len(programs)}, or split points that keep its uses on one stage."
        )
    owned = [
        sum(captured.parameters[name].numel() for name in program.trainable if name not in program.shared_with)
        for program in programs
    ]
    total = sum(owned) or 1
    shares = tuple(count / total for count in owned)
    # Whoever shares a parameter exchanges gradients at every update, and with them waits anyway.
    alone = plan.weights.norm_per_stage and not shared
    return dataclasses.replace(
        plan,
        weights=dataclasses.replace(plan.weights, shares=shares, norm_per_stage=alone),
        schedule=dataclasses.replace(
            plan.schedule, wiring=dataclasses.replace(plan.schedule.wiring, norm_per_stage=alone)
        ),
        spec=plan.spec and dataclasses.replace(plan.spec, overlap=alone),
    )


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    wanted = model.state_dict().keys()
    for name, tensor in named:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name and name in wanted:
            found[name] = canonical
    return found


def _ties(programs: tuple[StageProgram, ...]) -> bool:
    return any(program.shared_with for program in programs)


def _found(programs: tuple[StageProgram, ...], counted: str, profile_notes: Sequence[str]) -> list[tuple[str, str]]:
    """What was found on the way, for whoever wants to know all of it."""
    found = [("loss", counted)] if counted else []
    shared = sorted({name for program in programs for name in program.shared_with})
    if shared:
        found.append(("shared", f"several stages use {', '.join(shared)} and add up its gradients before every step"))
    return found + [("profile", note) for note in profile_notes]


def _notes(captured: Capture, programs: tuple[StageProgram, ...]) -> list[str]:
    notes = []
    frozen = len(captured.parameters) - len(captured.trainable)
    if frozen:
        notes.append(f"{frozen} of {len(captured.parameters)} parameters are frozen and stay as they are.")
    unused = [name for name in captured.trainable if name not in programs[0].num_sites]
    if unused:
        notes.append(f"Never used by forward, so never trained: {', '.join(sorted(unused)[:5])}.")
    return notes
