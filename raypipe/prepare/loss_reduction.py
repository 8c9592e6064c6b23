"""loss_reduction="auto": what a loss averages over, read off its graph and tried on real rows.

    graph of the loss       counts labels other than -100, samples, or adds up
    a few real rows         weighted losses of micro-batches == loss of all of them?
    neither way fits        refused, with the numbers; said in the plan where only evaluations have micro-batches

A loss_fn is traced by itself on the model's outputs; a model that returns its own loss has been traced already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.capture import Capture, TracedModel
from raypipe.engine.capture.crossed_rows import refuse_crossed_rows
from raypipe.engine.capture.loss_terms import LossTerms, loss_terms
from raypipe.engine.capture.trace import trace
from raypipe.engine.loss_counts import LossCounts
from raypipe.engine.microbatch import Reduction
from raypipe.engine.one_thread import one_thread
from raypipe.engine.randomness import RandomKey
from raypipe.engine.trial.loss_check import NUM_ROWS, Grouping, group_losses, misfit, rows_through, weights_of
from raypipe.errors import CaptureError, ConfigError, DataError
from raypipe.ir.precision import FP32
from raypipe.prepare.drawn_outputs import drawn_losses, losses_of_many
from raypipe.prepare.loss_trial import LossTrial
from raypipe.prepare.unrun import outputs_unrun

__all__ = ["FoundReduction", "check_per_replica", "find_reduction"]

LossFn = Callable[[Any, Any], torch.Tensor]
Columns = Mapping[Any, torch.Tensor]

_NO_TERMS = LossTerms(None, False)

_UNTRIED = (
    "loss_reduction='auto': what the loss averages over cannot be read off it, for it cannot be traced, and it "
    "cannot be tried, because this process holds no weights (weights_on='workers'). Say what micro-batches "
    "shall mean: loss_reduction='mean' (each its own loss, weighed by samples), 'sum', or a function that "
    "counts the items of a target; or set {one} or weights_on='client'."
)

_ONE_ONLY = (
    "no weights turn the losses of micro-batches into that of all rows; one micro-batch trains exactly, and eval_loss "
    "is a mean over the micro-batches of an evaluation"
)


class FoundReduction(NamedTuple):
    """What weighs the micro-batches' losses, and a note for the plan; empty where it goes without saying."""

    reduction: Reduction
    note: str = ""


def check_per_replica(pipeline: PipelineConfig, found: Reduction) -> None:
    """Refuse stages with updates of their own where only the last one could weigh them.

    Raises:
        ConfigError: names the fields and what would do.
    """
    if pipeline.update_interval == "per_replica" and found not in ("mean", "sum"):
        counted = found.words if isinstance(found, LossCounts) else getattr(found, "__name__", str(found))
        raise ConfigError(
            f"update_interval='per_replica' with a loss that averages over {counted}: a stage takes the mean over its "
            "own samples, and only the last one has what is counted. Set loss_reduction='mean' where every sample "
            "weighs the same, or give update_interval a number."
        )


def find_reduction(
    model: torch.nn.Module, loss_fn: LossFn | None, captured: Capture, rows: Columns, pipeline: PipelineConfig
) -> FoundReduction:
    """The reduction that is asked for, or the one that "auto" stands for.

    Args:
        rows: a few samples by column, as the model reads them; of more than a few only a loss_fn sees the others.

    Raises:
        ConfigError: no weights of micro-batches make the loss of a mini-batch.
    """
    asked, terms = pipeline.loss_reduction, captured.terms
    if loss_fn is None and isinstance(captured.model, TracedModel):
        traced = captured.model.train.traced
        refuse_crossed_rows(traced, traced.columns.keys(), type(model).__name__)
    if terms is not None and terms.bent and asked != "mean" and pipeline.several_microbatches:
        raise _bent(terms.bent, pipeline)
    if terms is not None and terms.parts:
        return _weighed_by_part(captured, rows, pipeline)
    if asked == "valid_tokens" and terms is not None:
        # The model may shift its labels; what counts are those that its loss sees.
        return FoundReduction(terms.counts or asked)
    many, rows = rows, {name: column[: rows_through(model)] for name, column in rows.items()}
    trial = LossTrial(model, loss_fn, pipeline.seed)
    unfilled = any(p.is_meta for p in model.parameters())
    several, evaluates = pipeline.several_microbatches, captured.model.eval is not None

    def tries() -> tuple[float, list[Grouping]] | None:
        if not unfilled:
            return trial.losses(rows)
        return drawn_losses(captured, rows) if loss_fn is not None else None

    if loss_fn is not None:
        outputs = outputs_unrun(captured, rows) if unfilled else trial.outputs(rows)
        if outputs is not None and not unfilled:
            trial.refuse_unrepeatable(loss_fn, outputs, list(rows.values())[-1])
        terms = _terms_of_loss_fn(loss_fn, outputs, rows)
        if terms is None and outputs is not None and not unfilled:
            trial.watch_rows(loss_fn, outputs, list(rows.values())[-1])
    if loss_fn is not None and terms is not None and terms.bent and asked == "auto":
        if not several:
            return FoundReduction(_candidates(terms, rows)[0], _ONE_ONLY)
        raise _bent(terms.bent, pipeline)
    if asked == "mean" and several:
        _refuse_sum(tries())
    if asked != "auto":
        return FoundReduction(asked)
    wanted = several or evaluates
    trials = [tries(), losses_of_many(captured, many) if loss_fn is not None else None] if wanted else []
    if several and unfilled and terms is None and not any(trials):
        raise ConfigError(_UNTRIED.format(one=pipeline.one_microbatch))
    target = list(rows)[-1] if loss_fn is not None else None
    likely = _candidates(terms, rows)
    try:
        return _fitting(likely, terms or _NO_TERMS, [found for found in trials if found], target, pipeline)
    except (ConfigError, DataError):
        if several:
            raise
        return FoundReduction(likely[0], _ONE_ONLY)


