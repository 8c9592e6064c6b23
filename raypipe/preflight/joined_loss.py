"""Choice of a loss over the whole mini-batch (loss_over), for losses that no weights of micro-batches make.

The last stage then joins the outputs of all micro-batches and computes the loss once (``engine.stage.minibatch_loss``).
That is exact if the joined outputs are those of the mini-batch, which a few real rows show:

    whole     loss_fn(model(rows 0 1 2 3), targets 0 1 2 3), and its gradients
    joined    loss_fn(model(rows 0 1) and model(rows 2 3), targets 0 1 2 3)

A model that returns its own loss is divided in front of the operations that mix samples (capture/loss_tail.py), which
then take the place of the loss_fn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from raypipe.capture import Capture, TracedModel
from raypipe.config.pipeline import PipelineConfig
from raypipe.data.item_randomness import own_generators
from raypipe.engine.stage.minibatch_loss import LossTail, WholeMinibatch
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.stage import GraphFunction
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import CaptureError, ConfigError
from raypipe.ir.precision import FP32
from raypipe.preflight.loss_gradients import Loss, LossGradients
from raypipe.preflight.loss_on_rows import (
    Grouping,
    LossTrial,
    is_large,
    misfit,
    rows_through,
)
from raypipe.preflight.random_outputs import bare_outputs, with_random_weights
from raypipe.preflight.without_draws import DrawsError, without_draws
from raypipe.profiling.held_outputs import HeldOutputs
from raypipe.profiling.operations import Moment, seconds_between
from raypipe.profiling.workspace import LiveBytes
from raypipe.user_lines import short

LossFn = Callable[[Any, Any], torch.Tensor]
Columns = Mapping[Any, torch.Tensor]

NOTE = (
    "the loss is computed once over the whole mini-batch (loss_over='minibatch'){why}: all forwards of a step precede "
    "its backwards (schedule 'gpipe'), and eval_loss is a mean over the mini-batches of an evaluation"
)
_LOWER = (torch.float16, torch.bfloat16)
TIMED_BYTES = 1 << 27
"""Most bytes of a loss that is timed; it then takes at most tenths of a second."""
TIMES = 4
"""Runs of a loss that is timed, of which the first warms up."""
WHY = ", because no weights of micro-batches make it"


def why_not(pipeline: PipelineConfig) -> str:
    """Explain why the loss cannot be computed over the whole mini-batch, with the fix; "" if it can."""
    if pipeline.schedule not in ("auto", "gpipe") and pipeline.several_microbatches:
        return f"schedule={pipeline.schedule!r} begins backwards before the last forward. Set schedule='gpipe'"
    return ""


def minibatch_rule(
    model: torch.nn.Module, loss_fn: LossFn, captured: Capture, rows: Columns, seed: int
) -> WholeMinibatch | None:
    """Return the rule that joins outputs of micro-batches; None if the joined outputs are not those of the mini-batch.

    Args:
        rows: columns by name, with which the rule is tried if the model has weights.
    """
    train = evaluation = _dims(captured, "train")
    if isinstance(captured.model, TracedModel) and captured.model.eval is not None:
        evaluation = _dims(captured, "eval")
    if train is None or evaluation is None:
        return None
    rule = WholeMinibatch({"train": train, "eval": evaluation})
    blocks = _most_blocks(captured, rule)
    several = any(number > 1 for by_output in blocks.values() for number in by_output)
    # Untried, an output without samples may be an average over them, and one with several views may have any order.
    untried = None if several or None in (*train, *evaluation) else rule
    if any(p.is_meta for p in model.parameters()):
        return untried
    whole = LossTrial(model, loss_fn, seed).losses(rows)
    if whole is None:  # it draws random numbers, or fails
        return untried
    for one in (rule, replace(rule, blocks=blocks)):
        parts = LossTrial(model, loss_fn, seed, one).losses(rows)
        joined = None if parts is None else Grouping((len(next(iter(rows.values()))),), (rows,), (parts.whole,))
        if joined is not None and not misfit(whole, joined, [1.0]):
            return one
    return None


def _most_blocks(captured: Capture, rule: WholeMinibatch) -> dict[str, tuple[int, ...]]:
    """Return the number of blocks (``join_blocks``) of each output by mode, if each block has all samples once."""
    found, evaluates = {}, not isinstance(captured.model, TracedModel) or captured.model.eval is not None
    for mode, dims in rule.joined.items():
        outputs = _outputs(captured, 4, mode if evaluates else "train") or ()
        sizes = [4 if dim is None else x.shape[dim] for x, dim in zip(outputs, dims, strict=True)]
        found[mode] = tuple(size // 4 if size % 4 == 0 else 1 for size in sizes)
    return found


def over_minibatch(
    model: torch.nn.Module, loss_fn: LossFn | None, captured: Capture, rows: Columns, pipeline: PipelineConfig
) -> tuple[WholeMinibatch, Capture]:
    """Return the rule for a loss over the mini-batch, and the capture whose last stage computes that loss.

    The capture is ``captured`` itself for a loss_fn; that of a model with its own loss gets a ``LossTail``.

    Args:
        rows: columns by name; a few of the rows go through the model with gradients.

    Raises:
        ConfigError: the loss cannot be computed over the mini-batch; names the fix.
    """
    reason = why_not(pipeline)
    if captured.one_size is not None:
        reason = "the model takes one number of samples only, so that its outputs for a mini-batch cannot be compared"
    if reason:
        raise ConfigError(f"loss_over='minibatch' is not possible: {reason}.")
    if loss_fn is None:
        return _over_tail(model, captured, rows, pipeline)
    few = {name: x[: rows_through(model)] for name, x in rows.items()}
    rule = minibatch_rule(model, loss_fn, captured, few, pipeline.seed)
    if rule is None:
        raise ConfigError(
            "loss_over='minibatch' is not possible: the model's outputs for a mini-batch are not those of its "
            "micro-batches one after the other, as behind a BatchNorm with track_running_stats=False or an average "
            "over the batch. Let the loss_fn compute what depends on several samples, or set "
            f"{pipeline.one_microbatch}."
        )
    return rule, captured


def _over_tail(
    model: torch.nn.Module, captured: Capture, rows: Columns, pipeline: PipelineConfig
) -> tuple[WholeMinibatch, Capture]:
    """Divide a model that returns its own loss; for result and errors see ``over_minibatch``."""
    few = {name: x[: rows_through(model)] for name, x in rows.items()}
    try:
        divided = captured.with_loss_tail(_generic(model, captured), few if is_large(model) else rows)
        train = evaluation = _dims(divided, "train")
        if divided.model.eval is not None:
            evaluation = _dims(divided, "eval")
        if train is None or evaluation is None:
            raise CaptureError("what the loss compares has no dimension of samples")
        dims, tail = {"train": train, "eval": evaluation}, divided.recipe.loss
        assert isinstance(tail, LossTail)
        one = {mode: (1,) * (len(by_output) - len(tail.blocks[mode])) for mode, by_output in dims.items()}
        rule = WholeMinibatch(dims, {mode: (*tail.blocks[mode], *one[mode]) for mode in dims})
        if any(p.is_meta for p in model.parameters()):
            model = with_random_weights(model)
        whole = LossTrial(model, None, pipeline.seed).losses(few)
        loss = None if whole is None else _try_joined(model, divided, rule, few, pipeline.seed, training=whole.training)
        if whole is None or loss is None:
            raise CaptureError(
                "it cannot be compared with the model's own, which draws random numbers, changes buffers, or fails here"
            )
        joined = Grouping((len(next(iter(few.values()))),), (few,), (loss,))
        if wrong := misfit(whole, joined, [1.0]):
            off = "".join(f", the gradient of {name!r} off by {100 * by:.2g} %" for name, by in wrong.gradients[:1])
            raise CaptureError(f"over {joined.sizes[0]} rows in two micro-batches it is {wrong.total:.5g}{off}")
    except Exception as error:  # noqa: BLE001  (the user's operations, on other values)
        reason = str(error) if isinstance(error, CaptureError) else short(error).rstrip(".")
        raise ConfigError(
            "loss_over='minibatch' is not possible: the model returns its own loss, and its forward cannot be divided "
            f"in front of what compares samples: {reason}. Let forward return what the loss needs, and give the "
            f"loss as loss_fn, or set {pipeline.one_microbatch}."
        ) from None
    return rule, divided


def _try_joined(
    model: torch.nn.Module, captured: Capture, rule: WholeMinibatch, rows: Columns, seed: int, *, training: bool
) -> Loss | None:
    """Compute the loss of both halves of the rows, joined, by a captured model whose loss is a ``LossTail``.

    Args:
        model: the captured model, with its weights.
        training: True for the graph of training, with batch norms as in evaluation; False for that of evaluation, if it
            was captured, else for that of training.

    Returns:
        the loss with its gradients, computed in fp32 or float64 whatever the precision of the run; None if the graph
        draws random numbers.
    """
    parameters, held = dict(model.named_parameters()), {**captured.buffers, **dict(model.named_buffers())}
    tail = captured.recipe.loss
    assert isinstance(tail, LossTail)
    training = training or tail.eval is None
    function = without_draws(replace(captured, parameters=parameters, buffers=held), training=training)
    half, mode = len(next(iter(rows.values()))) // 2, "train" if training else "eval"
    if function is None:
        return None
    function, tail = _in_float32(function), tail.changed(_in_float32)
    loss_of = tail if training else tail.in_evaluation()

    def joined_loss() -> torch.Tensor:
        with one_thread(), _Comparable():
            parts = [
                function(
                    [parameters[site.parameter] for site in function.sites],
                    [held[name].detach().clone() for name in function.buffers],
                    (),
                    [rows[name][cut].clone() for name in function.columns],
                    RandomKey(seed, 0, 0),
                )
                for cut in (slice(half), slice(half, None))
            ]
            return loss_of(rule.join(mode, parts), [rows[name].clone() for name in captured.recipe.targets])

    try:
        return LossGradients(parameters, in_float64=not is_large(model)).of(joined_loss)
    except DrawsError:
        return None


def _in_float32(function: GraphFunction) -> GraphFunction:
    constants = tuple(x.float() if x.dtype in _LOWER else x for x in function.constants)
    return replace(function, constants=constants, precision=FP32, _function=None)


class _Comparable(TorchFunctionMode):
    """Function mode that casts to float32 instead of 16 bits; batch norms use their running statistics."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.batch_norm.default and args[3] is not None:
            args = (*args[:5], False, *args[6:])
        if func is torch.ops.raypipe.cumulative_batch_norm.default:
            x, mean, variance, _, weight, bias, eps = args
            return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        wider = lambda x: torch.float32 if isinstance(x, torch.dtype) and x in _LOWER else x  # noqa: E731
        args, kwargs = pytree.tree_map(wider, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _generic(model: torch.nn.Module, captured: Capture) -> dict[str, torch.Tensor]:
    """Return parameters and buffers with which to divide a model: near its own, random if it has none.

    Parameters are moved a little, because a zero, as in an adapter, would hide what it is multiplied by.
    """
    if any(p.is_meta for p in model.parameters()):
        if is_large(model):
            raise CaptureError("this process holds no weights of it (weights_on='workers')")
        model = with_random_weights(model)
    held = {**captured.buffers, **dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: x.detach() for name, x in held.items()}
    if is_large(model):
        return tensors
    generator = torch.Generator().manual_seed(0)
    for name in captured.parameters:
        x = tensors[name]
        if x.is_floating_point():
            scale = 0.02 + 0.1 * x.float().square().mean().sqrt()
            tensors[name] = x + (scale * torch.randn(x.shape, generator=generator)).to(x.dtype)
    return tensors


def without_loss(captured: Capture, rule: WholeMinibatch) -> Capture:
    """Return a capture to be profiled: its loss holds what the last stage holds of each micro-batch (HeldOutputs)."""
    return replace(captured, recipe=replace(captured.recipe, loss=HeldOutputs(rule.joined["train"])))


def held_bytes(captured: Capture, rule: WholeMinibatch, samples: int) -> int:
    """Compute the bytes of outputs and targets of ``samples`` samples, which the last stage holds until the loss."""
    columns = _columns(captured, samples)
    targets = sum(columns[name].nbytes for name in captured.recipe.targets)
    return targets + outputs_bytes(captured, rule, samples)


def outputs_bytes(captured: Capture, rule: WholeMinibatch, samples: int) -> int:
    """Compute the bytes of outputs of ``samples`` samples, which replicas of the last stage exchange."""
    outputs = _outputs(captured, samples, "train") or ()
    return sum(x.nbytes for x, dim in zip(outputs, rule.joined["train"], strict=True) if dim is not None)


def loss_bytes(captured: Capture, rule: WholeMinibatch, samples: int) -> int | None:
    """Compute the peak bytes of the loss over the whole mini-batch: joined outputs and targets, forward and backward.

    The bytes are counted on the meta device; None if the loss does not run there.

    Args:
        samples: number of samples of the mini-batch.
    """
    columns = _columns(captured, samples)
    outputs = [[x.requires_grad_(x.is_floating_point())] for x in _outputs(captured, samples, "train") or ()]
    live, loss_of = LiveBytes(), captured.recipe.loss
    if isinstance(loss_of, LossTail):
        loss_of = loss_of.changed(_on_meta)
    try:
        with torch.device("meta"), live:
            joined = rule.join("train", [[x for (x,) in outputs]])
            targets = [torch.cat([columns[name]]) for name in captured.recipe.targets]
            loss: Any = loss_of(joined, targets)
            del joined, targets  # the last stage keeps what the graph holds
            torch.autograd.grad(loss, [x for (x,) in outputs if x.requires_grad], allow_unused=True)
    except Exception:  # noqa: BLE001  (the user's code may read values)
        return None
    return max(live.log, default=0)


def loss_seconds(captured: Capture, rule: WholeMinibatch, samples: int, rows: Columns) -> float:
    """Measure the seconds of the loss over the whole mini-batch on this CPU, forward and backward.

    It is timed on random outputs with as many samples as TIMED_BYTES allow. For more samples the seconds are multiplied
    by the ratio of the loss's bytes.

    Args:
        samples: number of samples of the mini-batch.
        rows: columns by name; their targets are repeated as often as necessary.

    Returns:
        the seconds; 0 if the loss fails on these outputs, or does not run on the meta device.
    """
    timed = samples
    if not (nbytes := loss_bytes(captured, rule, samples)):
        return 0.0
    while timed > 2 and (loss_bytes(captured, rule, timed) or 0) > TIMED_BYTES:
        timed //= 2
    at = torch.arange(timed)
    targets = [x[at % len(x)] if x.dim() else x for x in (rows[name] for name in captured.recipe.targets)]
    for draw in (torch.randn, torch.rand):  # a probability is not negative
        try:
            with one_thread(), own_generators():
                torch.manual_seed(0)
                shapes = _outputs(captured, timed, "train") or ()
                outputs = [
                    draw(x.shape, dtype=x.dtype).requires_grad_()
                    if x.is_floating_point()
                    else torch.zeros_like(x, device="cpu")
                    for x in shapes
                ]
                seconds = [_seconds(captured.recipe.loss, rule, outputs, targets) for _ in range(TIMES)]
        except Exception:  # noqa: BLE001  (the user's code, on values that are not the model's)
            continue
        return statistics.median(seconds[1:]) * nbytes / (loss_bytes(captured, rule, timed) or 1)
    return 0.0


def _seconds(
    loss: Any, rule: WholeMinibatch, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> float:
    begin = Moment.now()
    value = loss(rule.join("train", [outputs]), [torch.cat([x]) for x in targets])
    torch.autograd.grad(value, [x for x in outputs if x.requires_grad], allow_unused=True)
    return seconds_between(begin, Moment.now())


def _on_meta(function: GraphFunction) -> GraphFunction:
    constants = tuple(x.to("meta") for x in function.constants)
    return replace(function, constants=constants, place=torch.device("meta"), _function=None)


def _columns(captured: Capture, samples: int) -> dict[Any, torch.Tensor]:
    return {
        name: torch.empty((samples, *shape[1:]) if shape else (), dtype=dtype, device="meta")
        for name, (shape, dtype) in captured.columns.items()
    }


def _outputs(captured: Capture, samples: int, mode: str) -> list[torch.Tensor] | None:
    """Return meta tensors shaped as the model's outputs for ``samples`` samples; None if shapes depend on values."""
    try:
        return [x.detach() for x in bare_outputs(captured, _columns(captured, samples), mode)]
    except TypeError:
        return None


def _dims(captured: Capture, mode: str) -> tuple[int | None, ...] | None:
    """Find the dimension of the samples in each output tensor, by comparing shapes for two numbers of samples.

    Returns:
        One dimension per output tensor (None for a tensor without samples); None if the shapes do not show them.
    """
    if captured.one_size is not None:
        return None
    try:
        once, twice = _outputs(captured, 4, mode), _outputs(captured, 8, mode)
    except Exception:  # noqa: BLE001  (the user's code may read values, which the meta device has not)
        return None
    if once is None or twice is None:
        return None
    dims: list[int | None] = []
    for one, two in zip(once, twice, strict=True):
        changed = [dim for dim, (size, double) in enumerate(zip(one.shape, two.shape, strict=True)) if size != double]
        if len(changed) > 1 or any(two.shape[dim] != 2 * one.shape[dim] for dim in changed):
            return None
        dims.append(changed[0] if changed else None)
    return tuple(dims)
