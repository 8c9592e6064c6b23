"""Everything between the user's arguments and the first actor: data, capture, plan. Nothing is started here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.profiling import Rates
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings
from raypipe.engine.train_mode import note_on_modes, turned_on
from raypipe.engine.trial.loss_check import MANY_ROWS
from raypipe.engine.trial.optimizer_trial import try_optimizers
from raypipe.engine.trial.rehearsal import rehearse_single, takes_one_row
from raypipe.engine.trial.verify import verify
from raypipe.engine.unregistered import note_on_unregistered
from raypipe.errors import ConfigError, DataError
from raypipe.ir.cluster import Cluster
from raypipe.ir.profile import Profile
from raypipe.planner.segments import evaluation_segments
from raypipe.prepare.arguments import Arguments, in_one_paragraph, undisturbed
from raypipe.prepare.compiling import noting_compiled
from raypipe.prepare.identity import model_labels
from raypipe.prepare.inputs import Opened, by_name, example_of, needs_profile, open_arguments, wants_curve
from raypipe.prepare.job import Job
from raypipe.prepare.loss_reduction import check_per_replica, find_reduction
from raypipe.prepare.metrics import try_on_smallest
from raypipe.prepare.profile import (
    optimizer_facts,
    profile_of,
    refuse_other_graph,
    shared_processors,
)
from raypipe.progress import telling
from raypipe.runtime.run.blueprint import codecs_of
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis, decided, plan_for

__all__ = ["prepare", "profile"]

MESSAGE_TIMEOUT_S = 300.0
"""Longest wait for one boundary message; a slower stage is taken for dead."""
_ON_DRAWS = (
    "steps of the optimizer draw random numbers, which are keyed by seed, update and stage: the same plan draws the "
    "same, and another number of stages draws others"
)


@in_one_paragraph()
@undisturbed()
def prepare(
    given: Arguments,
    pipeline: PipelineConfig,
    num_workers: int | None,
    rates: Rates | None = None,
    *,
    cluster: Cluster | None = None,
    profiled: Profile | None = None,
    predict: bool = False,
) -> Job:
    """Open the data, capture the model, profile it where the plan needs that, make the plan.

    Args:
        rates: of the GPUs that stages compute on; None where they compute on CPUs like this one.
        cluster: what to plan for; None for ``num_workers`` equal places.
        profiled: of this model, measured before; None measures here.
        predict: measure for a prediction, even where the plan itself needs no seconds.

    Raises:
        RaypipeError: one paragraph that says what to change.
    """
    found = _opened(given, pipeline, None if cluster else num_workers)
    with telling("finding what the loss averages over"):
        rows = _rows(found, pipeline)
        reduction, counted = find_reduction(found.model, given.loss_fn, found.captured, rows, pipeline)
    check_per_replica(pipeline, reduction)
    here = profiled is None and (predict or needs_profile(pipeline, cluster))
    if here:
        profiled = _measured(found, pipeline, rates, by_size=wants_curve(pipeline))
    basis = dataclasses.replace(
        _basis(given, found, pipeline, cluster, profiled),
        loss_words=counted,
        processors=shared_processors() if here and rates is None else None,
    )
    with telling("planning"):
        planned = plan_for(basis, None if profiled is None else decided(basis))
    sizes = (found.sources["train"].num_samples, planned.plan.minibatch_size, planned.plan.microbatch_size)
    rehearse_single(found.model, found.captured, found.example, *sizes)
    if given.metrics and "eval" in found.sources:
        _try_metrics(given.metrics, found, planned)
    settings = Settings(
        pipeline.seed,
        reduction,
        pipeline.max_grad_norm,
        MESSAGE_TIMEOUT_S,
        pipeline.on_nonfinite,
        pipeline.codec_sums,
        pipeline.shard_optimizer,
        replicated_buffers=pipeline.replicated_buffers,
    )
    job = noting_compiled(_job(given, found, pipeline, basis, planned, settings))
    modes, unregistered = note_on_modes(turned_on(found.model)), note_on_unregistered(found.model)
    notes = [modes, unregistered, _on_forgotten(found.captured.forgotten), _on_extra_state(found.model)]
    notes += [_ON_DRAWS] if job.settings.optimizer_draws else []
    notes += profiled.notes if here and rates and profiled else ()  # whose seconds they are
    return reduce(Job.noting, filter(None, notes), job)


def _try_metrics(metrics: Mapping[str, Any], found: Opened, planned: Planned) -> None:
    """On the smallest micro-batch that an evaluation has with this plan."""
    source, plan = found.sources["eval"], planned.plan
    count = source.num_samples
    cut = evaluation_segments(count, plan.minibatch_size, plan.microbatch_size)
    sizes = [size for segment in cut for size in segment.microbatch_samples]
    columns = tuple(found.example)
    rows_of = lambda size: by_name(columns, source.read(0, 0, size, columns))  # noqa: E731
    try_on_smallest(metrics, found.captured, rows_of, count, sizes)


def _on_forgotten(buffers: Sequence[str]) -> str:
    """What a plan says of buffers that training changes and no checkpoint keeps; empty of none."""
    if not buffers:
        return ""
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    return (
        f"forwards change the buffer {buffers[0]!r}{more}, which is not persistent: no checkpoint holds it, so that a "
        "run that goes on begins with its first value, and does not train what an undisturbed one does. Register it "
        "with persistent=True."
    )


def _on_extra_state(model: torch.nn.Module) -> str:
    """What a plan says of state that modules keep in a form of their own; empty of none."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            return (
                f"no checkpoint holds what get_extra_state() of the module {path!r} ({type(module).__name__}) returns: "
                "checkpoints are tensors by name. Keep it in a buffer, or load them with "
                "model.load_state_dict(..., strict=False) into a model that has it."
            )
    return ""