def _bent(name: str, pipeline: PipelineConfig) -> ConfigError:
    return ConfigError(
        f"loss_reduction='auto': the loss takes {name} of an average over the samples. Of the averages of "
        "micro-batches it is another loss as soon as one of them lies on the other side of the bend, though until then "
        f"they add up. Set {pipeline.one_microbatch} to keep it exact, or loss_reduction='mean' where every "
        "micro-batch shall have a bend of its own."
    )


def _candidates(terms: LossTerms | None, rows: Columns) -> list[Reduction]:
    """Reductions that the loss may have, the likeliest first.

    Args:
        terms: that were read off its graph; None where it could not be traced.
    """
    known = terms or _NO_TERMS
    found: list[Reduction] = [known.counts] if known.counts else []
    found += ["sum", "mean"] if known.sums else ["mean", "sum"]
    if terms is None and len(rows) > 1 and not list(rows.values())[-1].is_floating_point():
        found.append("valid_tokens")
    return found


def _fitting(
    found: Sequence[Reduction],
    known: LossTerms,
    trials: Sequence[tuple[float, list[Grouping]]],
    target: Any,
    pipeline: PipelineConfig,
) -> FoundReduction:
    """The first that makes the losses of micro-batches add up to that of a mini-batch.

    Args:
        trials: losses of some rows, together and in micro-batches; empty where they could not be tried.
        target: the column that a loss_fn compares with.

    Raises:
        ConfigError: none does; with the numbers.
    """
    note = _note(known.counts) if known.counts else ""
    tried = [(whole, grouping) for whole, groupings in trials for grouping in groupings]
    finite = [(whole, grouping) for whole, grouping in tried if math.isfinite(whole)]
    for some in (tried, finite):  # a row that makes the loss nan ends its step, which names it
        for reduction in found:
            if all(misfit(whole, g, weights_of(reduction, g, target)) is None for whole, g in some):
                return FoundReduction(reduction, note if reduction is known.counts else "")
    if known.counts is not None:
        for _, grouping in tried:  # says so where terms average over different numbers of items
            known.counts.of_minibatch(grouping.parts, grouping.sizes)
    what = known.counts.words if known.counts else str(found[0])
    weighed = [(whole, g, weights_of(found[0], g, target)) for whole, g in tried]
    raise ConfigError(_refusal(weighed, what, pipeline))


def _refuse_sum(tried: tuple[float, list[Grouping]] | None) -> None:
    """A loss that adds up over samples, weighed by samples, would be smaller the more micro-batches there are.

    Raises:
        ConfigError: with the numbers.
    """
    if tried is None:
        return
    whole, groupings = tried

    def fits(reduction: str) -> bool:
        return all(misfit(whole, g, weights_of(reduction, g, None)) is None for g in groupings)

    if fits("sum") and not fits("mean"):
        sizes, losses = groupings[0].sizes, groupings[0].losses
        raise ConfigError(
            f"loss_reduction='mean' is for a loss that averages over samples, but this one adds up: over {sum(sizes)} "
            f"rows it is {whole:.5g}, over {' and '.join(map(str, sizes))} of them "
            f"{' and '.join(f'{loss:.5g}' for loss in losses)}. The gradient would shrink with the number of "
            "micro-batches. Set loss_reduction='sum', leave it out, or let the loss average (reduction='mean')."
        )


def _note(counts: LossCounts) -> str:
    return f"it averages over {counts.words}, and micro-batches weigh by how many they have"


def _weighed_by_part(captured: Capture, rows: Columns, pipeline: PipelineConfig) -> FoundReduction:
    """A model whose last stage returns the terms of its loss one by one, each tried with its own weights."""
    assert captured.terms is not None
    assert captured.terms.counts is not None
    counts = captured.terms.counts
    if pipeline.loss_reduction not in ("auto", "valid_tokens"):
        raise ConfigError(
            f"loss_reduction={pipeline.loss_reduction!r} is one weight for a loss whose terms average over different "
            f"things ({counts.words}). Leave it out: 'auto' weighs each term."
        )
    rows = {name: column[:NUM_ROWS] for name, column in rows.items()}
    found = FoundReduction(
        counts, f"its terms average over {counts.words}, and micro-batches weigh in each by how many they have"
    )
    if not _can_try_parts(captured, pipeline):
        return found
    parts_of = _parts_of(captured, pipeline.seed)
    for at, term in enumerate(counts.parts):
        whole, groupings = group_losses(rows, lambda part, at=at: float(parts_of(part)[at]))  # type: ignore[misc]
        weighed = []
        for grouping in groupings:
            weights = counts.weights(term, counts.by_term(grouping.parts, grouping.sizes)[term])
            weighed.append((grouping, weights if any(weights) else None))
        if any(misfit(whole, grouping, weights) is not None for grouping, weights in weighed):
            tried = [(whole, *found) for found in weighed]
            raise ConfigError(_refusal(tried, counts.words, pipeline, f"term {at + 1} of "))
    return found


