"""What fields of a configuration mean to each other: values that are possible alone and at odds together.

Fields are looked at in the order in which the configuration lists them; the first that is at odds is named, with the
other one, the numbers, and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raypipe.config.fields import Auto, PipelineFields
from raypipe.config.replicas import check_replicas
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS
from raypipe.ir.schedule_spec import KINDS, ScheduleKind, kinds_to_search, takes

__all__ = ["check_together", "turns_schedule"]


def check_together(config: PipelineFields) -> None:
    """Refuse fields that are at odds.

    Raises:
        ConfigError: names both fields, their values and the cure.
    """
    _check_microbatches(config.minibatch_size, config.num_microbatches)
    _check_split_points(config.partitioner, config.num_stages)
    stages = config.num_stages if isinstance(config.partitioner, str) else len(config.partitioner) + 1
    _check_per_stage("num_replicas", config.num_replicas, stages)
    check_replicas(config)
    _check_recompute(config.recompute, stages)
    _check_link_ports(config.link_ports, config.transport)
    _check_link_checksum(config.link_checksum, config.transport)
    _check_group_size(config.group_size, config.schedule, config.num_microbatches)
    _check_slack(config.slack, config.schedule, stages)
    _check_weights(config)
    _check_skipping(config)
    _check_precision(config)
    _check_compiling(config)
    _check_chunked(config)
    _check_codecs(config)
    _check_retuning(config)
    _check_patience(config)


def _check_microbatches(minibatch_size: int | Auto, num_microbatches: int | Auto) -> None:
    if minibatch_size == "auto" or num_microbatches == "auto":
        return
    if num_microbatches > minibatch_size:
        raise ConfigError(
            f"num_microbatches={num_microbatches} is more than minibatch_size={minibatch_size} samples: "
            f"a micro-batch needs at least one. Set num_microbatches to {minibatch_size} or less."
        )
    microbatch_size = math.ceil(minibatch_size / num_microbatches)
    count = math.ceil(minibatch_size / microbatch_size)
    if count != num_microbatches:
        raise ConfigError(
            f"minibatch_size={minibatch_size} does not divide into num_microbatches={num_microbatches} of equal size "
            f"with a smaller last one: {microbatch_size} samples each make {count}. Set num_microbatches={count}, "
            f"or minibatch_size={microbatch_size * num_microbatches}."
        )


def _check_split_points(partitioner: str | Sequence[str], num_stages: int | Auto) -> None:
    if isinstance(partitioner, str):
        return
    twice = sorted({name for name in partitioner if list(partitioner).count(name) > 1})
    if twice:
        raise ConfigError(f"partitioner names {twice[0]!r} twice: a module begins one stage only.")
    if num_stages != "auto" and num_stages != len(partitioner) + 1:
        raise ConfigError(
            f"partitioner={partitioner!r} makes {len(partitioner) + 1} stages, but num_stages={num_stages}. "
            f"Leave num_stages out, or name {num_stages - 1} modules."
        )


def _check_per_stage(name: str, value: object, num_stages: int | Auto) -> None:
    if isinstance(value, tuple) and num_stages != len(value):
        raise ConfigError(
            f"{name}={value!r} speaks of {len(value)} stages, but num_stages={num_stages!r}. "
            f"Give one item per stage, or a single value for all; a list needs num_stages={len(value)} beside it."
        )


def _check_recompute(value: object, num_stages: int | Auto) -> None:
    numbers = [item for item in value if type(item) is int] if isinstance(value, tuple) else []
    if not numbers:
        _check_per_stage("recompute", value, num_stages)
    elif num_stages == "auto":
        raise ConfigError(
            f"recompute={value!r} names stages by number, but num_stages='auto' leaves open how many there are. Set "
            "num_stages too, or recompute='always'."
        )
    elif max(numbers) >= num_stages or len(set(numbers)) < len(numbers):
        wrong = max(numbers) if max(numbers) >= num_stages else max(n for n in numbers if numbers.count(n) > 1)
        why = f"there are {num_stages}, from 0 on" if wrong >= num_stages else "it stands there twice"
        raise ConfigError(f"recompute={value!r} names stage {wrong}, but {why}. Name each stage once.")


def _check_link_ports(link_ports: tuple[int, int] | Auto, transport: str) -> None:
    if link_ports != "auto" and transport not in ("auto", "tcp"):
        raise ConfigError(
            f"link_ports={link_ports!r} means nothing to transport={transport!r}: only 'tcp' links listen on these "
            "ports. Set transport='tcp', or leave link_ports out."
        )


def _check_link_checksum(link_checksum: str, transport: str) -> None:
    if link_checksum == "on" and transport == "ray_collective":
        raise ConfigError(
            "link_checksum='on' is not possible with transport='ray_collective', whose payloads carry no checksum. "
            "Leave link_checksum out, or take transport='tcp'."
        )


def _check_group_size(group_size: int | Auto, schedule: str, num_microbatches: int | Auto) -> None:
    if group_size == "auto":
        return
    if not takes(schedule, "group_size"):
        raise ConfigError(
            f"group_size={group_size} means nothing to schedule={schedule!r}: only 'kfkb' groups micro-batches. "
            "Set schedule='kfkb', or leave group_size out."
        )
    if num_microbatches != "auto" and group_size > num_microbatches:
        raise ConfigError(
            f"group_size={group_size} is more than num_microbatches={num_microbatches}. "
            f"Set group_size to {num_microbatches} or less."
        )


def _check_slack(slack: int | Sequence[int] | Auto, schedule: str, num_stages: int | Auto) -> None:
    if slack != "auto" and not takes(schedule, "slack"):
        raise ConfigError(
            f"slack={slack!r} means nothing to schedule={schedule!r}. Set schedule='slack', 'zb-h1', 'pipedream' or "
            "'2bw', or leave slack out."
        )
    if not isinstance(slack, tuple):
        return
    if num_stages == "auto":
        raise ConfigError(
            f"slack={slack!r} speaks of {len(slack)} hops, but num_stages='auto' leaves open how many there are. Set "
            f"num_stages={len(slack) + 1} too, or give a single number for all hops."
        )
    if num_stages != len(slack) + 1:
        raise ConfigError(
            f"slack={slack!r} speaks of {len(slack)} hops, but num_stages={num_stages} has {num_stages - 1}. "
            "Give one number per hop, or a single one for all."
        )


def _check_weights(config: PipelineFields) -> None:
    """Weight versions belong to asynchronous schedules, and 2bw leaves nothing open."""
    schedule = config.schedule
    fixed = {"weight_versions": 1, "vertical_sync": False}
    meaning = "runs empty before every update and has one weight version"
    if schedule == "2bw":
        fixed = {"weight_versions": 2, "vertical_sync": True}
        meaning = "updates once per mini-batch and has two weight versions, the same on every stage"
    elif schedule == "pipedream":
        return
    for name in ("weight_versions", "update_interval", "vertical_sync"):
        value = getattr(config, name)
        if value != "auto" and (name not in fixed or value != fixed[name]):
            raise ConfigError(
                f"{name}={value!r} means nothing to schedule={schedule!r}, which {meaning}. Set schedule='pipedream', "
                f"or leave {name} out."
            )


def _check_skipping(config: PipelineFields) -> None:
    """Stages of an asynchronous schedule update without knowing each other's norms."""
    if config.on_nonfinite == "skip" and not _kind(config).synchronous:
        raise ConfigError(
            f"on_nonfinite='skip' is not possible with schedule={config.schedule!r}: its stages update without waiting "
            "for each other, so that some have taken a step before another one finds that it is not finite. Take a "
            "synchronous schedule, such as '1f1b', or leave on_nonfinite out for 'stop'."
        )


