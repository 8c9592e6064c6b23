"""Everything between the user's arguments and the first actor: data, capture, plan. Nothing is started here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.optimizer_trial import try_optimizers
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.engine.verify import verify
from raypipe.errors import ConfigError
from raypipe.ir.cluster import Cluster
from raypipe.ir.profile import Profile
from raypipe.prepare.arguments import in_one_paragraph
from raypipe.prepare.identity import model_labels
from raypipe.prepare.inputs import Opened, example_of, needs_profile, open_arguments, wants_curve
from raypipe.prepare.job import Job
from raypipe.prepare.loss_reduction import find_reduction
from raypipe.prepare.profile import (
    optimizer_facts,
    profile_of,
    refuse_other_graph,
    shared_processors,
)
from raypipe.progress import ProfilingBar
from raypipe.runtime.run.blueprint import codecs_of
from raypipe.runtime.run.planning import PlanBasis, decided, plan_for

__all__ = ["prepare", "profile"]

MESSAGE_TIMEOUT_S = 300.0
"""Longest wait for one boundary message; a slower stage is taken for dead."""


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
    bar = ProfilingBar()
    bar.say("tracing the model")
    try:
        found = open_arguments(model, loss_fn, train_data, eval_data, pipeline, None if cluster else num_workers)
    finally:
        bar.close()
    captured = found.captured
    reduction, counted = find_reduction(found.model, loss_fn, captured, found.example, pipeline)
    here = profiled is None and (predict or needs_profile(pipeline, cluster))
    if here:
        profiled = profile_of(
            captured, found.example, found.larger, by_size=wants_curve(pipeline), budget_s=pipeline.profile_budget_s
        )
    if profiled is not None:
        refuse_other_graph(captured, profiled)
    factor, optimizer_class = optimizer_facts(optimizer, captured)
    basis = PlanBasis(
        captured.recipe,
        found.request,
        profiled,
        cluster,
        factor,
        optimizer_class,
        pipeline.retune_microbatches,
        {path: type(module).__name__ for path, module in found.model.named_modules(remove_duplicate=False)},
        counted,
        shared_processors() if here else None,
    )
    decision = None if profiled is None else decided(basis)
    planned = plan_for(basis, decision)
    plan = planned.plan
    programs = captured.programs(plan.partition.cuts, plan.partition.order)
    try_optimizers(programs, captured.parameters, optimizer, lr_scheduler)
    example = example_of(found.sources["train"], found.with_loss_fn, plan.microbatch_size)
    return Job(
        basis=basis,
        planned=planned,
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
        aliases=_aliases(found.model),
        check=partial(_check, found, programs, plan.microbatch_size, pipeline),
        model_labels=model_labels(found.model, captured),
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
    return profile_of(found.captured, found.example, found.larger, by_size=True, budget_s=pipeline.profile_budget_s)


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
