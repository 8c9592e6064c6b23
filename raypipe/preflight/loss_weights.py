"""Weights of the micro-batches' losses, as the setting loss_reduction demands.

"auto" finds weights for which the weighted losses and gradients add up to those of the mini-batch:

    graph of the loss       shows what it averages over: labels other than -100, samples, ...; or that it adds up
    a few real rows         show if the weighted losses and gradients of micro-batches add up to those of all rows
    no weights fit          the loss is computed over the whole mini-batch (loss_over); ConfigError with the numbers if
                            that is impossible; only a note in the plan if a mini-batch is one micro-batch

"per_microbatch" takes the loss of each micro-batch as it is, weighted by the number of items that its main term
averages over. A loss_fn is traced by itself on the model's outputs; a model that returns its own loss has been traced
already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from raypipe.capture import Capture
from raypipe.capture.explain import Inputs
from raypipe.capture.loss_terms import LossTerms, loss_terms
from raypipe.capture.trace import trace
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.initial.meta_init import empty_like_on_host
from raypipe.engine.stage.losses import LossCounts, Reduction, loss_weights
from raypipe.engine.stage.quantized_linear import has_described
from raypipe.errors import CaptureError, ConfigError, DataError
from raypipe.preflight.joined_loss import NOTE, WHY, over_minibatch, why_not
from raypipe.preflight.loss_on_rows import (
    MANY_ROWS,
    Grouping,
    LossTrial,
    Tried,
    is_large,
    misfit,
    rows_through,
    try_parts,
)
from raypipe.preflight.random_outputs import bare_outputs, try_on_random_outputs, with_random_weights

LossFn = Callable[[Any, Any], torch.Tensor]
Columns = Mapping[Any, torch.Tensor]

FEW_BYTES = 1 << 24
"""Most bytes of random outputs on which a loss_fn is tried with many rows; it takes milliseconds for so few."""
_UNTRIED = (
    "loss_reduction='auto': what the loss averages over cannot be read off it, for it cannot be traced, and it "
    "cannot be tried, because this process holds no weights (weights_on='workers'). Set what micro-batches "
    "mean: loss_reduction='mean' (each its own loss, weighed by samples), 'sum', or a function that "
    "counts the items of a target; or set {one} or weights_on='client'."
)
_UNCLEAR = (
    "loss_reduction='auto': the graph of the loss does not show what its term made by {operation} averages over, and "
    "the loss cannot be tried, because this process holds no weights (weights_on='workers'). No weights of "
    "micro-batches make a term over a batch, as the load balancing of experts. Set loss_reduction='per_microbatch' to "
    "give each micro-batch a loss of its own, {one} to keep it exact, or weights_on='client'."
)
_ONE_SIZE = (
    "loss_reduction='auto': the model takes one number of samples only, so that what the loss averages over cannot be "
    "tried on a larger mini-batch. Set what micro-batches mean: loss_reduction='mean' (each its own loss, weighed by "
    "samples), 'sum', or a function that counts the items of a target; or set {one}."
)
_LOSSES_ONLY = "its gradients are not compared, only its losses: {why}"
_UNCOMPARED = "its weights are read off its graph and were not compared on rows: {why}"
_DRAWS = "the model draws random numbers, which may select or mix samples"
_FAILS = "the model cannot compute its loss of a few rows here"
_NO_WEIGHTS = "this process holds no weights of the model"
_OWN = (
    "each micro-batch has a loss of its own (loss_reduction='per_microbatch'), weighed by {weighed}: terms over a "
    "batch, as the load balancing of experts, are per micro-batch"
)
_ONE_ONLY = (
    "no weights turn the losses of micro-batches into that of all rows; one micro-batch trains exactly, and eval_loss "
    "is a mean over the micro-batches of an evaluation"
)


class LossReduction(NamedTuple):
    """Weights of the micro-batches' losses.

    Attributes:
        reduction: rule by which the weights are computed.
        note: note for the plan, or "".
        captured: capture to train in place of the given one, if the model's own loss is computed over the mini-batch.
    """

    reduction: Reduction
    note: str = ""
    captured: Capture | None = None


def check_per_replica(pipeline: PipelineConfig, reduction: Reduction) -> None:
    """Raise ConfigError for update_interval="per_replica" if the loss averages over other items than samples.

    Each stage then averages over its own samples, and only the last stage can count other items.
    """
    if pipeline.update_interval == "per_replica" and reduction not in ("mean", "sum"):
        counted = reduction.words if isinstance(reduction, LossCounts) else getattr(reduction, "__name__", reduction)
        raise ConfigError(
            f"update_interval='per_replica' with a loss that averages over {counted}: a stage takes the mean over its "
            "own samples, and only the last one has what is counted. Set loss_reduction='mean' where every sample "
            "weighs the same, or give update_interval a number."
        )


def find_reduction(
    model: torch.nn.Module, loss_fn: LossFn | None, captured: Capture, rows: Columns, pipeline: PipelineConfig
) -> LossReduction:
    """Return the reduction that the user set, or find one for loss_reduction="auto" and loss_over.

    Args:
        rows: samples by column, as the model reads them. A few of them go through the model, more through a loss_fn.

    Raises:
        ConfigError: the weighted losses of micro-batches do not add up to the loss of a mini-batch.
        CaptureError, DataError: the loss fails, or is not the same function in every call.
    """
    field, several = pipeline.loss_reduction, pipeline.several_microbatches
    weightless = any(p.is_meta for p in model.parameters())
    count = rows_through(model) if captured.one_size is None else 2 * captured.one_size
    few = {name: column[:count] for name, column in rows.items()}
    if pipeline.loss_over == "minibatch":
        rule, divided = over_minibatch(model, loss_fn, captured, rows, pipeline)
        return LossReduction(rule, NOTE.format(why=""), divided)

    def over_all(refusal: ConfigError | DataError) -> LossReduction:
        if pipeline.loss_over == "microbatch" or why_not(pipeline):
            raise refusal
        try:
            rule, divided = over_minibatch(model, loss_fn, captured, rows, pipeline)
        except ConfigError as error:
            raise refusal if loss_fn is not None else type(refusal)(f"{refusal} {error}") from None
        return LossReduction(rule, NOTE.format(why=WHY), divided)

    # Always for a loss_fn without weights: verify, which would find that it draws or fails, does not run without them.
    tried = _trials(model, loss_fn, captured, few, pipeline.seed) if weightless and loss_fn is not None else None
    if tried is None and field != "auto" and is_large(model) and captured.one_size is None:
        tried = _trials_of_loss(loss_fn, captured, few, pipeline.seed)
    alone = tried is not None  # found without computing the model
    terms = captured.terms
    if loss_fn is not None:
        terms = _terms_of_loss_fn(model, loss_fn, captured, few, pipeline.seed, alone=alone)
    if terms is not None and terms.bent and field not in ("mean", "per_microbatch"):
        if several and (field == "auto" or loss_fn is None):
            bent = _refusal_of_bend(terms.bent, pipeline)
            if field != "auto":
                raise bent
            return over_all(bent)
        if field == "auto" and loss_fn is not None:
            return LossReduction(_candidates(terms, few)[0], _ONE_ONLY)
    if field == "per_microbatch" and terms is not None and terms.main is not None:
        return LossReduction(terms.main, _OWN.format(weighed=terms.main.words))
    unclear = None
    if several and weightless and loss_fn is None and terms is not None and terms.unknown and field == "auto":
        unclear = ConfigError(_UNCLEAR.format(operation=terms.unknown, one=pipeline.one_microbatch))
    if terms is not None and terms.parts:
        if unclear is not None:  # try_parts needs weights
            return over_all(unclear)
        try:
            return _weighted_by_part(captured, few, pipeline)
        except ConfigError as refusal:
            if field != "auto":
                raise
            return over_all(refusal)
    if field == "valid_tokens" and loss_fn is None and terms is not None:
        return LossReduction(terms.counts or field)  # the model may shift its labels: count those that reach its loss
    trials: list[Tried] = []
    why, weighted = "", several or (field == "auto" and captured.model.eval is not None)
    if weighted and field in ("auto", "mean", "per_microbatch"):
        trials, why = _trials(model, loss_fn, captured, few, pipeline.seed) if tried is None else tried
    if field in ("mean", "per_microbatch"):
        if trials and several:
            _refuse_sum(field, trials[0])
        return LossReduction("mean", _OWN.format(weighed="samples") if field == "per_microbatch" else "")
    if field != "auto":
        return LossReduction(field)
    if loss_fn is not None and weighted and captured.one_size is None:
        trials += filter(None, [_over_many(captured, rows, pipeline.seed)])
    if several and weightless and terms is None and not trials:
        raise ConfigError(_UNTRIED.format(one=pipeline.one_microbatch))
    if several and captured.one_size is not None and (terms is None or not any(trial.groupings for trial in trials)):
        raise ConfigError(_ONE_SIZE.format(one=pipeline.one_microbatch))
    if unclear is not None and not trials:
        return over_all(unclear)
    candidates = _candidates(terms, few)
    try:
        chosen = _fitting(candidates, terms, trials, list(rows)[-1] if loss_fn is not None else None, pipeline)
        if several and captured.one_size is None and isinstance(chosen.reduction, LossCounts):
            size = len(next(iter(rows.values())))
            singles = [{name: x[at : at + 1] for name, x in rows.items()} for at in range(size)]
            chosen.reduction.weights(singles, [1] * size)  # few rows may have equal weights by chance
    except (ConfigError, DataError) as refusal:
        if several:
            return over_all(refusal)
        return LossReduction(candidates[0], _ONE_ONLY)
    note = next((_LOSSES_ONLY.format(why=tried.without_gradients) for tried in trials if tried.without_gradients), "")
    if loss_fn is None and why:
        note = _UNCOMPARED.format(why=why)
    return chosen._replace(note="; ".join(filter(None, (chosen.note, note))))


def _instead(pipeline: PipelineConfig) -> str:
    """Return a sentence for error messages: how to compute the loss over the mini-batch, or why that is impossible.

    Returns "" if loss_over="auto" allows that computation.
    """
    if pipeline.loss_over == "microbatch":
        return " loss_over='minibatch' computes it once over the mini-batch."
    reason = why_not(pipeline)
    return f" It is not computed over the mini-batch (loss_over), because {reason}." if reason else ""


def _refusal_of_bend(operation: str, pipeline: PipelineConfig) -> ConfigError:
    return ConfigError(
        f"loss_reduction='auto': the loss takes {operation} of an average over the samples. The losses of "
        "micro-batches add up only while the averages of all of them are on the same side of its bend. Set "
        f"{pipeline.one_microbatch} to keep it exact, or loss_reduction='per_microbatch' to compute the loss of each "
        f"micro-batch separately.{_instead(pipeline)}"
    )


def _trials(
    model: torch.nn.Module, loss_fn: LossFn | None, captured: Capture, rows: Columns, seed: int
) -> tuple[list[Tried], str]:
    """Compute losses of the rows and of micro-batches.

    If the model has no weights, a loss_fn is tried on random outputs, and a small model with its own loss is tried with
    random weights.

    Returns:
        (losses, empty if this process cannot compute them; reason why they do not show the weights of a model's own
        loss, or "").
    """
    weightless = any(p.is_meta for p in model.parameters())
    if weightless and captured.one_size is not None:
        return [], _NO_WEIGHTS
    if weightless and loss_fn is not None:
        tried = try_on_random_outputs(captured, rows, seed)
        return [tried] if tried else [], ""
    if weightless and (is_large(model) or has_described(model)):
        return [], _NO_WEIGHTS
    trial = LossTrial(with_random_weights(model) if weightless else model, loss_fn, seed, size=captured.one_size)
    tried = trial.losses(rows)
    return [tried] if tried else [], _DRAWS if trial.drew else "" if tried else _FAILS


def _trials_of_loss(
    loss_fn: LossFn | None, captured: Capture, rows: Columns, seed: int
) -> tuple[list[Tried], str] | None:
    """Compute losses as ``_trials`` does, without computing the model; None if they cannot be known without it.

    A loss_fn is tried on random outputs. The graph of a model's own loss shows what that averages over.
    """
    if loss_fn is None:
        terms = captured.terms  # the graph of a mean over rows may end in a sum: only numbers show it
        return ([], "") if terms is not None and not terms.unknown and not terms.sums else None
    try:
        tried = try_on_random_outputs(captured, rows, seed)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001  (a loss that takes some outputs only, or a model that needs its weights for shapes)
        return None
    return None if tried is None else ([tried], "")


def _over_many(captured: Capture, rows: Columns, seed: int) -> Tried | None:
    """Try a loss_fn on random outputs for up to MANY_ROWS rows, within FEW_BYTES; None if it cannot be tried."""
    count = min(MANY_ROWS, len(next(iter(rows.values()))))
    while count > 1:
        try:
            some = {name: column[:count] for name, column in rows.items()}
            if tried := try_on_random_outputs(captured, some, seed, FEW_BYTES):
                return tried
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (a model that needs its weights for shapes)
            return None
        count //= 2
    return None


def _candidates(terms: LossTerms | None, rows: Columns) -> list[Reduction]:
    """List reductions that may fit the loss, the likeliest first; ``terms`` is None if the loss could not be traced."""
    candidates: list[Reduction] = [terms.counts] if terms is not None and terms.counts else []
    candidates += ["sum", "mean"] if terms is not None and terms.sums else ["mean", "sum"]
    if terms is None and len(rows) > 1 and not list(rows.values())[-1].is_floating_point():
        candidates.append("valid_tokens")
    return candidates


def _fitting(
    candidates: Sequence[Reduction], terms: LossTerms | None, trials: Sequence[Tried], target: Any,
    pipeline: PipelineConfig,
) -> LossReduction:  # fmt: skip
    """Return the first candidate by which weighted losses and gradients of micro-batches add up to those of all rows.

    Args:
        terms: terms in the graph of the loss; None if the loss could not be traced.
        trials: losses and gradients with which each candidate is tried.
        target: name of the target column; None if the model returns its own loss.

    Raises:
        ConfigError: no candidate fits; shows the numbers.
        DataError: terms of the loss average over different numbers of items.
    """
    counts = terms.counts if terms is not None else None
    pairs = [(tried, grouping) for tried in trials for grouping in tried.groupings]
    finite = [(tried, grouping) for tried, grouping in pairs if math.isfinite(tried.whole.value)]
    for some in (pairs, finite):  # a row that makes the loss NaN ends its step, which names it
        for reduction in candidates:
            if all(misfit(tried, g, _weights_of(reduction, g, target)) is None for tried, g in some):
                if counts is None or reduction is not counts:
                    return LossReduction(reduction)
                return LossReduction(
                    counts, f"it averages over {counts.words}, and micro-batches weigh by how many they have"
                )
    if counts is not None:
        for _, grouping in pairs:
            counts.weights(grouping.parts, grouping.sizes)
    what = counts.words if counts else str(candidates[0])
    raise _refusal(pairs, lambda grouping: _weights_of(candidates[0], grouping, target), what, pipeline)


def _weights_of(reduction: Reduction, grouping: Grouping, target: Any) -> list[float] | None:
    """Compute the weight of each micro-batch in ``grouping``; None if the column ``target`` has no items to count."""
    counted: Any = grouping.parts
    if isinstance(reduction, str) or callable(reduction):
        counted = [part[target] for part in grouping.parts] if target is not None else None
    try:
        return loss_weights(reduction, grouping.sizes, counted)
    except DataError:
        return None


def _refuse_sum(field: Any, tried: Tried) -> None:
    """Raise ConfigError if the loss is a sum over samples, but loss_reduction=``field`` is for a mean over samples.

    The gradient would shrink with the number of micro-batches.
    """

    def fits(reduction: str) -> bool:
        return all(misfit(tried, g, _weights_of(reduction, g, None)) is None for g in tried.groupings)

    if fits("sum") and not fits("mean"):
        grouping = tried.groupings[0]
        raise ConfigError(
            f"loss_reduction={field!r} is for a loss that averages over samples, but this one adds up: over "
            f"{sum(grouping.sizes)} rows it is {tried.whole.value:.5g}, over {' and '.join(map(str, grouping.sizes))} "
            f"of them {' and '.join(f'{loss.value:.5g}' for loss in grouping.losses)}. The gradient would shrink with "
            "the number of micro-batches. Set loss_reduction='sum', leave it out, or let the loss average "
            "(reduction='mean')."
        )


def _weighted_by_part(captured: Capture, rows: Columns, pipeline: PipelineConfig) -> LossReduction:
    """Return the reduction of a model that returns the terms of its loss one by one, each with a weight of its own.

    Raises:
        ConfigError: the user set a single weight, or the weighted terms do not add up to the loss of all rows.
    """
    counts = captured.terms.counts if captured.terms is not None else None
    assert counts is not None
    if pipeline.loss_reduction not in ("auto", "valid_tokens"):
        raise ConfigError(
            f"loss_reduction={pipeline.loss_reduction!r} is one weight for a loss whose terms average over different "
            f"things ({counts.words}). Leave it out: 'auto' weighs each term."
        )
    tried = try_parts(captured, rows, pipeline.seed) if pipeline.several_microbatches else None
    pairs = [(tried, grouping) for grouping in tried.groupings] if tried else []
    if any(misfit(some, grouping, [1.0] * len(grouping.sizes)) for some, grouping in pairs):
        raise _refusal(pairs, lambda grouping: [1.0] * len(grouping.sizes), counts.words, pipeline)
    return LossReduction(
        counts, f"its terms average over {counts.words}, and micro-batches weigh in each by how many they have"
    )


class _LossModule(torch.nn.Module):
    """Module that calls a loss_fn on the model's output tensors and the target, so that the loss_fn can be traced.

    Args:
        spec: pytree spec of the model's output.
        fixed: index among the output's leaves -> value, of every leaf that is not a tensor.
    """

    def __init__(self, loss_fn: LossFn, spec: pytree.TreeSpec, fixed: Mapping[int, Any]) -> None:
        super().__init__()
        self.loss_fn, self.spec, self.fixed = loss_fn, spec, fixed

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        *outputs, target = tensors
        leaves: list[Any] = list(outputs)
        for position, value in self.fixed.items():
            leaves.insert(position, value)
        return self.loss_fn(pytree.tree_unflatten(leaves, self.spec), target)


def _terms_of_loss_fn(
    model: torch.nn.Module, loss_fn: LossFn, captured: Capture, rows: Columns, seed: int, *, alone: bool
) -> LossTerms | None:
    """Trace a loss_fn on the model's outputs for these rows and find its terms; None if it cannot be traced.

    Args:
        alone: True to take outputs of the right shapes instead, with which ``try_on_random_outputs`` has tried the
            loss_fn.

    Raises:
        CaptureError: the loss_fn draws random numbers, or changes a buffer of its own.
    """
    trial, target = LossTrial(model, loss_fn, seed), list(rows.values())[-1]
    alone = alone or any(p.is_meta for p in model.parameters())
    if alone:
        loss: Any = captured.recipe.loss
        output = loss.as_returned(tuple(empty_like_on_host(tensor) for tensor in bare_outputs(captured, rows)))
    else:
        output = trial.outputs(rows)
    if output is None:
        return None
    if not alone:
        trial.refuse_unrepeatable(output, target)
    leaves, spec = pytree.tree_flatten(output)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    module = _LossModule(loss_fn, spec, fixed)
    names = (*(f"output {i}" for i in range(len(tensors))), list(rows)[-1])
    inputs = Inputs((*tensors, target), {}, names)
    try:
        traced = trace(module, inputs, returns_loss=False, training=False, fixed="not tried")
    except CaptureError:
        return None
    terms = loss_terms(
        traced, {list(traced.columns)[-1]}, {**dict(module.named_parameters()), **dict(module.named_buffers())}
    )
    return (
        terms.summed() if terms is not None and terms.parts else terms
    )  # the user's function runs as it is, and returns the sum


def _refusal(
    pairs: Sequence[tuple[Tried, Grouping]], weigh: Callable[[Grouping], list[float] | None], what: str,
    pipeline: PipelineConfig,
) -> ConfigError:  # fmt: skip
    """Build the error for a loss whose weighted micro-batches do not add up, with numbers of the first that do not.

    Args:
        pairs: trials, each with one of its groupings.
        weigh: returns the weights of the micro-batches of a grouping.
        what: items that the weights count, for the message; or "sum" or "mean".
    """
    tried, grouping, wrong = next(
        (tried, grouping, wrong) for tried, grouping in pairs if (wrong := misfit(tried, grouping, weigh(grouping)))
    )
    sizes, losses = _listed(map(str, grouping.sizes)), _listed(f"{loss.value:.5g}" for loss in grouping.losses)
    how = {"sum": "added up", "mean": "weighed by samples"}.get(what, f"weighed by {what}")
    off = [f"{100 * by:.2g} % in {name}" for name, by in wrong.gradients[:3]]
    return ConfigError(
        "loss_reduction='auto': no weights of micro-batches make the loss of a mini-batch. Over "
        f"{sum(grouping.sizes)} rows it is {tried.whole.value:.5g}; over micro-batches of {sizes} rows it is {losses}, "
        f"{how} {wrong.total:.5g}. {f'Gradients are off by {_listed(off)}. ' if off else ''}Such a loss compares the "
        "rows of a batch with each other, as the load balancing of experts and a BatchNorm with "
        "track_running_stats=False do, or averages in a way that cannot be counted from the data. Set "
        f"{pipeline.one_microbatch} to keep it exact, loss_reduction='per_microbatch' to give each micro-batch a loss "
        f"of its own, or a function that counts the items of a target.{_instead(pipeline)}"
    )


def _listed(words: Iterable[str]) -> str:
    """Join up to four words by "and"; "..." replaces further ones."""
    *some, last = words
    return " and ".join([*some, last]) if len(some) < 4 else " and ".join([*some[:4], "..."])