def _check_precision(config: PipelineFields) -> None:
    """A scale of the loss that all stages move in the same step, or none."""
    if PRECISIONS[config.precision].scaled and not _kind(config).synchronous:
        raise ConfigError(
            f"precision={config.precision!r} is not possible with schedule={config.schedule!r}: its stages update "
            "without waiting for each other, so that some have taken a step before another one finds that gradients "
            "overflowed. Take precision='bf16', or a synchronous schedule, such as '1f1b'."
        )


def _check_compiling(config: PipelineFields) -> None:
    """The backward of a compiled stage is one piece."""
    if config.compile_stages != "off" and _kind(config).splits_backward:
        raise ConfigError(
            f"compile_stages={config.compile_stages!r} is not possible with schedule={config.schedule!r}, which runs a "
            "backward in two parts: that of a compiled stage is one piece. Take schedule='slack' or '1f1b', or "
            "compile_stages='off'."
        )


def _check_chunked(config: PipelineFields) -> None:
    """Several stages per worker: two of them in a V."""
    if not _kind(config).several_stages:
        return
    if config.partitioner == "hierarchical":
        raise ConfigError(
            f"partitioner='hierarchical' means nothing to schedule={config.schedule!r}, which shares each worker "
            "between stages instead of each stage between workers. Set partitioner='auto' or schedule='1f1b'."
        )
    stages = config.num_stages if isinstance(config.partitioner, str) else len(config.partitioner) + 1
    if config.schedule == "zb-v" and stages != "auto" and stages % 2:
        what = f"num_stages={stages}" if config.num_stages != "auto" else f"partitioner={config.partitioner!r}"
        raise ConfigError(
            f"{what} makes {stages} stages, but schedule='zb-v' puts two on every worker. Make them {stages + 1}, or "
            "take schedule='interleaved'."
        )


