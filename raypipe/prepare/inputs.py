"""Inputs of a run: opens the data, captures the model, and translates the configuration to a planner's Request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raypipe.capture import Capture, capture
from raypipe.capture.python_state import Memory, first_change, read_memory, read_memory_of
from raypipe.config.combinations import laned
from raypipe.config.pipeline import PipelineConfig
from raypipe.data.map_source import MapSource
from raypipe.data.open_data import Source, batch_size_of, open_data
from raypipe.data.stacking import Collate
from raypipe.engine.codec.host import codec_cost
from raypipe.engine.io.checkpoint.state_source import StateSource
from raypipe.engine.stage.quantized_linear import settle
from raypipe.engine.stage.user_metrics import MetricReads
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.ir.cluster import Cluster
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.precision import PRECISIONS
from raypipe.planner.cost.tolerance import MIN_GAIN
from raypipe.planner.search import Request, microbatches
from raypipe.preflight.arguments import Arguments, Unfilled
from raypipe.preflight.dry_run import (
    ANY_SIZE,
    NUM_ROWS,
    rehearse,
    rehearse_evaluation,
)  # fmt: skip
from raypipe.preflight.loss_on_rows import is_large
from raypipe.preflight.metric_trial import metric_reads, try_metrics
from raypipe.preflight.module import refuse_aliased_memory, refuse_frequencies, refuse_hooks, refuse_still_norms
from raypipe.preflight.random_outputs import loss_runs
from raypipe.prepare.data_sizes import DataSizes, look_at, refuse_unfit_shapes
from raypipe.run.plans.blueprint import permitted_codecs
from raypipe.user_lines import quoted, short

KEPT_COPIES = 4
"""Number of state copies in the memory budget of a run that survives failures: two of a worker's own stages and two of
another worker's. The log of sent messages may take as much as one more.
"""
STATE_ROWS = 4
"""Number of first items that are read twice, to find datasets whose Python state changes with every read."""
CURVE_SAMPLES = 8
"""Samples of the example, at least, if the planner needs seconds by micro-batch size; a mini-batch may have fewer."""
MOST_SAMPLES, MOST_BYTES = 256, 16 << 20
"""Maximum samples and bytes of micro-batches above the example's size, measured if they take almost no time."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Opened arguments, from which a profile and a plan are made.

    Attributes:
        sources: source of "train", and of "eval" if there is eval_data.
        example: one micro-batch, {column: tensor}.
        larger: more samples, {column: tensor}, if larger micro-batches are to be measured; else empty.
        memory: Python state of model and loss before they were called here; training begins with this state.
        sizes: shapes of some mini-batches of train_data.
        unfilled: sources from which workers load the tensors that this process does not hold; empty if it holds all.
        evaluated: names of the metrics' results, found in a trial; empty if there was no trial.
    """

    model: torch.nn.Module
    sources: Mapping[str, Source]
    request: Request
    with_loss_fn: bool
    captured: Capture
    example: Mapping[Any, torch.Tensor]
    larger: Mapping[Any, torch.Tensor]
    memory: Memory
    sizes: DataSizes
    unfilled: tuple[StateSource, ...] = ()
    evaluated: tuple[str, ...] = ()


def open_arguments(
    arguments: Arguments,
    pipeline: PipelineConfig,
    num_workers: int | None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Opened:
    """Open the data, build and capture the model, and try one forward and backward.

    Args:
        num_workers: number of workers to plan for; None leaves it open.
        progress: takes a text that shows how far the trace of the model is.

    Raises:
        RaypipeError: an argument is not possible; the message has the fix.
    """
    built, unfilled = arguments.unfilled() if arguments.unfilled else Unfilled(build_model(arguments.model), ())
    loss_fn, evaluates = arguments.loss_fn, arguments.eval_data is not None
    refuse_hooks(built)
    refuse_still_norms(built)
    if pipeline.several_microbatches:
        refuse_frequencies(built, pipeline.one_microbatch)
    settle(built)
    memory = read_memory(built, loss_fn)
    sources = {"train": open_data(arguments.train_data, seed=pipeline.seed, collate=arguments.collate_fn)}
    if evaluates:
        sources["eval"] = _eval_source(arguments.eval_data, pipeline.seed, arguments.collate_fn)
    train = sources["train"]
    refuse_stateful_data(train)
    request = _request(pipeline, num_workers, train.num_samples)
    if arguments.survives:
        request = replace(request, state_copies=KEPT_COPIES)
    minibatch, size, _count = microbatches(request, request.requested_stages or request.num_workers or 2)
    curve = wants_curve(pipeline) and needs_profile(pipeline, None)
    if curve:
        size = max(size, min(minibatch, CURVE_SAMPLES))
    columns = _columns(train, loss_fn is not None)
    sizes = {mode: look_at(source, columns, minibatch) for mode, source in sources.items()}
    seen = sizes["train"]
    example = seen.rows(train, columns, min(max(2, size), train.num_samples), seen.largest)
    varying = frozenset[tuple[Any, int]]().union(*(each.varying for each in sizes.values()))
    metrics = arguments.metrics if evaluates else None
    precision, outputs = PRECISIONS[pipeline.precision], MetricReads()
    if metrics and loss_fn is None:
        outputs = metric_reads(metrics, built, by_name(columns, example), precision)
    captured = capture(
        built, example, columns, loss_fn, evaluates=evaluates, metric_reads=outputs, precision=precision,
        parts=pipeline.loss_reduction != "per_microbatch", varying=varying,
        progress=progress,
    )  # fmt: skip
    refuse_unfit_shapes(captured, sizes)
    if captured.one_size is not None and wants_curve(pipeline):
        raise ConfigError(
            "forward takes one number of samples only, and num_microbatches='auto' and retune_microbatches compare "
            f"several. Give num_microbatches a number. {ANY_SIZE}"
        )
    rows = by_name(columns, example)
    refuse_aliased_memory(captured)
    bare = is_tried_without_model(built, captured, pipeline)
    if not (bare and _loss_runs(captured, rows)):
        rehearse(built, captured, rows)
    evaluated = _try_evaluation(built, captured, sources, columns, metrics, bare=bare) if evaluates else ()
    larger: Mapping[Any, torch.Tensor] = {}
    if curve and (most := min(minibatch, MOST_SAMPLES, MOST_BYTES // max(1, _bytes_per_sample(rows)))) > size:
        larger = by_name(columns, seen.rows(train, columns, most, seen.largest))
    return Opened(
        built,
        sources,
        request,
        loss_fn is not None,
        captured,
        rows,
        larger,
        memory,
        sizes["train"],
        unfilled,
        evaluated,
    )


def _try_evaluation(
    model: torch.nn.Module,
    captured: Capture,
    sources: Mapping[str, Source],
    columns: tuple[Any, ...],
    metrics: Mapping[str, Any] | None,
    *,
    bare: bool,
) -> tuple[str, ...]:
    """Try the evaluation of a few rows; return the names of the metrics' numbers, or () without metrics.

    Args:
        bare: True to run the loss on random outputs, see ``is_tried_without_model``; metrics need those of the model.
    """
    source = sources["eval"]
    check_columns(columns, source, sources["train"])

    def read(count: int) -> dict[Any, torch.Tensor]:
        return by_name(columns, source.read(0, 0, count, columns))

    count = min(captured.one_size or NUM_ROWS, source.num_samples)
    rows = read(count)
    if metrics or not (bare and _loss_runs(captured, rows, training=False)):
        rehearse_evaluation(model, captured, rows)
    if not metrics:
        return ()
    most = (
        count
        if captured.one_size
        else max(count, min(MOST_SAMPLES, MOST_BYTES // max(1, _bytes_per_sample(rows)), source.num_samples))
    )
    return try_metrics(metrics, captured, rows, lambda: read(most))


def is_tried_without_model(model: torch.nn.Module, captured: Capture, pipeline: PipelineConfig) -> bool:
    """Return True if a run is prepared without computing the model, which takes minutes for a large one on a CPU.

    Both things that its computation would show must have been given up in the configuration: what the loss averages
    over (loss_reduction), and whether stages compute as the model does (verify="off"). A model with buffers that a
    forward changes is computed all the same: only then does it show what a backward does to them.
    """
    (program,) = captured.programs(())
    given_up = pipeline.loss_reduction != "auto" and pipeline.verify == "off"
    return given_up and is_large(model) and not program.train.changing_buffers


def _loss_runs(captured: Capture, rows: Mapping[Any, torch.Tensor], *, training: bool = True) -> bool:
    """Return True if the loss runs without the model; the graph of a model's own loss was traced with it."""
    if captured.loss_fn is None:
        return True
    try:
        return loss_runs(captured, rows, training=training)
    except Exception:  # noqa: BLE001  (a model that needs its weights for shapes)
        return False


