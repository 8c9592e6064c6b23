"""What metrics read, and whether they work: called once on a few rows, before anything is planned.

A model that returns its own loss returns more beside it, logits and caches. Kept in the stages of evaluation is only
what a metric reads, which is found out by noting it. A metric that fails, or returns no number, is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.capture import Capture
from raypipe.engine.item_randomness import own_generators, seed_generators
from raypipe.engine.meter import Asked, Meter, is_stateful, names_of, part_of, parts_by_key
from raypipe.engine.metric_fields import fields_of
from raypipe.engine.one_thread import one_thread
from raypipe.engine.precision import converted, model_in
from raypipe.engine.randomness import RandomKey
from raypipe.engine.trial.reads import no_reads_of
from raypipe.engine.trial.rehearsal import NUM_ROWS
from raypipe.errors import ConfigError, StageError
from raypipe.ir.precision import Precision

__all__ = ["asked_by", "try_metrics", "try_on_smallest"]

_OF_A_METRIC = "Let the model return what the metric needs of its parameters."


def asked_by(
    metrics: Mapping[str, Any], model: torch.nn.Module, example: Mapping[Any, torch.Tensor], precision: Precision
) -> Asked:
    """What metrics read of a model that returns its own loss, and of the batch.

    Args:
        example: a micro-batch by column, of which the first rows are taken.
        precision: of the run: a metric may read other parts of what is of another type.

    Raises:
        ConfigError: the model returns nothing but the loss, a metric fails, or reads what is no tensor.
    """
    rows = {name: x[:NUM_ROWS].clone() if x.dim() else x.clone() for name, x in example.items()}
    if any(x.is_meta for x in model.parameters()):
        raise ConfigError(
            "metrics of a model that returns its own loss are called once on what it returns, but its parameters are "
            "on the meta device, which hold no numbers. Build it with numbers, or give a loss_fn."
        )
    output = _returned(model, rows, precision)
    parts = parts_by_key(output)
    if not parts:
        raise ConfigError(
            f"metrics look at what the model returns, but {type(model).__name__} returns only its loss. Let it return "
            "logits or predictions too, in a dict, a tuple or an object, or give a loss_fn."
        )
    outputs: dict[Any, None] = {}
    columns: dict[Any, None] = {}
    names = names_of(output)
    batch = fields_of(rows, tuple(rows), columns)
    _called(metrics, fields_of(parts, names, outputs), [batch], len(next(iter(rows.values()))))
    for key in outputs:
        part_of(output, key)
    return Asked(tuple(outputs), tuple(columns), names, tuple(rows))


def try_metrics(
    metrics: Mapping[str, Any],
    captured: Capture,
    rows: Mapping[Any, torch.Tensor],
    more: Callable[[], Mapping[Any, torch.Tensor]],
) -> tuple[str, ...]:
    """Call every metric on what the captured model computes of these rows of eval_data.

    Args:
        more: reads more rows, for an object that computes nothing of few: an AUC wants samples of every class.

    Returns:
        Names of the numbers that they gave; none of a model without values.

    Raises:
        ConfigError: one fails, or returns no number.
    """
    if any(x.is_meta for x in (*captured.parameters.values(), *captured.buffers.values())):
        return ()  # there are no values to compute with
    (program,) = captured.programs(())
    function = program.modes["eval"]
    leaves = [captured.parameters[site.parameter].detach() for site in function.sites]
    buffers = [captured.buffers[name].detach().clone() for name in function.buffers]
    trained = {name: captured.parameters[name] for name in captured.trainable}

    def tried(metrics: Mapping[str, Any], rows: Mapping[Any, torch.Tensor]) -> tuple[str, ...]:
        columns = {name: x.clone() for name, x in rows.items()}
        with torch.no_grad(), one_thread():
            held = [buffer.clone() for buffer in buffers]
            outputs = function(leaves, held, (), [columns[name] for name in function.columns], RandomKey(0, 0, 0))
            output, behind = program.metric_arguments(outputs, columns)
        with no_reads_of(trained, "A metric", _OF_A_METRIC):
            return _called(metrics, output, behind, len(next(iter(columns.values()))))

    few = {name: x[:NUM_ROWS] if x.dim() else x for name, x in rows.items()}
    try:
        return tried(metrics, few)
    except ConfigError:
        functions = {name: metric for name, metric in metrics.items() if not is_stateful(metric)}
        if len(functions) == len(metrics):
            raise
    tried(functions, few)  # which are called once for each micro-batch, however small
    return tried(metrics, more())


def try_on_smallest(
    metrics: Mapping[str, Any],
    captured: Capture,
    rows_of: Callable[[int], Mapping[Any, torch.Tensor]],
    num_samples: int,
    sizes: Sequence[int],
) -> None:
    """Call every function among the metrics on as many rows as the smallest micro-batch of an evaluation has.

    Args:
        rows_of: reads so many rows of eval_data.
        num_samples: of eval_data.
        sizes: of the micro-batches of an evaluation.

    Raises:
        ConfigError: one takes more rows; names the numbers.
    """
    functions = {name: metric for name, metric in metrics.items() if not is_stateful(metric)}
    size = min(sizes)
    if not functions or size >= min(NUM_ROWS, num_samples):  # tried before
        return
    rows = rows_of(size)
    try:
        try_metrics(functions, captured, rows, lambda: rows)
    except ConfigError as error:
        raise ConfigError(
            f"{error} An evaluation of {num_samples} samples has a micro-batch of {size}, and a metric is called once "
            "for each. Give one with update() and compute(), which sees all of them before it computes, or change the "
            "number of samples, minibatch_size or num_microbatches."
        ) from None


def _returned(model: torch.nn.Module, rows: Mapping[Any, torch.Tensor], precision: Precision) -> Any:
    """What the model returns in evaluation mode; its modes, buffers and everybody's generators stay as they are."""
    modes = {name: module.training for name, module in model.named_modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    numbered = all(isinstance(name, int) for name in rows)
    try:
        with own_generators(), torch.no_grad(), one_thread(), model_in(model, precision):
            seed_generators(0, 0, 0)
            model.eval()
            given = converted([*rows.values()], precision)
            return model(*given) if numbered else model(**dict(zip(rows, given, strict=True)))
    except Exception as error:
        raise ConfigError(f"The model fails in evaluation mode: {type(error).__name__}: {error}") from error
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
        for name, buffer in model.named_buffers():
            buffer.detach().copy_(buffers[name])


def _called(metrics: Mapping[str, Any], output: Any, behind: list[Any], samples: int) -> tuple[str, ...]:
    meter = Meter(metrics)
    try:
        with own_generators(), torch.no_grad(), one_thread():
            seed_generators(0, 0, 0)
            meter.add(output, behind, samples)
            names = [name for name, _ in meter.results()]
    except StageError as error:
        raise ConfigError(f"{error} It was called on {samples} rows of the data, before the run begins.") from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"Two numbers of the metrics have the name {twice[0]!r}. Give one of the metrics another name."
        )
    return tuple(names)
