"""The user's arguments, looked at: data opened, model captured, and what was asked for as the planner wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.config.replicas import laned
from raypipe.engine.capture import Capture, capture
from raypipe.engine.checkpoint import StateSource
from raypipe.engine.codec.cost import codec_cost
from raypipe.engine.data.collate import Collate
from raypipe.engine.data.source import Source, open_data
from raypipe.engine.meter import Asked
from raypipe.engine.remembered import Memory, read_memory
from raypipe.engine.train_mode import refuse_still_norms
from raypipe.engine.trial.rehearsal import (
    NUM_ROWS,
    refuse_frequencies,
    refuse_lazy,
    refuse_scripted,
    refuse_sparse,
    rehearse,
    rehearse_evaluation,
)  # fmt: skip
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.ir.cluster import Cluster
from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.ir.precision import PRECISIONS
from raypipe.ir.schedule_spec import KINDS
from raypipe.planner.tune import Request, microbatches
from raypipe.prepare.arguments import Arguments, Unfilled
from raypipe.prepare.drawn_outputs import rehearse_loss
from raypipe.prepare.metrics import asked_by, try_metrics

__all__ = [
    "Opened", "asked_recompute", "build_model", "by_name", "check_columns", "example_of", "needs_profile",
    "open_arguments", "wants_curve",
]  # fmt: skip

KEPT_COPIES = 4
"""Of the state, where a run survives failures: two of a worker's own stages and two of those of another one. What it
keeps of the messages that it sent may take as much as one more."""
CURVE_SAMPLES = 8
"""How seconds grow with the micro-batch shows in sizes of up to this many samples..."""
MOST_SAMPLES, MOST_BYTES = 256, 16 << 20
"""... and, where that takes next to nothing, in sizes of up to this many, of up to so many bytes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The user's arguments, looked at: what a plan and a profile begin with.

    Attributes:
        example: one micro-batch by column.
        larger: more samples by column, where larger micro-batches are of interest; else empty.
        memory: what model and loss remembered when they came, which every call here changes and training begins with.
        unfilled: where workers find the tensors that the model was built without; empty where it has all.
        evaluated: names of the numbers that metrics give, where that is known.
    """

    model: torch.nn.Module
    sources: Mapping[str, Source]
    request: Request
    with_loss_fn: bool
    captured: Capture
    example: Mapping[Any, torch.Tensor]
    larger: Mapping[Any, torch.Tensor]
    memory: Memory
    unfilled: tuple[StateSource, ...] = ()
    evaluated: tuple[str, ...] = ()


def open_arguments(given: Arguments, pipeline: PipelineConfig, num_workers: int | None) -> Opened:
    """Open the data, build the model and capture it.

    Raises:
        RaypipeError: one paragraph that says what to change.
    """
    built, unfilled = given.unfilled() if given.unfilled else Unfilled(build_model(given.model), ())
    loss_fn, evaluates = given.loss_fn, given.eval_data is not None
    refuse_lazy(built)
    refuse_scripted(built)
    refuse_sparse(built)
    refuse_still_norms(built)
    if pipeline.several_microbatches:
        refuse_frequencies(built, pipeline.one_microbatch)
    memory = read_memory(built, loss_fn)
    sources = {"train": open_data(given.train_data, seed=pipeline.seed, collate=given.collate_fn)}
    if evaluates:
        sources["eval"] = _eval_source(given.eval_data, pipeline.seed, given.collate_fn)
    request = _request(pipeline, num_workers, sources["train"].num_samples)
    if given.survives:
        request = replace(request, state_copies=KEPT_COPIES + _keeps_log(pipeline))
    minibatch, size, _count = microbatches(request, request.asked_stages or request.num_workers or 2)
    curve = wants_curve(pipeline) and needs_profile(pipeline, None)
    if curve:
        size = max(size, min(minibatch, CURVE_SAMPLES))
    columns, example = _read(sources["train"], loss_fn is not None, size)
    metrics = given.metrics if evaluates else None
    precision, asked = PRECISIONS[pipeline.precision], Asked()
    if metrics and loss_fn is None:
        asked = asked_by(metrics, built, by_name(columns, example), precision)
    captured = capture(built, example, columns, loss_fn, evaluates=evaluates, asked=asked, precision=precision)
    rehearse(built, captured, by_name(columns, example))
    if unfilled:
        rehearse_loss(captured, by_name(columns, example))
    evaluated: tuple[str, ...] = ()
    if evaluates:
        check_columns(columns, sources["eval"], sources["train"])
        count = min(NUM_ROWS, sources["eval"].num_samples)
        rows = by_name(columns, sources["eval"].read(0, 0, count, columns))
        rehearse_evaluation(built, captured, rows)
        if unfilled:
            rehearse_loss(captured, rows, data="eval_data")
        if metrics:
            bytes_each = max(1, sum(x[:1].nbytes for x in rows.values() if x.dim()))
            most = max(count, min(MOST_SAMPLES, MOST_BYTES // bytes_each, sources["eval"].num_samples))
            evaluated = try_metrics(
                metrics, captured, rows, lambda: by_name(columns, sources["eval"].read(0, 0, most, columns))
            )
    larger: Mapping[Any, torch.Tensor] = {}
    if curve:
        bytes_each = sum(x[:1].nbytes for x in by_name(columns, example).values() if x.dim())
        most = min(minibatch, MOST_SAMPLES, MOST_BYTES // max(1, bytes_each))
        if most > size:
            larger = example_of(sources["train"], loss_fn is not None, most)
    rows = by_name(columns, example)
    return Opened(built, sources, request, loss_fn is not None, captured, rows, larger, memory, unfilled, evaluated)


def _eval_source(data: Any, seed: int, collate: Collate | None) -> Source:
    """Opened like train_data, in its own order."""
    try:
        return open_data(data, seed=seed, shuffle=False, collate=collate)
    except DataError as error:
        raise DataError(f"eval_data: {error}") from None


def build_model(model: torch.nn.Module | Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The module, or what the function builds.

    Raises:
        ConfigError: it cannot be built, or is no module.
    """
    if isinstance(model, torch.nn.Module):
        return model
    try:
        built = model()
    except RaypipeError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise ConfigError(
            f"model cannot be built{quoted(error)}: {short(error)} Give an nn.Module, or a function without arguments "
            "that builds one."
        ) from None
    if not isinstance(built, torch.nn.Module):
        raise ConfigError(f"model={type(built).__name__} is no nn.Module; give one, or a function that builds one.")
    return built