def _kind(config: PipelineFields) -> ScheduleKind:
    """What is known of the schedule; "auto" becomes one of the kinds that can be turned."""
    return KINDS.get(config.schedule, ScheduleKind())


def turns_schedule(config: PipelineFields) -> bool:
    """Whether the controller may turn the schedule: one that it searches for, whose numbers nobody gave."""
    return bool(kinds_to_search(config.schedule)) and config.group_size == "auto" == config.slack


def _turned(config: PipelineFields) -> tuple[str, ...]:
    """Fields by which the controller has something to turn; see raypipe.runtime.run.controller_config."""
    if not _kind(config).turned or config.retune_interval_steps == 0:
        return ()
    found = ["schedule"] if turns_schedule(config) else []
    found += [name for name in ("codec_forward", "codec_backward") if getattr(config, name) == "auto"]
    return tuple(found + ["retune_microbatches"] * config.retune_microbatches)


def _still(config: PipelineFields) -> str:
    """The field, with its value, under which nothing is turned."""
    name = "retune_interval_steps" if _kind(config).turned else "schedule"
    return f"{name}={getattr(config, name)!r}"


def _check_codecs(config: PipelineFields) -> None:
    """A codec that waits to be turned needs somebody who turns it."""
    for name in ("codec_forward", "codec_backward"):
        if getattr(config, name) == "auto" and not _turned(config):
            raise ConfigError(
                f"{name}='auto' means nothing with {_still(config)}, under which nothing is turned while the "
                f"run trains. Name a codec, such as {name}='bf16', or leave {name} out for 'none'."
            )


def _check_retuning(config: PipelineFields) -> None:
    """The controller turns nothing of a schedule that never runs empty or shares workers, nor with an interval of 0."""
    if config.retune_microbatches and not _turned(config):
        raise ConfigError(
            f"retune_microbatches=True means nothing with {_still(config)}, under which nothing is "
            "turned while the run trains. Leave one of them out."
        )


def _check_patience(config: PipelineFields) -> None:
    """Patience of a controller that has nothing to turn; an interval of 0 is what it does then."""
    for name in ("retune_interval_steps", "link_drift_threshold", "min_gain"):
        value = getattr(config, name)
        if value not in ("auto", 0) and not _turned(config):
            still = not _kind(config).turned or config.retune_interval_steps == 0
            with_what = _still(config) if still else f"schedule={config.schedule!r} as it is given"
            raise ConfigError(
                f"{name}={value!r} means nothing with {with_what}: nothing is turned while the run trains. Leave "
                f"{name} out, or leave something to the controller (schedule='auto', a codec 'auto')."
            )