def _can_try_parts(captured: Capture, pipeline: PipelineConfig) -> bool:
    """Whether the terms of some rows can be computed here, as exactly as their counts tell."""
    assert isinstance(captured.model, TracedModel)
    changes = captured.model.train.changing_buffers or captured.model.train.traced.num_draws
    if not pipeline.several_microbatches or (captured.model.eval is None and changes):
        return False
    if captured.recipe.precision != FP32:  # sums of 16-bit numbers would not match the counts closely enough
        return False
    return not any(x.is_meta for x in (*captured.parameters.values(), *captured.buffers.values()))


def _parts_of(captured: Capture, seed: int) -> Callable[[Columns], tuple[torch.Tensor, ...]]:
    """The terms of the loss as a function of rows, in evaluation mode where there is one."""
    trains, evals = captured.recipe.stages.functions((), ())
    (function,) = evals or trains
    tensors = {**captured.parameters, **captured.buffers}

    def parts_of(part: Columns) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), one_thread():
            return function(
                [tensors[site.parameter].detach() for site in function.sites],
                [tensors[name].detach().clone() for name in function.buffers],
                (),
                [part[name].clone() for name in function.columns],
                RandomKey(seed, 0, 0),
            )

    return parts_of


class _LossModule(torch.nn.Module):
    """A loss_fn as a model of its outputs' tensors and the target, so that it can be traced."""

    def __init__(self, loss_fn: LossFn, spec: pytree.TreeSpec, fixed: Mapping[int, Any]) -> None:
        super().__init__()
        self.loss_fn, self.spec, self.fixed = loss_fn, spec, fixed

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        *given, target = tensors
        leaves: list[Any] = list(given)
        for position, value in self.fixed.items():
            leaves.insert(position, value)
        return self.loss_fn(pytree.tree_unflatten(leaves, self.spec), target)


def _terms_of_loss_fn(loss_fn: LossFn, output: Any, rows: Columns) -> LossTerms | None:
    """None where the loss cannot be traced.

    Raises:
        DataError: every output meets the targets of all rows.
    """
    if output is None:
        return None
    leaves, spec = pytree.tree_flatten(output)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    module = _LossModule(loss_fn, spec, fixed)
    names = [*(f"output {i}" for i in range(len(tensors))), list(rows)[-1]]
    example = (*tensors, list(rows.values())[-1])
    try:
        traced = trace(module, example, {}, names, returns_loss=False, training=False, one_length=True)
    except CaptureError:
        return None
    data = {list(traced.columns)[-1]}
    refuse_crossed_rows(traced, data, "loss_fn")
    terms = loss_terms(traced, data, {**dict(module.named_parameters()), **dict(module.named_buffers())})
    return terms.summed() if terms.parts else terms  # the user's function runs as it is, and returns the sum


def _refusal(
    weighed: Sequence[tuple[float, Grouping, list[float] | None]], what: str, pipeline: PipelineConfig, term: str = ""
) -> str:
    """The first grouping that does not fit, in numbers.

    Args:
        weighed: the loss of all rows, their grouping, and what its micro-batches weigh.
    """
    whole, grouping, total = next(
        (whole, grouping, total)
        for whole, grouping, weights in weighed
        if (total := misfit(whole, grouping, weights)) is not None
    )
    sizes, losses = _listed(map(str, grouping.sizes)), _listed(f"{loss:.5g}" for loss in grouping.losses)
    how = {"sum": "added up", "mean": "weighed by samples"}.get(what, f"weighed by {what}")
    return (
        f"loss_reduction='auto': no weights of micro-batches make {term}the loss of a mini-batch. Over "
        f"{sum(grouping.sizes)} rows it is {whole:.5g}; over micro-batches of {sizes} rows it is {losses}, {how} "
        f"{total:.5g}. Such a loss compares the rows of a batch with each other, or averages in a way that cannot be "
        "counted from the data; or the model does, as a BatchNorm with track_running_stats=False in evaluations too. "
        f"Set {pipeline.one_microbatch} to keep it exact, or say what micro-batches shall mean: "
        "loss_reduction='mean' (each its own loss, weighed by samples), 'sum', or a function that counts the items of "
        "a target."
    )


def _listed(words: Iterable[str]) -> str:
    """The first four of them."""
    *some, last = words
    return " and ".join([*some, last]) if len(some) < 4 else " and ".join([*some[:4], "..."])
