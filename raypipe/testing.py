"""Reference training for tests: plain eager PyTorch trains a copy of the user's model on the same micro-batches.

    reference = raypipe.testing.reference(model, optimizer=..., train_data=..., num_steps=5, pipeline=config)
    assert [r.loss for r in trainer.fit(num_steps=5).records] == list(reference.losses)

The reference shares with a pipeline everything that determines the result bit by bit: the order of the samples, the
sizes of micro-batches, the weights of their losses, the keys of random numbers, one intra-op thread. It uses no stage,
no schedule and no gradient accumulator of raypipe. The model is captured only to find what the loss averages over.

The results of a pipeline are bitwise equal, except for a parameter that the model uses several times: a pipeline sums
the gradients of each use over all micro-batches before it adds the uses up; eager PyTorch adds the uses up first. A
model's own loss over the mini-batch (loss_over) is equal up to rounding: the reference computes the mini-batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.capture import capture
from raypipe.capture.own_loss import own_loss
from raypipe.config.pipeline import PipelineConfig
from raypipe.data.open_data import Source, open_data
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler
from raypipe.engine.stage.activation_checkpointing import key_checkpoints
from raypipe.engine.stage.losses import LossCounts, Reduction, loss_weights
from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.engine.stage.module_copy import copy_of
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import ConfigError, DataError
from raypipe.ir.segment import Segment
from raypipe.planner.search import Request, microbatches
from raypipe.planner.segments import Position, next_segment
from raypipe.preflight.loss_on_rows import MANY_ROWS
from raypipe.preflight.loss_weights import find_reduction
from raypipe.prepare.inputs import resolve_defaults

Tensors = dict[str, torch.Tensor]
LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """Result of training with plain PyTorch.

    Attributes:
        model: the trained copy; it shares no memory with the user's model.
        losses, grad_norms: one number per step; gradient norms are those before clipping.
        gradients: for each step, {parameter name: gradient after clipping}; None for a parameter without a gradient.
        parameters, buffers: tensors by name, after the last step.
        skipped: steps (from 0) that the optimizer did not take, because of on_nonfinite="skip".
    """

    model: torch.nn.Module = field(repr=False)
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: tuple[dict[str, torch.Tensor | None], ...] = field(repr=False)
    parameters: Tensors = field(repr=False)
    buffers: Tensors = field(repr=False)
    skipped: tuple[int, ...] = ()


def reference(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    optimizer: MakeOptimizer,
    train_data: Any,
    num_steps: int,
    loss_fn: LossFn | None = None,
    lr_scheduler: MakeScheduler | None = None,
    pipeline: PipelineConfig | None = None,
    microbatches_by_step: Sequence[int] = (),
    collate_fn: Callable[[list[Any]], Any] | None = None,
    device: torch.device | str = "cpu",
) -> Reference:
    """Train a deep copy of the model eagerly; the arguments are those of PipelineTrainer.

    Args:
        pipeline: the fields that count are minibatch_size ("auto" is a DataLoader's batch size), num_microbatches,
            loss_reduction, max_grad_norm, seed, and on_nonfinite="skip". If num_microbatches is "auto",
            partitioner="parameters" and num_stages must be set, from which the number of micro-batches then follows.
        microbatches_by_step: number of micro-batches of every step of a run with retune_microbatches; metrics.parquet
            has it at the end of each step's ``schedule``.
        device: device to compute on, for example "cuda"; a pipeline on such a device gives bitwise equal results.

    Raises:
        ConfigError: the precision is not fp32; the number of micro-batches depends on a profile, or on a number of
            stages that is not given; or microbatches_by_step does not have one number per step.
    """
    config = resolve_defaults(train_data, pipeline or PipelineConfig())
    _check_fields(config, microbatches_by_step, num_steps)
    key_checkpoints()
    trained = copy_of(model if isinstance(model, torch.nn.Module) else model()).train()
    source = open_data(train_data, seed=config.seed, collate=collate_fn)
    minibatch_size, microbatch_size = _sizes(config, source.num_samples)
    reduction = _reduction(trained, source, loss_fn, config, microbatch_size)
    trained.to(device)
    named = [(name, p) for name, p in trained.named_parameters() if p.requires_grad]
    stepper = optimizer(named)
    scheduler = lr_scheduler(stepper) if lr_scheduler else None
    losses, norms, gradients = [], [], []
    skipped: list[int] = []
    with one_thread():
        at = Position()
        for step in range(num_steps):
            if microbatches_by_step:
                microbatch_size = math.ceil(minibatch_size / microbatches_by_step[step])
            segment, at = next_segment(source.num_samples, minibatch_size, microbatch_size, at)
            trained.zero_grad(set_to_none=True)  # also what the optimizer leaves out
            losses.append(float(_accumulate(trained, source, segment, loss_fn, reduction, config.seed, device)))
            norms.append(float(_clip([p for _, p in named], config.max_grad_norm)))
            gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
            if config.on_nonfinite == "skip" and not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                skipped.append(step)
                continue
            stepper.step()
            if scheduler is not None:
                scheduler.step()
    parameters = {name: p.detach() for name, p in trained.named_parameters()}
    buffers = dict(trained.named_buffers())
    return Reference(trained, tuple(losses), tuple(norms), tuple(gradients), parameters, buffers, tuple(skipped))


def _check_fields(config: PipelineConfig, microbatches_by_step: Sequence[int], num_steps: int) -> None:
    if microbatches_by_step and len(microbatches_by_step) != num_steps:
        raise ConfigError(f"microbatches_by_step has {len(microbatches_by_step)} numbers for num_steps={num_steps}.")
    if config.precision != "fp32":
        raise ConfigError(
            f"precision={config.precision!r}: the reference computes in fp32 only. Leave precision out of its pipeline."
        )


def _sizes(config: PipelineConfig, num_samples: int) -> tuple[int, int]:
    """Return (samples of a mini-batch, samples of a micro-batch) by the planner's own rule."""
    fixed = {
        name: None if getattr(config, name) == "auto" else getattr(config, name)
        for name in ("num_stages", "minibatch_size", "num_microbatches")
    }
    split_points = () if isinstance(config.partitioner, str) else tuple(config.partitioner)
    num_stages = fixed["num_stages"] or (len(split_points) + 1 if split_points else None)
    by_rule = config.partitioner == "parameters" and num_stages is not None
    if fixed["num_microbatches"] is None and not by_rule:
        raise ConfigError(
            "The reference cannot know how many micro-batches the pipeline takes: num_microbatches='auto' follows from "
            "the profile. Set num_microbatches in PipelineConfig, or partitioner='parameters' and num_stages."
        )
    request = Request(
        num_stages=num_stages,
        num_workers=None,
        split_points=split_points,
        minibatch_size=fixed["minibatch_size"],
        num_microbatches=fixed["num_microbatches"],
        num_samples=num_samples,
    )
    minibatch_size, microbatch_size, _ = microbatches(request, num_stages or 1)
    return minibatch_size, microbatch_size


def _columns(source: Source, loss_fn: LossFn | None) -> tuple[Any, ...]:
    by_number = loss_fn is not None or all(isinstance(name, int) for name in source.columns)
    return tuple(range(len(source.columns))) if by_number else source.columns


def _reduction(
    model: torch.nn.Module, source: Source, loss_fn: LossFn | None, config: PipelineConfig, microbatch_size: int
) -> Reduction:
    if config.loss_reduction not in ("auto", "per_microbatch") and config.loss_over != "minibatch":
        return config.loss_reduction
    columns = _columns(source, loss_fn)
    example: Any = source.read(0, 0, min(max(2, microbatch_size), source.num_samples), columns)
    captured = capture(model, example, columns, loss_fn, evaluates=False)
    several = example
    with suppress(DataError):  # mini-batches of several sizes, as PipelineTrainer does
        several = source.read(0, 0, min(max(MANY_ROWS, 2 * microbatch_size), source.num_samples), columns)
    rows = dict(several) if isinstance(several, Mapping) else dict(zip(columns, several, strict=True))
    return find_reduction(model, loss_fn, captured, rows, config).reduction


def _accumulate(
    model: torch.nn.Module,
    source: Source,
    segment: Segment,
    loss_fn: LossFn | None,
    reduction: Reduction,
    seed: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Run forward and backward of the mini-batch of ``segment``, one micro-batch at a time; return its loss.

    Gradients are added to the ``grad`` of the model's parameters.
    """
    columns = _columns(source, loss_fn)
    whole = source.read(segment.epoch, segment.offset, segment.minibatch_samples, columns)
    sizes = segment.microbatch_samples
    if isinstance(reduction, WholeMinibatch) and loss_fn is None:  # the model cannot compute its loss from parts
        reduction, sizes = "mean", (sum(sizes),)
    weights = loss_weights(reduction, sizes, _counted(whole, columns, loss_fn, reduction, sizes))
    whole = pytree.tree_map(lambda tensor: tensor.to(device), whole)
    total: torch.Tensor | None = None
    outputs: list[Any] = []
    for index, weight in enumerate(weights):
        at = sum(sizes[:index])
        cut = slice(at, at + sizes[index])
        key = RandomKey(seed, segment.first_step, segment.first_microbatch + index)
        with KeyedRandomness(key), _made_on(device):
            output, target = _forward(model, whole, cut, loss_fn)
        if isinstance(reduction, WholeMinibatch):
            outputs.append(output)
            continue
        if weight == 0.0:  # it went through the model, for its buffers, but an average over nothing is nan
            continue
        loss = (loss_fn(output, target) if loss_fn is not None else own_loss(model, output)) * weight
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    if isinstance(reduction, WholeMinibatch) and loss_fn is not None:
        return _over_minibatch(outputs, lambda joined: loss_fn(joined, whole[-1]), reduction)
    assert total is not None
    return total


def _over_minibatch(
    outputs: Sequence[Any], loss_of: Callable[[Any], torch.Tensor], rule: WholeMinibatch
) -> torch.Tensor:
    """Compute one loss over the joined outputs of all micro-batches, then run each micro-batch's backward in order.

    Args:
        outputs: output of each micro-batch.
        loss_of: (joined output) -> loss.
        rule: joins the outputs.
    """
    leaves = [[x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)] for output in outputs]
    cut = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), list(outputs))
    loss = loss_of(rule.join_returned(cut))
    loss.backward()
    for roots, output in zip(leaves, cut, strict=True):
        grads = [x.grad for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        known = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        if known:
            torch.autograd.backward([root for root, _ in known], [grad for _, grad in known])
    return loss.detach()


def _counted(
    whole: Any, columns: Sequence[Any], loss_fn: LossFn | None, reduction: Reduction, sizes: Sequence[int]
) -> Any:
    """Select the data in which the reduction counts the items of the loss.

    Returns:
        For LossCounts, a dict of columns for each micro-batch; otherwise the targets of the whole mini-batch, or None
        if the columns have no "labels".
    """
    if isinstance(reduction, LossCounts):
        named = whole if isinstance(whole, Mapping) else dict(zip(columns, whole, strict=True))
        split = {name: tensor.split(list(sizes)) for name, tensor in named.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(len(sizes))]
    if loss_fn is not None:
        return whole[-1]
    return whole.get("labels") if isinstance(whole, Mapping) else None


def _made_on(device: torch.device | str) -> AbstractContextManager[object]:
    """Create tensors on the given device by default while the context lasts, as in a pipeline."""
    return nullcontext() if torch.device(device).type == "cpu" else torch.device(device)


def _forward(model: torch.nn.Module, whole: Any, cut: slice, loss_fn: LossFn | None) -> tuple[Any, Any]:
    if isinstance(whole, Mapping):
        return model(**{name: tensor[cut] for name, tensor in whole.items()}), None
    parts = [tensor[cut] for tensor in whole]
    if loss_fn is None:
        return model(*parts), None
    return model(*parts[:-1]), parts[-1]


def _clip(parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
    if max_norm is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