def _bytes_per_sample(rows: Mapping[Any, torch.Tensor]) -> int:
    return sum(x[:1].nbytes for x in rows.values() if x.dim())


def _eval_source(data: Any, seed: int, collate: Collate | None) -> Source:
    """Open eval_data like train_data, but without shuffling."""
    try:
        source = open_data(data, seed=seed, shuffle=False, collate=collate)
        refuse_stateful_data(source)
    except DataError as error:
        raise DataError(f"eval_data: {error}") from None
    return source


def refuse_stateful_data(source: Source) -> None:
    """Raise DataError if reading an item changes the Python state of a map-style dataset or of its collate_fn.

    A few items are read twice. State that only the first read changes is a cache, and is allowed.

    Raises:
        DataError: the second read changed state too; the message has what changed.
    """
    if not isinstance(source, MapSource) or source.is_tensors:
        return
    objects = ((source.dataset, source.name), (source.collate, "collate_fn"))
    states = []
    for _ in range(2):
        source.read(0, 0, min(STATE_ROWS, source.num_samples), source.columns)
        states.append([read_memory_of(value, name) for value, name in objects])
    changes = (first_change(once, twice) for once, twice in zip(*states, strict=True))
    if change := next(filter(None, changes), ""):
        raise DataError(
            f"Reading items of {source.name} changes {change}. Every stage reads for itself and would count "
            "differently. Make an item a function of its index and of draws from torch's, numpy's or Python's global "
            "generators, which raypipe seeds by (seed, epoch, row) around each item."
        )


