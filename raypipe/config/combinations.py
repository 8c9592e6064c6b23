"""Combinations of PipelineConfig's fields that exclude each other.

``EXCLUSIONS`` lists the fields that have no effect, or are impossible, beside a value of another one. The functions
after it compare numbers: of stages, micro-batches, replicas and lanes. Lanes are partial sums of gradients. The first
violation is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from raypipe.config.fields import Auto, PipelineFields
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS
from raypipe.ir.schedule_spec import KINDS, ScheduleKind, kinds_to_search, takes


def replicated(config: PipelineFields) -> bool:
    """Return True if a stage has several workers, or may get several."""
    return config.num_replicas == "auto" or max(_replicas(config)) > 1


def laned(config: PipelineFields) -> bool:
    """Return True if gradients are, or may be, summed in several lanes: with num_lanes above 1, or with replicas."""
    return replicated(config) or config.num_lanes not in ("auto", 1)


def turns_schedule(config: PipelineFields) -> bool:
    """Return True if the configuration lets the controller change the schedule while the run trains.

    The condition: group_size and slack are "auto", and the schedule is "auto" or a kind with ``ScheduleKind.searched``.
    """
    return bool(kinds_to_search(config.schedule)) and config.group_size == "auto" == config.slack


def check_combinations(config: PipelineFields) -> None:
    """Raise ConfigError for the first fields that exclude each other."""
    for check in (_check_microbatches, _check_stages, _check_recompute, _check_slack):
        check(config)
    for field, conflict, reason, fix in EXCLUSIONS:
        if other := conflict(config):
            values = {name: getattr(config, name) for name in (field, other)}
            raise ConfigError(f"{field}={values[field]!r} {reason.format(f'{other}={values[other]!r}')}. {fix}.")
    for check in (_check_group_size, _check_replica_counts, _check_lanes):
        check(config)


class Exclusion(NamedTuple):
    """Rule that refuses a field if it has no effect, or is impossible, with the value of another field.

    Attributes:
        field: name of the field that is refused.
        conflict: (configuration) -> name of the other field if the rule is violated, else "".
        reason: end of the message after the refused value; {} is replaced by the other field with its value.
        fix: remedy, for the message.
    """

    field: str
    conflict: Callable[[PipelineFields], str]
    reason: str
    fix: str


def _kind(config: PipelineFields) -> ScheduleKind:
    """Return the properties of the schedule. The schedule "auto" counts as synchronous, with one stage per worker."""
    return KINDS.get(config.schedule, ScheduleKind())


def _num_stages(config: PipelineFields) -> int | Auto:
    return config.num_stages if isinstance(config.partitioner, str) else len(config.partitioner) + 1


def _replicas(config: PipelineFields) -> tuple[int, ...]:
    counts = config.num_replicas
    assert counts != "auto"
    return counts if isinstance(counts, tuple) else (counts,)


def _is_set(config: PipelineFields, name: str) -> bool:
    return bool(getattr(config, name) != PipelineFields.__dataclass_fields__[name].default)


def _if(other: str, conflict: Callable[[PipelineFields], bool]) -> Callable[[PipelineFields], str]:
    return lambda config: other if conflict(config) else ""


def _unused(name: str, other: str, unused: Callable[[PipelineFields], bool]) -> Callable[[PipelineFields], str]:
    """Make an ``Exclusion.conflict`` that finds a conflict if the field ``name`` is set and has no effect.

    Args:
        other: field whose value is the reason why ``name`` has no effect.
        unused: (configuration) -> True if ``name`` has no effect.

    Returns:
        function (configuration) -> ``other`` if there is a conflict, else "".
    """
    return _if(other, lambda config: _is_set(config, name) and unused(config))


def _controller_is_idle(config: PipelineFields) -> str:
    """Return the name of the field that leaves the controller no setting to change; "" if there is such a setting."""
    if not _kind(config).turned:
        return "schedule"
    if config.retune_interval_steps == 0:
        return "retune_interval_steps"
    codecs = "auto" in (config.codec_forward, config.codec_backward)
    return "" if turns_schedule(config) or codecs or config.retune_microbatches else "schedule"


def _idle(name: str, *harmless: object) -> Callable[[PipelineFields], str]:
    """Make an ``Exclusion.conflict`` that finds a conflict if the controller has no setting to change.

    Args:
        name: field of the controller, which then has no effect.
        harmless: values of this field that never conflict.
    """
    return lambda config: "" if getattr(config, name) in harmless else _controller_is_idle(config)


def _if_open(codec: str) -> Callable[[PipelineFields], str]:
    """Make an ``Exclusion.conflict`` for a codec field: "auto" conflicts if the controller has no setting to change."""
    return lambda config: _controller_is_idle(config) if getattr(config, codec) == "auto" else ""


def _weights_of(name: str, value: object) -> Callable[[PipelineFields], str]:
    """Make an ``Exclusion.conflict`` for ``name``, a field that sets how many weight versions exist or which are used.

    "pipedream" allows any value of the field. Any other schedule has a fixed value and allows only that.

    Args:
        value: the value that synchronous schedules always have.
    """
    two = {"weight_versions": 2, "vertical_sync": True}.get(name)
    return _unused(
        name, "schedule",
        lambda c: c.schedule != "pipedream" and getattr(c, name) != (two if c.schedule == "2bw" else value),
    )  # fmt: skip


_PIPEDREAM = (
    "has no effect with {}: '2bw' has two weight versions and updates once per mini-batch, synchronous schedules have "
    "one weight version, and only 'pipedream' leaves them open"
)
_NOT_WAITING = "is not possible with {}, whose stages update without waiting for each other"
_PER_REPLICA = "is not possible with {}: stages update at different times, so each has as many versions as it needs"
_CONTROLLER = "has no effect with {}, under which nothing is changed while the run trains"
_NO_REPLICAS = "has no effect with {}: no stage has several replicas"
_OF_NO_REPLICAS = "Set num_replicas, as in num_replicas=[2, 1], or leave {} out"


def _per_replica(config: PipelineFields) -> bool:
    return config.update_interval == "per_replica" and config.schedule == "pipedream"


def _per_replica_with(name: str, config: PipelineFields) -> bool:
    return _per_replica(config) and getattr(config, name) not in ("auto", False)


_NO_GRAPHS: tuple[tuple[str, Callable[[PipelineFields], bool], str, str], ...] = (
    ("schedule", lambda c: not _kind(c).synchronous, ", whose steps move weights to other addresses",
     "Set a synchronous schedule, such as '1f1b', or cuda_graphs=False"),
    ("schedule", lambda c: _kind(c).splits_backward, ", which runs a backward in two parts: a graph of it is one piece",
     "Set schedule='slack' or '1f1b', or cuda_graphs=False"),
    ("num_replicas", replicated, ": replicas exchange gradients during a backward, which a graph would not",
     "Set num_replicas=1, or cuda_graphs=False"),
    ("num_lanes", laned, ": several sums of gradients take turns, and a graph adds to one",
     "Set num_lanes=1, or cuda_graphs=False"),
    ("compile_stages", lambda c: c.compile_stages != "off", ": a compiled backward frees what a graph keeps",
     "Set compile_stages='off', or cuda_graphs=False"),
    ("recompute", lambda c: c.recompute not in ("auto", "never"), ": a graph keeps its activations, so none are saved",
     "Set recompute='never', or cuda_graphs=False"),
    ("retune_microbatches", lambda c: bool(c.retune_microbatches), ": a graph has one size of micro-batch",
     "Set retune_microbatches=False, or cuda_graphs=False"),
)  # fmt: skip
"""(Other field, whether it conflicts with CUDA graphs, reason, fix)."""


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "link_ports", _unused("link_ports", "transport", lambda c: c.transport not in ("auto", "tcp")),
        "has no effect with {}: only 'tcp' links listen on these ports", "Set transport='tcp', or leave link_ports out",
    ),
    Exclusion(
        "group_size", _unused("group_size", "schedule", lambda c: not takes(c.schedule, "group_size")),
        "has no effect with {}: only 'kfkb' groups micro-batches", "Set schedule='kfkb', or leave group_size out",
    ),
    Exclusion(
        "slack", _unused("slack", "schedule", lambda c: not takes(c.schedule, "slack")),
        "has no effect with {}", "Set schedule='slack', 'zb-h1', 'pipedream' or '2bw', or leave slack out",
    ),
    *(
        Exclusion(name, _weights_of(name, value), _PIPEDREAM, f"Set schedule='pipedream', or leave {name} out")
        for name, value in (("weight_versions", 1), ("update_interval", None), ("vertical_sync", False))
    ),
    Exclusion(
        "stale_correction", _unused("stale_correction", "schedule", lambda c: _kind(c).synchronous),
        "has no effect with {}, whose gradients are never stale",
        "Leave stale_correction out, or set schedule='2bw' or 'pipedream'",
    ),
    Exclusion(
        "stale_correction", _if("schedule", lambda c: c.stale_correction == "discount" and c.schedule == "2bw"),
        "has no effect with {}, whose gradients are one update late on every stage",
        "Set stale_correction='predict', or leave it out",
    ),
    Exclusion(
        "discount_updates", _unused("discount_updates", "stale_correction", lambda c: c.stale_correction != "discount"),
        "has no effect with {}: no learning rate is discounted",
        "Leave discount_updates out, or set stale_correction='discount'",
    ),
    Exclusion(
        "on_nonfinite", _unused("on_nonfinite", "schedule", lambda c: not _kind(c).synchronous),
        f"{_NOT_WAITING}: some have taken the step before another one finds NaN",
        "Set a synchronous schedule, such as '1f1b', or on_nonfinite='stop'",
    ),
    Exclusion(
        "precision", _if("schedule", lambda c: PRECISIONS[c.precision].scaled and not _kind(c).synchronous),
        f"{_NOT_WAITING}: some have taken the step before another one finds an overflow",
        "Set precision='bf16', or a synchronous schedule, such as '1f1b'",
    ),
    Exclusion(
        "compile_stages", _unused("compile_stages", "schedule", lambda c: _kind(c).splits_backward),
        "is not possible with {}, which runs a backward in two parts: that of a compiled stage is one piece",
        "Set schedule='slack' or '1f1b', or compile_stages='off'",
    ),
    *(
        Exclusion("cuda_graphs", _unused("cuda_graphs", other, unfit), f"is not possible with {{}}{reason}", fix)
        for other, unfit, reason, fix in _NO_GRAPHS
    ),
    Exclusion(
        "replicated_buffers", _unused("replicated_buffers", "num_replicas", lambda c: not replicated(c)),
        _NO_REPLICAS, _OF_NO_REPLICAS.format("replicated_buffers"),
    ),
    Exclusion(
        "shard_optimizer", _unused("shard_optimizer", "num_replicas", lambda c: not replicated(c)),
        _NO_REPLICAS, _OF_NO_REPLICAS.format("shard_optimizer"),
    ),
    Exclusion(
        "shard_optimizer", _unused("shard_optimizer", "schedule", lambda c: not _kind(c).synchronous),
        "is not possible with {}, whose stages compute the next micro-batches while replicas exchange parameters",
        "Set a synchronous schedule, such as '1f1b', or leave shard_optimizer out",
    ),
    Exclusion(
        "codec_sums", _unused("codec_sums", "num_replicas", lambda c: not laned(c)),
        "has no effect with {} and one lane: nothing is exchanged", "Set num_replicas, or leave codec_sums out",
    ),
    Exclusion(
        "update_interval", _if("num_replicas", lambda c: _per_replica(c) and not replicated(c)),
        _NO_REPLICAS, _OF_NO_REPLICAS.format("update_interval"),
    ),
    *(
        Exclusion(
            "update_interval", _if(name, partial(_per_replica_with, name)),
            _PER_REPLICA, f"Leave {name} out, or give update_interval a number",
        )
        for name in ("weight_versions", "vertical_sync")
    ),
    Exclusion(
        "update_interval",
        _if("loss_reduction", lambda c: _per_replica(c) and c.loss_reduction not in ("auto", "mean", "sum")),
        "is not possible with {}: a stage averages over its own samples, and only the last stage has their targets",
        "Set loss_reduction='mean' or 'sum', or give update_interval a number",
    ),
    Exclusion(
        "loss_reduction", _unused("loss_reduction", "loss_over", lambda c: c.loss_over == "minibatch"),
        "has no effect with {}: micro-batches have no losses to weigh",
        "Leave loss_reduction out, or set loss_over='microbatch'",
    ),
    Exclusion(
        "loss_over", _if("schedule", lambda c: c.loss_over == "minibatch" and not _kind(c).synchronous),
        "is not possible with {}, whose updates do not wait for a whole mini-batch", "Set schedule='gpipe'",
    ),
    Exclusion(
        "num_replicas", _if("partitioner", lambda c: c.num_replicas == "auto" and c.partitioner == "parameters"),
        "is not possible with {}: it compares plans by their seconds, and this partitioner measures none",
        "Set partitioner='auto', or a number of replicas",
    ),
    Exclusion(
        "num_replicas", _if("schedule", lambda c: c.num_replicas == "auto" and not _kind(c).synchronous),
        "is not possible with {}: it compares plans by their seconds, and there the gradients depend on the number of "
        "replicas too", "Set a number of replicas, or a synchronous schedule",
    ),
    Exclusion(
        "num_replicas", _if("schedule", lambda c: c.num_replicas == "auto" and _kind(c).several_stages),
        "is not possible with {}, which puts several stages on each worker",
        "Set a number, as in num_replicas=2, or schedule='auto'",
    ),
    Exclusion(
        "num_replicas",
        _if("schedule", lambda c: _kind(c).several_stages and c.num_replicas != "auto" and len({*_replicas(c)}) > 1),
        "is not possible with {}: a worker that holds several stages has as many replicas of each",
        "Set one number, as in num_replicas=2, or a schedule with one stage per worker, such as '1f1b'",
    ),
    Exclusion(
        "num_replicas",
        _if("num_stages", lambda c: c.num_replicas != "auto" and replicated(c) and _num_stages(c) == "auto"),
        "is not possible with {}: replicas are given per stage", "Set num_stages, as in num_stages=2",
    ),
    *(
        Exclusion(
            name, _if_open(name), _CONTROLLER,
            f"Name a codec, as in {name}='bf16', or leave {name} out for 'none'",
        )
        for name in ("codec_forward", "codec_backward")
    ),
    *(
        Exclusion(
            name, _idle(name, *harmless), _CONTROLLER,
            f"Leave {name} out, or leave something to the controller (schedule='auto', a codec 'auto')",
        )
        for name, harmless in (
            ("retune_microbatches", (False,)), ("retune_interval_steps", ("auto", 0)),
            ("link_drift_threshold", ("auto",)), ("min_gain", ("auto",)),
        )
    ),
)  # fmt: skip


def _check_microbatches(config: PipelineFields) -> None:
    size, count = config.minibatch_size, config.num_microbatches
    if size == "auto" or count == "auto":
        return
    if count > size:
        raise ConfigError(
            f"num_microbatches={count} is more than minibatch_size={size} samples: a micro-batch needs at least one. "
            f"Set num_microbatches to {size} or less."
        )
    each = math.ceil(size / count)
    if math.ceil(size / each) != count:
        raise ConfigError(
            f"minibatch_size={size} does not divide into num_microbatches={count} of equal size with a smaller last "
            f"one: {each} samples each make {math.ceil(size / each)}. Set num_microbatches={math.ceil(size / each)}, "
            f"or minibatch_size={each * count}."
        )


def _check_stages(config: PipelineFields) -> None:
    modules, stages = config.partitioner, _num_stages(config)
    if not isinstance(modules, str):
        twice = sorted({name for name in modules if list(modules).count(name) > 1})
        if twice:
            raise ConfigError(f"partitioner names {twice[0]!r} twice: a module begins one stage only.")
        if config.num_stages not in ("auto", stages):
            raise ConfigError(
                f"partitioner={modules!r} makes {stages} stages, but num_stages={config.num_stages}. "
                f"Leave num_stages out, or name {int(config.num_stages) - 1} modules."
            )
    if config.schedule == "zb-v" and stages != "auto" and stages % 2:
        name = "num_stages" if config.num_stages != "auto" else "partitioner"
        raise ConfigError(
            f"{name}={getattr(config, name)!r} makes {stages} stages, but schedule='zb-v' puts two on every worker. "
            f"Make them {stages + 1}, or set schedule='interleaved'."
        )
    _check_per_stage(config, "num_replicas")


def _check_per_stage(config: PipelineFields, name: str) -> None:
    value, stages = getattr(config, name), _num_stages(config)
    if isinstance(value, tuple) and stages != len(value):
        raise ConfigError(
            f"{name}={value!r} has {len(value)} items, but num_stages={stages!r}. Give one item per stage, or a single "
            f"value for all; a list needs num_stages={len(value)} beside it."
        )


def _check_recompute(config: PipelineFields) -> None:
    value, stages = config.recompute, _num_stages(config)
    numbers = [item for item in value if type(item) is int] if isinstance(value, tuple) else []
    if not numbers:
        _check_per_stage(config, "recompute")
    elif stages == "auto":
        raise ConfigError(
            f"recompute={value!r} names stages by number, but num_stages='auto' leaves open how many there are. Set "
            "num_stages too, or recompute='always'."
        )
    elif max(numbers) >= stages:
        raise ConfigError(
            f"recompute={value!r} names stage {max(numbers)}, but there are {stages}, from 0 on. Name each stage once."
        )
    elif twice := sorted(number for number in set(numbers) if numbers.count(number) > 1):
        raise ConfigError(f"recompute={value!r} names stage {twice[0]} twice. Name each stage once.")


def _check_slack(config: PipelineFields) -> None:
    slack, stages = config.slack, config.num_stages
    if not isinstance(slack, tuple) or not takes(config.schedule, "slack"):
        return
    if stages == "auto":
        raise ConfigError(
            f"slack={slack!r} has {len(slack)} hops, but num_stages='auto' leaves open how many there are. Set "
            f"num_stages={len(slack) + 1} too, or give a single number for all hops."
        )
    if stages != len(slack) + 1:
        raise ConfigError(
            f"slack={slack!r} has {len(slack)} hops, but num_stages={stages} has {stages - 1}. "
            "Give one number per hop, or a single one for all."
        )


def _check_group_size(config: PipelineFields) -> None:
    size, count = config.group_size, config.num_microbatches
    if size != "auto" and count != "auto" and size > count:
        raise ConfigError(
            f"group_size={size} is more than num_microbatches={count}. Set group_size to {count} or less."
        )


def _check_replica_counts(config: PipelineFields) -> None:
    if config.num_replicas == "auto":
        return
    most = max(_replicas(config))
    for name in ("num_microbatches", "num_lanes"):
        value = getattr(config, name)
        if value != "auto" and value < most and most > 1:
            raise ConfigError(
                f"{name}={value} leaves a replica of num_replicas={config.num_replicas!r} without micro-batches. Set "
                f"{name} to {most} or more."
            )


def _check_lanes(config: PipelineFields) -> None:
    """Raise ConfigError if replicas in an asynchronous schedule would have unequal numbers of micro-batches."""
    if _kind(config).synchronous or not laned(config):
        return
    least = math.lcm(*_replicas(config))
    lanes = least if config.num_lanes == "auto" else config.num_lanes
    if lanes % least:
        raise ConfigError(
            f"num_lanes={lanes} gives replicas of num_replicas={config.num_replicas!r} unequal shares, which schedule="
            f"{config.schedule!r} cannot have. Set num_lanes to a multiple of {least}, or leave it out."
        )
    for name in ("num_microbatches", "update_interval"):
        value = getattr(config, name)
        if isinstance(value, int) and value % lanes:
            raise ConfigError(
                f"{name}={value} with schedule={config.schedule!r} is no multiple of the {lanes} lanes into which "
                f"gradients are summed: replicas would have unequal shares of an update. Set {name}="
                f"{-(-value // lanes) * lanes}."
            )