def check_columns(columns: Sequence[Any], source: Source, train: Source, name: str = "eval_data") -> None:
    """Refuse data that lacks a column of train_data or has it elsewhere, before the first evaluation is due.

    Args:
        columns: that are read.
        name: of the argument that brought the data.

    Raises:
        DataError: names the column.
    """
    numbered = all(isinstance(name, int) for name in columns)
    there = tuple(range(len(source.columns))) if numbered else source.columns
    missing = [name for name in columns if name not in there]
    if missing:
        raise DataError(
            f"{name} has no column {missing[0]!r}, but train_data has; it has {', '.join(map(repr, there))}. "
            "Give it the columns of train_data, in the same order."
        )
    for at in columns if numbered else ():
        found, wanted = source.columns[at], train.columns[at]
        if found != wanted and (found in train.columns or wanted in source.columns):
            raise DataError(
                f"{name} has column {found!r} where train_data has {wanted!r}: {', '.join(map(repr, source.columns))} "
                f"instead of {', '.join(map(repr, train.columns))}. With a loss_fn columns are taken by their place: "
                "the last is the target, those before it are what the model is called with. Give them in the order of "
                "train_data."
            )


def example_of(source: Source, with_loss_fn: bool, samples: int) -> dict[Any, torch.Tensor]:
    """The first samples by column, at least two of them.

    Raises:
        DataError: there is no target for the loss_fn.
    """
    return by_name(*_read(source, with_loss_fn, samples))


def wants_curve(pipeline: PipelineConfig) -> bool:
    """Whether it matters how seconds grow with the micro-batch."""
    return pipeline.num_microbatches == "auto" or pipeline.retune_microbatches


