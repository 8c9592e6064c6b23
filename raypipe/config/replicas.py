"""What replicas of stages mean to the other fields of a configuration."""

from __future__ import annotations

import math

from raypipe.config.fields import PipelineFields
from raypipe.errors import ConfigError
from raypipe.ir.schedule_spec import KINDS, ScheduleKind

__all__ = ["check_replicas", "laned", "replicated"]


def replicated(config: PipelineFields) -> bool:
    """Whether any stage is to have several workers, or may get them."""
    counts = config.num_replicas
    return counts == "auto" or max(counts if isinstance(counts, tuple) else (counts,)) > 1


def laned(config: PipelineFields) -> bool:
    """Whether gradients are summed in lanes: with replicas, or where they may come."""
    return replicated(config) or config.num_lanes not in ("auto", 1)


def check_replicas(config: PipelineFields) -> None:
    """Refuse what has no replicas or lanes.

    Raises:
        ConfigError: names both fields, their values and the cure.
    """
    if config.replicated_buffers and not replicated(config):
        raise ConfigError(
            f"replicated_buffers=True means nothing with num_replicas={config.num_replicas!r}: no stage has several "
            "replicas. Set num_replicas, as in num_replicas=[2, 1], or leave replicated_buffers out."
        )
    if config.shard_optimizer:
        _check_sharded(config)
    if config.update_interval == "per_replica":
        _check_per_replica(config)
    if not laned(config):
        if config.codec_sums != "none":
            raise ConfigError(
                f"codec_sums={config.codec_sums!r} means nothing with num_replicas={config.num_replicas!r} and one "
                "lane, where nothing is exchanged. Set num_replicas, or leave codec_sums out."
            )
        return
    what = f"num_replicas={config.num_replicas!r}" if replicated(config) else f"num_lanes={config.num_lanes!r}"
    if config.num_replicas == "auto":
        _check_auto(config)
    elif replicated(config):
        _check_counts(config)
    if _kind(config).several_stages:
        _check_several_stages(config)
    if not _kind(config).synchronous:
        _check_shares(config)
    if config.partitioner == "hierarchical":
        raise ConfigError(
            f"{what} means nothing to partitioner='hierarchical', which looks for replicas by itself, to plan with and "
            "not to run. Set partitioner='auto'; with num_replicas='auto' the planner chooses them for a run."
        )


def _check_sharded(config: PipelineFields) -> None:
    """Optimizer state that replicas share out: there are some, and their stage steps with nothing else under way."""
    if not replicated(config):
        raise ConfigError(
            f"shard_optimizer=True means nothing with num_replicas={config.num_replicas!r}: no stage has replicas that "
            "could share out the state of its optimizer. Set num_replicas, as in num_replicas=[2, 1], or leave "
            "shard_optimizer out."
        )
    if not _kind(config).synchronous:
        raise ConfigError(
            f"shard_optimizer=True is not possible with schedule={config.schedule!r}, whose stages go on with the next "
            "micro-batches while they update: parameters that replicas exchange behind a step come too late. Take "
            "a synchronous schedule, such as '1f1b', or leave shard_optimizer out."
        )


def _check_per_replica(config: PipelineFields) -> None:
    """Stages that update more or less often than others, each by its replicas."""
    name = "update_interval='per_replica'"
    if config.schedule != "pipedream":
        return  # which has no update interval, as is said elsewhere
    if not replicated(config):
        raise ConfigError(
            f"{name} means nothing with num_replicas={config.num_replicas!r}: no stage has several replicas. Set "
            "num_replicas, as in num_replicas=[2, 1], or leave update_interval out."
        )
    for field in ("weight_versions", "vertical_sync"):
        value = getattr(config, field)
        if value not in ("auto", False):
            raise ConfigError(
                f"{name} with {field}={value!r}: stages update at different times, so that each has as many versions "
                f"as it needs, and no two the same. Leave {field} out, or give update_interval a number."
            )
    if config.loss_reduction not in ("auto", "mean", "sum"):
        raise ConfigError(
            f"{name} with loss_reduction={config.loss_reduction!r}: a stage takes the mean over its own samples, whose "
            "targets only the last stage could count. Take 'mean' or 'sum', or give update_interval a number."
        )