@in_one_paragraph()
@undisturbed()
def profile(given: Arguments, pipeline: PipelineConfig, num_workers: int | None, rates: Rates | None = None) -> Profile:
    """Seconds and bytes of every operation of the model, on this machine or, where rates are given, on such a GPU.

    Raises:
        RaypipeError: one paragraph that says what to change.
    """
    found = open_arguments(given._replace(eval_data=None), pipeline, num_workers)
    return _measured(found, pipeline, rates, by_size=True)


def _opened(given: Arguments, pipeline: PipelineConfig, num_workers: int | None) -> Opened:
    """What ``open_arguments`` finds, while somebody who waits is told what takes so long."""
    with telling("tracing the model"):
        return open_arguments(given, pipeline, num_workers)


def _measured(found: Opened, pipeline: PipelineConfig, rates: Rates | None, *, by_size: bool) -> Profile:
    return profile_of(
        found.captured, found.example, found.larger,
        by_size=by_size, budget_s=pipeline.profile_budget_s, rates=rates,
    )  # fmt: skip


def _basis(
    given: Arguments, found: Opened, pipeline: PipelineConfig, cluster: Cluster | None, profiled: Profile | None
) -> PlanBasis:
    """What the plan is made from."""
    if profiled is not None:
        refuse_other_graph(found.captured, profiled)
    factor, optimizer_class = optimizer_facts(given.optimizer, found.captured)
    modules = found.model.named_modules(remove_duplicate=False)
    request = found.request
    if wants_curve(pipeline) and not takes_one_row(found.model, found.captured, found.example):
        request = dataclasses.replace(request, least_microbatch=2)
    return PlanBasis(
        found.captured.recipe,
        request,
        profiled,
        cluster,
        factor,
        optimizer_class,
        pipeline.retune_microbatches,
        {path: type(module).__name__ for path, module in modules},
    )


def _rows(found: Opened, pipeline: PipelineConfig) -> Mapping[Any, torch.Tensor]:
    """That the loss is tried on; those of one micro-batch where nothing needs weights or more cannot be read."""
    weighed = pipeline.several_microbatches or found.captured.model.eval is not None
    if weighed and len(next(iter(found.example.values()))) < MANY_ROWS:
        with contextlib.suppress(DataError):  # the step that takes such a row says so, with its number
            return example_of(found.sources["train"], found.with_loss_fn, MANY_ROWS)
    return found.example


def _job(
    given: Arguments, found: Opened, pipeline: PipelineConfig, basis: PlanBasis, planned: Planned, settings: Settings
) -> Job:
    """The stages of the plan, and what starts with them."""
    captured, plan = found.captured, planned.plan
    programs = captured.programs(plan.partition.cuts, plan.partition.order)
    replicated = any(count > 1 for count in plan.partition.replicas)
    how = {"replicated": replicated, "sharded": replicated and pipeline.shard_optimizer}
    drawn = try_optimizers(programs, captured.parameters, given.optimizer, given.lr_scheduler, **how)
    settings = dataclasses.replace(settings, optimizer_draws=drawn)
    example = example_of(found.sources["train"], found.with_loss_fn, plan.microbatch_size)
    return Job(
        basis=basis,
        planned=planned,
        programs=programs,
        tensors={**captured.parameters, **captured.buffers},
        persistent=frozenset(captured.parameters) | captured.persistent,
        example={name: x[: plan.microbatch_size] for name, x in example.items()},
        sources=found.sources,
        settings=settings,
        codecs=codecs_of(pipeline),
        make_optimizer=given.optimizer,
        make_scheduler=given.lr_scheduler,
        aliases=_aliases(found.model),
        check=partial(_check, found, programs, plan.microbatch_size, pipeline),
        model_labels=model_labels(found.model, captured),
        metrics=given.metrics or {},
        evaluated=found.evaluated,
        collate=given.collate_fn,
        unfilled=found.unfilled,
        compile_stages=pipeline.compile_stages,
    )


@undisturbed()
def _check(found: Opened, programs: tuple[StageProgram, ...], size: int, pipeline: PipelineConfig) -> None:
    """Two micro-batches through the user's own module and through the stages, unless verify="off"."""
    found.memory.restore()
    if found.unfilled:  # there is nothing to compute with; the plan has said so
        return
    captured, source = found.captured, found.sources["train"]
    tensors = {**captured.parameters, **captured.buffers}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ConfigError(
            "The model has parameters on the meta device, which hold no numbers. Build it with numbers, give the file "
            "or folder that has them as init_from, or set weights_on='workers', which makes them as its constructor "
            "does."
        )
    if pipeline.verify == "off":
        return
    columns = tuple(found.example)
    rows = source.read(0, 0, min(2 * size, source.num_samples), columns)
    named = rows if isinstance(rows, Mapping) else dict(zip(columns, rows, strict=True))
    first = {name: column[:size] for name, column in named.items()}
    # Too few rows for a second micro-batch of this size: the same ones in the other order.
    full = source.num_samples >= 2 * size
    second = {name: column[size:] if full else column[:size].flip(0) for name, column in named.items()}
    batches = (first, second)
    with telling("comparing the stages with the model"):
        verify(found.model, captured.loss_fn, programs, tensors, batches, pipeline.seed)


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
