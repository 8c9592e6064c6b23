"""Planning in the client: opens the data, captures and profiles the model, and makes the plan. Starts no actor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.device_functions import notes_of, why_no_graphs
from raypipe.engine.optim.state import Settings
from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.errors import CaptureError, ConfigError, DataError, PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import pruned
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule import Op
from raypipe.planner.search import microbatches
from raypipe.planner.segments import evaluation_segments
from raypipe.preflight.arguments import Arguments, in_one_paragraph, undisturbed
from raypipe.preflight.dry_run import refuse_other_sizes, rehearse_single, takes_one_row
from raypipe.preflight.joined_loss import held_bytes, loss_bytes, loss_seconds, outputs_bytes, without_loss
from raypipe.preflight.loss_on_rows import MANY_ROWS
from raypipe.preflight.loss_weights import check_per_replica, find_reduction
from raypipe.preflight.metric_trial import try_on_smallest
from raypipe.preflight.module import note_on_modes, turned_on
from raypipe.preflight.optimizer import try_optimizers
from raypipe.prepare.identity import model_labels
from raypipe.prepare.inputs import (
    Opened,
    by_name,
    example_of,
    is_tried_without_model,
    needs_profile,
    open_arguments,
    wants_curve,
)
from raypipe.prepare.job import Job
from raypipe.prepare.model_code import code_labels
from raypipe.prepare.model_profile import (
    optimizer_facts,
    profile_of,
    refuse_other_graph,
    shared_processors,
)
from raypipe.prepare.policies import refuse_correction
from raypipe.profiling import Rates
from raypipe.progress import shown_while
from raypipe.run.plans.blueprint import codecs_of
from raypipe.run.plans.planning import PlanBasis, changing_nodes, plan_for
from raypipe.run.spec import Planned

MESSAGE_TIMEOUT_S = 300.0
"""Seconds to wait for a boundary message; a slower stage is assumed dead."""
COMPILED = (
    "compile_stages={backend!r}: stages are compiled before their first step, and again for every other size of "
    "micro-batch, which takes seconds; predicted seconds are of stages that are not compiled."
)
_ON_DRAWS = (
    "steps of the optimizer draw random numbers, which are keyed by seed, update and stage: the same plan draws the "
    "same, and another number of stages draws others"
)


@in_one_paragraph()
@undisturbed()
def prepare(
    arguments: Arguments,
    pipeline: PipelineConfig,
    num_workers: int | None,
    rates: Rates | None = None,
    *,
    cluster: Cluster | None = None,
    profiled: Profile | None = None,
    predict: bool = False,
) -> Job:
    """Open the data, capture the model, profile it if the plan needs that, and make the plan.

    Args:
        num_workers: number of workers to plan for; None leaves it to the planner.
        rates: speed of the GPUs on which stages compute; None if they compute on CPUs like this one.
        cluster: cluster to plan for; None for ``num_workers`` equal workers.
        profiled: profile of this model; None measures a profile here if one is needed.
        predict: True to measure a profile even if the plan itself needs none, so that step time can be predicted.

    Raises:
        RaypipeError: no run is possible with these arguments; the message has the fix.
    """
    with shown_while("tracing the model") as show:
        opened = open_arguments(arguments, pipeline, None if cluster else num_workers, show)
    with shown_while("finding what the loss averages over"):
        rows = _rows(opened, pipeline)
        found = find_reduction(opened.model, arguments.loss_fn, opened.captured, rows, pipeline)
        reduction, counted = found.reduction, found.note
        opened = dataclasses.replace(opened, captured=found.captured or opened.captured)
    check_per_replica(pipeline, reduction)
    if profiled is not None and profiled.whole_loss and not isinstance(reduction, WholeMinibatch):
        raise PlanError(
            "The profile is without the loss, as for a loss over the whole mini-batch, but this plan computes it for "
            "every micro-batch. Make it anew with `raypipe profile`."
        )
    whole, loss_s, sent = isinstance(reduction, WholeMinibatch), 0.0, 0
    if whole:
        opened = _flushed_before_loss(opened, pipeline)
    here = profiled is None and (predict or needs_profile(pipeline, cluster))
    if here:
        profiled = _measured(opened, pipeline, rates, reduction, by_size=wants_curve(pipeline))
    if isinstance(reduction, WholeMinibatch) and profiled is not None:
        profiled = _with_loss(profiled, opened, reduction, bounded=cluster is not None)
        sent = outputs_bytes(opened.captured, reduction, _minibatch_size(opened))
        if profiled.whole_loss and rates is None:
            loss_s = loss_seconds(opened.captured, reduction, _minibatch_size(opened), rows)
    basis = dataclasses.replace(
        _basis(arguments, opened, pipeline, cluster, profiled),
        loss_words=counted,
        whole_loss=whole,
        loss_s=loss_s,
        outputs_bytes=sent,
        processors=shared_processors() if here and rates is None else None,
    )
    with shown_while("planning"):
        planned = plan_for(basis)
    refuse_correction(planned.plan)
    sizes = (opened.sources["train"].num_samples, planned.plan.minibatch_size, planned.plan.microbatch_size)
    if opened.captured.one_size is not None:
        refuse_other_sizes(opened.captured.one_size, {k: x.num_samples for k, x in opened.sources.items()}, *sizes[1:])
    if planned.plan.microbatch_size > 1 or not is_tried_without_model(opened.model, opened.captured, pipeline):
        rehearse_single(opened.model, opened.captured, opened.example, *sizes)
    if arguments.metrics and "eval" in opened.sources:
        _try_metrics(arguments.metrics, opened, planned.plan)
    job = _noting_compiled(_job(arguments, opened, pipeline, basis, planned, reduction))
    if pipeline.cuda_graphs:
        _refuse_graphs(job)
    notes = _notes(job, counted)
    notes += profiled.notes if here and rates and profiled else ()  # with the device of the seconds
    return reduce(Job.noting, filter(None, notes), job)


_ON_ONE_SIZE = "forward takes one number of samples only: every micro-batch of training and evaluation has {}."


def _flushed_before_loss(opened: Opened, pipeline: PipelineConfig) -> Opened:
    """Return the opened arguments with a request for a loss over the mini-batch: all forwards precede the backwards."""
    schedule = "gpipe" if pipeline.schedule == "auto" else opened.request.schedule
    return dataclasses.replace(opened, request=dataclasses.replace(opened.request, schedule=schedule))


def _minibatch_size(opened: Opened) -> int:
    return microbatches(opened.request, opened.request.requested_stages or 1)[0]


def _with_loss(profiled: Profile, opened: Opened, rule: WholeMinibatch, *, bounded: bool) -> Profile:
    """Add the memory of a loss over the whole mini-batch to the profile, as workspace of the last operation.

    If the last stage may recompute, the outputs and targets that it holds until the loss are added too.

    Args:
        bounded: True if devices may have memory limits.
    """
    request, samples = opened.request, _minibatch_size(opened)
    nbytes = loss_bytes(opened.captured, rule, samples)
    if nbytes is None:
        note = "the loss does not run on the meta device, so that its memory over a mini-batch is not planned."
        return dataclasses.replace(profiled, notes=(*profiled.notes, note))
    held, bounded = held_bytes(opened.captured, rule, samples), bounded or request.memory_limit_bytes is not None
    again = request.recompute[-1] if isinstance(request.recompute, tuple) else request.recompute
    replicas = request.replicas[-1] if isinstance(request.replicas, tuple) else request.replicas
    if again or (again is None and bounded) or replicas is None:
        # A stage that recomputes counts as holding one micro-batch, but holds the outputs of all.
        nbytes += held
    else:
        # A replica counts as holding its own micro-batches. A later plan may have a replica for each lane.
        nbytes += held - held // (max(replicas, request.lanes or 1) if bounded else replicas)
    *others, last = profiled.graph.nodes
    last = dataclasses.replace(last, workspace=pruned((*last.workspace, (nbytes, 0))))
    return dataclasses.replace(profiled, graph=dataclasses.replace(profiled.graph, nodes=(*others, last)))


def _notes(job: Job, counted: str) -> list[str]:
    """List notes on the model, some of them empty; ``counted`` is a sentence on what the loss averages over."""
    opened = job.opened
    return [
        note_on_modes(turned_on(opened.model)),
        _ON_ONE_SIZE.format(opened.captured.one_size) if opened.captured.one_size else "",
        opened.sizes.note(),
        _on_checks(opened.captured.checks, weightless=bool(opened.unfilled)),
        _on_forgotten(opened.captured.forgotten),
        _on_extra_state(opened.model),
        _ON_DRAWS if job.settings.optimizer_draws else "",
        counted if job.pipeline.loss_reduction == "per_microbatch" or job.basis.whole_loss else "",
    ]


def _try_metrics(metrics: Mapping[str, Any], opened: Opened, plan: Plan) -> None:
    """Try the metrics on the smallest micro-batch that an evaluation has with this plan."""
    source = opened.sources["eval"]
    count = source.num_samples
    cut = evaluation_segments(count, plan.minibatch_size, plan.microbatch_size)
    sizes = [size for segment in cut for size in segment.microbatch_samples]
    columns = tuple(opened.example)
    rows_of = lambda size: by_name(columns, source.read(0, 0, size, columns))  # noqa: E731
    try_on_smallest(metrics, opened.captured, rows_of, count, sizes)


def _on_checks(lines: Sequence[str], *, weightless: bool) -> str:
    """Return a note on checks in forward that stages leave out; "" without such checks.

    Args:
        weightless: True if this process holds no weights, so that the first mini-batch cannot be checked either.
    """
    if not lines:
        return ""
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    first = "" if weightless else "the first mini-batch is checked, in plain PyTorch, and "
    return f"forward checks values at {lines[0]}{more} and raises if they are wrong: {first}stages leave the check out."


def _on_forgotten(buffers: Sequence[str]) -> str:
    """Return a note on buffers that training changes and no checkpoint holds; "" if ``buffers`` is empty."""
    if not buffers:
        return ""
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    return (
        f"forwards change the buffer {buffers[0]!r}{more}, which is not persistent: no checkpoint holds it, so that a "
        "run that goes on begins with its first value, and does not train what an undisturbed one does. Register it "
        "with persistent=True."
    )


def _on_extra_state(model: torch.nn.Module) -> str:
    """Return a note on state from get_extra_state, which no checkpoint holds; "" without such state."""
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
def profile(
    arguments: Arguments, pipeline: PipelineConfig, num_workers: int | None, rates: Rates | None = None
) -> Profile:
    """Measure seconds and bytes of every operation on this machine.

    Args:
        rates: speed of a GPU for which seconds are estimated instead; None for this CPU.

    Raises:
        RaypipeError: the model cannot be captured or run; the message has the fix.
    """
    opened = open_arguments(arguments._replace(eval_data=None), pipeline, num_workers)
    reduction = None
    with contextlib.suppress(ConfigError, CaptureError, DataError):  # the plan may be of a loss over the mini-batch
        found = find_reduction(opened.model, arguments.loss_fn, opened.captured, _rows(opened, pipeline), pipeline)
        opened, reduction = dataclasses.replace(opened, captured=found.captured or opened.captured), found.reduction
    return _measured(opened, pipeline, rates, reduction, by_size=True)


def _measured(
    opened: Opened, pipeline: PipelineConfig, rates: Rates | None, reduction: Any = None, *, by_size: bool
) -> Profile:
    """Measure a profile, without a loss that ``reduction`` computes over mini-batches; ``by_size``: see profile_of."""
    whole = isinstance(reduction, WholeMinibatch)
    profiled = profile_of(
        without_loss(opened.captured, reduction) if whole else opened.captured, opened.example, opened.larger,
        by_size=by_size and opened.captured.one_size is None, budget_s=pipeline.profile_budget_s, rates=rates,
    )  # fmt: skip
    return dataclasses.replace(profiled, whole_loss=whole)


def _basis(
    arguments: Arguments, opened: Opened, pipeline: PipelineConfig, cluster: Cluster | None, profiled: Profile | None
) -> PlanBasis:
    """Collect the input of the plan."""
    if profiled is not None:
        refuse_other_graph(opened.captured, profiled)
    factor, optimizer_class = optimizer_facts(arguments.optimizer, opened.captured)
    modules = opened.model.named_modules(remove_duplicate=False)
    recipe, least = opened.captured.recipe, 1
    if wants_curve(pipeline) and not takes_one_row(opened.model, opened.captured, opened.example):
        least = 2
    sizes = [] if profiled is None else [size for size, _ in profiled.seconds_by_size]
    if len(sizes) > 1:  # the smallest number of samples with which the model ran
        least = max(least, min(sizes))
    masked = profiled is not None and opened.request.replicas is None and not opened.request.replicated_buffers
    request = dataclasses.replace(
        opened.request,
        optimizer_factor=factor,
        least_microbatch=least,
        changing=changing_nodes(recipe) if masked else (),
    )
    return PlanBasis(
        recipe,
        request,
        profiled,
        cluster,
        optimizer_class,
        pipeline.retune_microbatches,
        {path: type(module).__name__ for path, module in modules},
    )


def _rows(opened: Opened, pipeline: PipelineConfig) -> Mapping[Any, torch.Tensor]:
    """Return the samples on which the loss is tried: one micro-batch, or MANY_ROWS if micro-batches are weighted."""
    weighed = pipeline.several_microbatches or opened.captured.model.eval is not None
    count = max(MANY_ROWS, 2 * (opened.captured.one_size or 0))
    if weighed and len(next(iter(opened.example.values()))) < count:
        with contextlib.suppress(DataError):  # the step that reads a bad row reports its number
            return example_of(opened.sources["train"], opened.with_loss_fn, count)
    return opened.example


def _multiplying_rates(plan: Plan) -> str | None:
    """Name the field because of which a stage of the plan multiplies its learning rates; None if none does."""
    if plan.weights.correction == "discount":
        return "stale_correction='discount'"
    scaled = any(plan.weights.rate(stage) != 1.0 for stage in range(plan.partition.num_stages))
    return "update_interval='per_replica'" if scaled else None


def _job(
    arguments: Arguments, opened: Opened, pipeline: PipelineConfig, basis: PlanBasis, planned: Planned, reduction: Any
) -> Job:
    """Create the stages of the plan, try their optimizers, and return the job."""
    captured, plan = opened.captured, planned.plan
    programs = captured.programs(plan.partition.cuts, plan.partition.order)
    replicated = any(count > 1 for count in plan.partition.replicas)
    drawn = try_optimizers(
        programs,
        captured.parameters,
        arguments.optimizer,
        arguments.lr_scheduler,
        replicated=replicated,
        sharded=replicated and pipeline.shard_optimizer,
        rates_by=_multiplying_rates(plan),
    )
    sizes, train = opened.sizes, opened.sources["train"]
    example = sizes.rows(train, tuple(opened.example), plan.microbatch_size, sizes.largest)
    return Job(
        arguments,
        pipeline,
        opened,
        basis,
        planned,
        programs,
        tensors={**captured.parameters, **captured.buffers},
        example=by_name(tuple(opened.example), example),
        sources=opened.sources,
        settings=Settings(
            pipeline.seed,
            reduction,
            pipeline.max_grad_norm,
            MESSAGE_TIMEOUT_S,
            pipeline.on_nonfinite,
            pipeline.codec_sums,
            pipeline.shard_optimizer,
            replicated_buffers=pipeline.replicated_buffers,
            optimizer_draws=drawn,
        ),
        codecs=codecs_of(pipeline),
        model_labels=model_labels(opened.model, captured),
        model_code=code_labels(opened.model),
        unfilled=opened.unfilled,
    )


def _noting_compiled(job: Job) -> Job:
    """Add notes on compiled stages to the job's plan; return the job unchanged if compilation is off."""
    backend = job.pipeline.compile_stages
    if backend == "off":
        return job
    if any(action.op is Op.I for worker in range(job.num_workers) for action in job.plan.schedule.row(worker)):
        raise PlanError(
            f"compile_stages={backend!r} is not possible with this schedule, which runs a backward in two parts: that "
            "of a compiled stage is one piece. Take schedule='slack' or '1f1b', or compile_stages='off'."
        )
    notes = notes_of(job.programs)
    if len(notes) == len(job.programs):
        raise PlanError(
            f"compile_stages={backend!r} would have no effect: no stage can be compiled. {notes[0]} Leave it out, or "
            "give a model without dropout that is no nn.Sequential."
        )
    return reduce(Job.noting, [COMPILED.format(backend=backend), *notes], job)


def _refuse_graphs(job: Job) -> None:
    """Raise PlanError if a stage of the plan cannot be recorded as CUDA graphs."""
    for program in job.programs:
        if reason := why_no_graphs(program.train):
            raise PlanError(
                f"cuda_graphs=True is not possible: stage {program.index} cannot be recorded, because {reason}. Set "
                "cuda_graphs=False, or give a traced model without torch.cond and custom operations."
            )
    if varying := job.opened.sizes.varying:
        column, dimension = min(varying, key=str)
        raise PlanError(
            f"cuda_graphs=True is not possible with this data: size {dimension} of column {column!r} differs between "
            "mini-batches, and a graph has one shape. Pad to one length, as collate_fn=raypipe.data.Pad(length) does, "
            "or set cuda_graphs=False."
        )
    if any(job.plan.recompute):
        raise PlanError(
            "cuda_graphs=True is not possible with this plan, which recomputes activations: a graph keeps them. Take "
            "smaller micro-batches (num_microbatches), set recompute='never', or cuda_graphs=False."
        )