def _kind(config: PipelineFields) -> ScheduleKind:
    """What is known of the schedule; "auto" becomes a synchronous one with a stage on each worker."""
    return KINDS.get(config.schedule, ScheduleKind())


def _check_several_stages(config: PipelineFields) -> None:
    """Workers that hold several stages each have as many replicas."""
    counts = config.num_replicas
    if counts == "auto":
        raise ConfigError(
            f"num_replicas='auto' compares stages of one worker or more, and schedule={config.schedule!r} puts several "
            "stages on each. Set a number, as in num_replicas=2, or take schedule='auto'."
        )
    if isinstance(counts, tuple) and len(set(counts)) > 1:
        raise ConfigError(
            f"num_replicas={counts!r} with schedule={config.schedule!r}: workers that hold several stages have as many "
            f"replicas of each. Set num_replicas={max(counts)}, or take a schedule with one stage on each worker, such "
            "as '1f1b'."
        )


def _check_auto(config: PipelineFields) -> None:
    if config.partitioner == "parameters":
        raise ConfigError(
            "num_replicas='auto' compares plans by their seconds, and partitioner='parameters' measures none. Set "
            "partitioner='auto', or a number of replicas."
        )
    if not _kind(config).synchronous:
        raise ConfigError(
            f"num_replicas='auto' compares the seconds of a step, and with schedule={config.schedule!r} other numbers "
            "of replicas also make other gradients, of older or newer weights. Give numbers, or take a synchronous "
            "schedule."
        )


def _check_shares(config: PipelineFields) -> None:
    """Replicas of an asynchronous schedule have equal shares of every update, which all of them make together."""
    counts = config.num_replicas
    assert counts != "auto"
    least = math.lcm(*(counts if isinstance(counts, tuple) else (counts,)))
    lanes = least if config.num_lanes == "auto" else config.num_lanes
    if lanes % least:
        raise ConfigError(
            f"num_lanes={lanes} gives replicas of num_replicas={counts!r} unequal shares, which schedule="
            f"{config.schedule!r} cannot have. Set num_lanes to a multiple of {least}, or leave it out."
        )
    for name in ("num_microbatches", "update_interval"):
        value = getattr(config, name)
        if isinstance(value, int) and value % lanes:
            raise ConfigError(
                f"{name}={value} with schedule={config.schedule!r} is no multiple of the {lanes} lanes into which "
                f"gradients are summed, so that replicas would have unequal shares of an update. Set {name}="
                f"{-(-value // lanes) * lanes}."
            )


def _check_counts(config: PipelineFields) -> None:
    counts = config.num_replicas
    stages = config.num_stages if isinstance(config.partitioner, str) else len(config.partitioner) + 1
    if stages == "auto":
        raise ConfigError(
            f"num_replicas={counts!r} with num_stages='auto': say how many stages there are, as in num_stages=2. One "
            "stage with replicas is plain data parallelism."
        )
    most = max(counts if isinstance(counts, tuple) else (counts,))
    if config.num_microbatches != "auto" and config.num_microbatches < most:
        raise ConfigError(
            f"num_microbatches={config.num_microbatches} leaves replicas of num_replicas={counts!r} without any. Set "
            f"num_microbatches to {most} or more, or fewer replicas."
        )
    if config.num_lanes != "auto" and config.num_lanes < most:
        raise ConfigError(
            f"num_lanes={config.num_lanes} leaves replicas of num_replicas={counts!r} without micro-batches. Set "
            f"num_lanes to {most} or more, or leave it out."
        )