def resolve_defaults(train_data: Any, pipeline: PipelineConfig) -> PipelineConfig:
    """Replace minibatch_size="auto" by a DataLoader's batch size, and schedule="auto" by "slack" for whole backwards.

    Raises:
        ConfigError: the DataLoader's batch size is not the configured minibatch_size.
    """
    size = batch_size_of(train_data, pipeline.minibatch_size)
    if size != pipeline.minibatch_size:
        pipeline = replace(pipeline, minibatch_size=size)
    whole = pipeline.compile_stages != "off" or pipeline.cuda_graphs
    if whole and pipeline.schedule == "auto" and not laned(pipeline):
        # As "auto", without "zb-h1", which splits backwards.
        return replace(pipeline, schedule="gpipe" if pipeline.loss_over == "minibatch" else "slack")
    return pipeline


def build_model(model: torch.nn.Module | Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return ``model`` if it is a module; else call it, and return the module that it builds.

    Raises:
        ConfigError: the call fails, or its result is not a module.
    """
    if isinstance(model, torch.nn.Module):
        return model
    try:
        built = model()
    except RaypipeError:
        raise
    except Exception as error:  # noqa: BLE001  (reported in one paragraph)
        raise ConfigError(
            f"model cannot be built{quoted(error)}: {short(error)} Give an nn.Module, or a function without arguments "
            "that builds one."
        ) from None
    if not isinstance(built, torch.nn.Module):
        raise ConfigError(f"model={type(built).__name__} is no nn.Module; give one, or a function that builds one.")
    return built


def check_columns(columns: Sequence[Any], source: Source, train: Source, name: str = "eval_data") -> None:
    """Raise DataError if data (argument ``name``) lack one of these columns of train_data, or have it elsewhere."""
    numbered = all(isinstance(name, int) for name in columns)
    there = tuple(range(len(source.columns))) if numbered else source.columns
    missing = [name for name in columns if name not in there]
    if missing:
        raise DataError(
            f"{name} has no column {missing[0]!r}, but train_data has; it has {', '.join(map(repr, there))}. "
            "Give it the columns of train_data, in the same order."
        )
    for at in columns if numbered else ():
        column, wanted = source.columns[at], train.columns[at]
        if column != wanted and (column in train.columns or wanted in source.columns):
            raise DataError(
                f"{name} has column {column!r} where train_data has {wanted!r}: {', '.join(map(repr, source.columns))} "
                f"instead of {', '.join(map(repr, train.columns))}. With a loss_fn columns are taken by their place: "
                "the last is the target, those before it are what the model is called with. Give them in the order of "
                "train_data."
            )


def example_of(source: Source, with_loss_fn: bool, samples: int) -> dict[Any, torch.Tensor]:
    """Read the first ``samples`` samples, but at least two, as {column: tensor}.

    Raises:
        DataError: the data has no target for the loss_fn.
    """
    columns = _columns(source, with_loss_fn)
    return by_name(columns, source.read(0, 0, min(max(2, samples), source.num_samples), columns))


def wants_curve(pipeline: PipelineConfig) -> bool:
    """Return True if the planner needs seconds by micro-batch size."""
    return pipeline.num_microbatches == "auto" or pipeline.retune_microbatches


def needs_profile(pipeline: PipelineConfig, cluster: Cluster | None) -> bool:
    """Return True if the planner needs seconds or bytes of operations: for a ``cluster``, or for open settings."""
    if cluster is not None or pipeline.memory_limit_bytes != "auto" or pipeline.retune_microbatches:
        return True
    if pipeline.num_replicas == "auto":
        return True
    if pipeline.partitioner == "parameters":
        return False
    return isinstance(pipeline.partitioner, str) or pipeline.num_microbatches == "auto"


def by_name(columns: tuple[Any, ...], example: Any) -> dict[Any, torch.Tensor]:
    """Map columns to the tensors that a source has read: ``example`` is a mapping, or a tuple in order of columns."""
    return dict(example) if isinstance(example, Mapping) else dict(zip(columns, example, strict=True))


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value


def _request(pipeline: PipelineConfig, num_workers: int | None, num_samples: int) -> Request:
    split_points = () if isinstance(pipeline.partitioner, str) else tuple(pipeline.partitioner)
    num_stages = len(split_points) + 1 if split_points else _unless_auto(pipeline.num_stages)
    per_replica = pipeline.update_interval == "per_replica"
    return Request(
        num_stages=_unless_auto(pipeline.num_stages),
        num_workers=num_workers,
        split_points=split_points,
        minibatch_size=_unless_auto(pipeline.minibatch_size),
        num_microbatches=_unless_auto(pipeline.num_microbatches),
        num_samples=num_samples,
        schedule=_schedule(pipeline),
        group_size=_unless_auto(pipeline.group_size),
        slack=_unless_auto(pipeline.slack),
        partitioner=pipeline.partitioner if isinstance(pipeline.partitioner, str) else "auto",
        memory_limit_bytes=_unless_auto(pipeline.memory_limit_bytes),
        weight_versions=_unless_auto(pipeline.weight_versions),
        update_interval=None if per_replica else _unless_auto(pipeline.update_interval),
        per_replica=per_replica,
        vertical_sync=_unless_auto(pipeline.vertical_sync) or False,
        stale_correction=pipeline.stale_correction,
        discount_updates=pipeline.discount_updates,
        clips=pipeline.max_grad_norm is not None,
        skips=pipeline.on_nonfinite == "skip" or PRECISIONS[pipeline.precision].scaled,
        leaf_factor=PRECISIONS[pipeline.precision].leaf_factor,
        recompute=asked_recompute(pipeline, num_stages),
        replicas=_unless_auto(pipeline.num_replicas),
        sums_factor=0.5 if pipeline.codec_sums == "bf16" else 1.0,
        shards=pipeline.shard_optimizer,
        lanes=_unless_auto(pipeline.num_lanes),
        replicated_buffers=pipeline.replicated_buffers,
        codecs=(_codec(pipeline.codec_forward), _codec(pipeline.codec_backward)),
        codec_choices=permitted_codecs(pipeline),
        min_gain=MIN_GAIN if pipeline.min_gain == "auto" else pipeline.min_gain,
    )


def _schedule(pipeline: PipelineConfig) -> str:
    """Return the configured schedule; "auto" is 1f1b if lanes or replicas were configured."""
    lanes_are_given = pipeline.num_replicas != "auto" or pipeline.num_lanes not in ("auto", 1)
    return "1f1b" if pipeline.schedule == "auto" and laned(pipeline) and lanes_are_given else pipeline.schedule


def _codec(name: str) -> CodecCost:
    """Return the cost of a compression codec on this machine; NO_CODEC for "auto", which begins without a codec."""
    return NO_CODEC if name in ("auto", "none") else CodecCost(name, *codec_cost(name))


def asked_recompute(pipeline: PipelineConfig, num_stages: int | None) -> bool | tuple[bool | None, ...] | None:
    """Return the configured ``recompute`` as the planner takes it: True (always), False (never), None (open).

    Returns:
        One value for all stages, or a tuple with one value for each stage if the field was given by stage.
    """
    recompute = pipeline.recompute
    if isinstance(recompute, str):
        return _RECOMPUTE[recompute]
    if all(type(item) is int for item in recompute):  # numbers of stages
        return tuple(stage in recompute for stage in range(num_stages or 0))
    return tuple(item if isinstance(item, bool) else _RECOMPUTE[str(item)] for item in recompute)


_RECOMPUTE = {"never": False, "always": True, "auto": None}


def _columns(source: Source, with_loss_fn: bool) -> tuple[Any, ...]:
    """Return the columns that the model and its loss take, in order."""
    numbered = all(isinstance(name, int) for name in source.columns)
    if with_loss_fn:
        columns: tuple[Any, ...] = tuple(range(len(source.columns)))
        if len(columns) < 2:
            raise DataError(
                f"With a loss_fn a sample is (input, ..., target), but the data has {len(columns)} column. Add the "
                "target as the last column, or leave loss_fn out where the model returns its own loss."
            )
    else:
        columns = tuple(range(len(source.columns))) if numbered else tuple(source.columns)
    if source.num_samples < 2:
        raise DataError("train_data has 1 sample, and a model is traced on 2: give it more.")
    return columns