def needs_profile(pipeline: PipelineConfig, cluster: Cluster | None) -> bool:
    """Whether anything is left open that seconds or bytes decide; equal parameters never ask for seconds."""
    if cluster is not None or pipeline.memory_limit_bytes != "auto" or pipeline.retune_microbatches:
        return True
    if pipeline.num_replicas == "auto":
        return True
    if pipeline.partitioner == "parameters":
        return False
    return isinstance(pipeline.partitioner, str) or pipeline.num_microbatches == "auto"


def by_name(columns: tuple[Any, ...], example: Any) -> dict[Any, torch.Tensor]:
    """What a source has read, by column."""
    return dict(example) if isinstance(example, Mapping) else dict(zip(columns, example, strict=True))


def _keeps_log(pipeline: PipelineConfig) -> bool:
    """Whether workers of a run that survives failures may keep what they send."""
    kind = KINDS.get(pipeline.schedule)
    return pipeline.replay == "auto" and pipeline.num_replicas in (1, "auto") and (kind is None or kind.synchronous)


def _given(value: Any) -> Any:
    return None if value == "auto" else value


def _request(pipeline: PipelineConfig, num_workers: int | None, num_samples: int) -> Request:
    split_points = () if isinstance(pipeline.partitioner, str) else tuple(pipeline.partitioner)
    num_stages = len(split_points) + 1 if split_points else _given(pipeline.num_stages)
    per_replica = pipeline.update_interval == "per_replica"
    return Request(
        num_stages=_given(pipeline.num_stages),
        num_workers=num_workers,
        split_points=split_points,
        minibatch_size=_given(pipeline.minibatch_size),
        num_microbatches=_given(pipeline.num_microbatches),
        num_samples=num_samples,
        schedule=_schedule(pipeline),
        group_size=_given(pipeline.group_size),
        slack=_given(pipeline.slack),
        partitioner=pipeline.partitioner if isinstance(pipeline.partitioner, str) else "auto",
        memory_limit_bytes=_given(pipeline.memory_limit_bytes),
        weight_versions=_given(pipeline.weight_versions),
        update_interval=None if per_replica else _given(pipeline.update_interval),
        per_replica=per_replica,
        vertical_sync=_given(pipeline.vertical_sync) or False,
        clips=pipeline.max_grad_norm is not None,
        skips=pipeline.on_nonfinite == "skip" or PRECISIONS[pipeline.precision].scaled,
        leaf_factor=PRECISIONS[pipeline.precision].leaf_factor,
        recompute=asked_recompute(pipeline, num_stages),
        replicas=_given(pipeline.num_replicas),
        sums_factor=0.5 if pipeline.codec_sums == "bf16" else 1.0,
        shards=pipeline.shard_optimizer,
        lanes=_given(pipeline.num_lanes),
        replicated_buffers=pipeline.replicated_buffers,
        codecs=(_codec(pipeline.codec_forward), _codec(pipeline.codec_backward)),
    )


def _schedule(pipeline: PipelineConfig) -> str:
    """As it was asked for; of lanes that were, and of replicas, "auto" is 1f1b."""
    lanes_are_given = pipeline.num_replicas != "auto" or pipeline.num_lanes not in ("auto", 1)
    return "1f1b" if pipeline.schedule == "auto" and laned(pipeline) and lanes_are_given else pipeline.schedule


def _codec(name: str) -> CodecCost:
    """What a codec takes here; a run with "auto" begins without one."""
    return NO_CODEC if name in ("auto", "none") else CodecCost(name, *codec_cost(name))


def asked_recompute(pipeline: PipelineConfig, num_stages: int | None) -> bool | tuple[bool | None, ...] | None:
    """As the planner wants it, by stage where it was given so."""
    given = pipeline.recompute
    if isinstance(given, str):
        return _RECOMPUTE[given]
    if all(type(item) is int for item in given):  # numbers of stages
        return tuple(stage in given for stage in range(num_stages or 0))
    return tuple(item if isinstance(item, bool) else _RECOMPUTE[str(item)] for item in given)


_RECOMPUTE = {"never": False, "always": True, "auto": None}


def _read(source: Source, with_loss_fn: bool, microbatch_size: int) -> tuple[tuple[Any, ...], Any]:
    """Columns in order and one micro-batch of at least two samples, as a tuple or as a dict."""
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
    count = min(max(2, microbatch_size), source.num_samples)
    return columns, source.read(0, 0, count, columns)
