"""Trial of metrics on a few rows before planning: records the outputs that they read, and refuses metrics that fail.

A model that returns its own loss also returns logits and caches. The stages of evaluation keep only the outputs that a
metric reads. A metric must return numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raypipe.capture import Capture
from raypipe.capture.guards import in_mode
from raypipe.data.item_randomness import own_generators, seed_generators
from raypipe.engine.stage.mixed_precision import converted, model_in
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.user_metrics import (
    MetricReads,
    UserMetrics,
    fields_of,
    is_stateful,
    names_of,
    part_of,
    parts_by_key,
)
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import ConfigError, StageError
from raypipe.ir.precision import Precision
from raypipe.preflight.dry_run import NUM_ROWS, no_reads_of

_OF_A_METRIC = "Let the model return what the metric needs of its parameters."


def metric_reads(
    metrics: Mapping[str, Any], model: torch.nn.Module, example: Mapping[Any, torch.Tensor], precision: Precision
) -> MetricReads:
    """Record which outputs of a model, and which data columns, metrics read; the model returns its own loss.

    Each metric is called once on the model's output. The model runs in the run's precision, since a metric may choose
    outputs by their dtype.

    Raises:
        ConfigError: the model returns nothing but the loss, a metric fails, or reads something other than a tensor.
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
            f"metrics read what the model returns, but {type(model).__name__} returns only its loss. Let it "
            "return logits or predictions too, in a dict, a tuple or an object, or give a loss_fn."
        )
    outputs: dict[Any, None] = {}
    columns: dict[Any, None] = {}
    names = names_of(output)
    batch = fields_of(rows, tuple(rows), columns)
    _called(metrics, fields_of(parts, names, outputs), [batch], len(next(iter(rows.values()))))
    for key in outputs:
        part_of(output, key)
    return MetricReads(tuple(outputs), tuple(columns), names, tuple(rows))


def try_metrics(
    metrics: Mapping[str, Any],
    captured: Capture,
    rows: Mapping[Any, torch.Tensor],
    more: Callable[[], Mapping[Any, torch.Tensor]],
) -> tuple[str, ...]:
    """Call every metric on the captured model's outputs for the first rows of eval_data.

    Args:
        more: reads more rows, for metrics with update() and compute() that fail on few rows, such as an AUC.

    Returns:
        Names of the numbers that the metrics returned; empty for a model without values (on the meta device).

    Raises:
        ConfigError: a metric fails, or returns something other than a number.
    """
    if any(x.is_meta for x in (*captured.parameters.values(), *captured.buffers.values())):
        return ()  # without values nothing can be computed
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

    few = {name: x[: captured.one_size or NUM_ROWS] if x.dim() else x for name, x in rows.items()}
    try:
        return tried(metrics, few)
    except ConfigError:
        functions = {name: metric for name, metric in metrics.items() if not is_stateful(metric)}
        if len(functions) == len(metrics):
            raise
    tried(functions, few)  # functions must take few rows: they are called once for each micro-batch
    return tried(metrics, more())


def try_on_smallest(
    metrics: Mapping[str, Any],
    captured: Capture,
    rows_of: Callable[[int], Mapping[Any, torch.Tensor]],
    num_samples: int,
    sizes: Sequence[int],
) -> None:
    """Call every metric that is a function on as many rows as the smallest micro-batch of an evaluation has.

    Args:
        rows_of: reads the given number of rows of eval_data.
        sizes: numbers of rows of the micro-batches of an evaluation.

    Raises:
        ConfigError: a metric needs more rows; names the numbers.
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
    """Return the output of the model in evaluation mode; modes, buffers and random generators are restored."""
    numbered = all(isinstance(name, int) for name in rows)
    try:
        with own_generators(), torch.no_grad(), one_thread(), model_in(model, precision):
            seed_generators(0, 0, 0)
            with in_mode(model, training=False):
                tensors = converted([*rows.values()], precision)
                return model(*tensors) if numbered else model(**dict(zip(rows, tensors, strict=True)))
    except Exception as error:
        raise ConfigError(f"The model fails in evaluation mode: {type(error).__name__}: {error}") from error


def _called(metrics: Mapping[str, Any], output: Any, behind: list[Any], samples: int) -> tuple[str, ...]:
    meter = UserMetrics(metrics)
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
