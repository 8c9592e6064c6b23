"""PipelineConfig: configuration of a pipeline, frozen, and checked when it is created.

The table ``_ALLOWED`` has the values that each field accepts; any other value, or field, is refused. The plan shows the
values that were chosen for ``"auto"``. Limits that depend on the model, the data or the cluster are not checked here:
planning checks them, and raises PlanError.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from raypipe.config.combinations import check_combinations
from raypipe.config.fields import PipelineFields
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS
from raypipe.ir.schedule_spec import KINDS

_T = TypeVar("_T")

SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "schedule": tuple(KINDS),
    "transport": ("tcp", "object_store", "collective"),
    "codec_forward": ("none", "bf16", "fp16", "int8", "fp8", "int4", "tah4", "tah3"),
    "codec_backward": ("none", "bf16", "fp16", "int8", "fp8", "int4", "tah4", "tah3"),
    "precision": tuple(PRECISIONS),
}
"""Values, other than "auto", of the fields whose values are names."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule for the values of a field.

    Attributes:
        accepts: (value) -> True if the value is allowed.
        text: description of the allowed values, for messages.
        names: allowed values that are names, from which messages suggest the nearest one.
    """

    accepts: Callable[[Any], bool]
    text: str
    names: tuple[str, ...] = ()

    def __or__(self, other: _Rule) -> _Rule:
        return _Rule(
            lambda value: self.accepts(value) or other.accepts(value),
            f"{self.text} or {other.text}",
            self.names + other.names,
        )


def _one_of(*names: str) -> _Rule:
    return _Rule(lambda v: isinstance(v, str) and v in names, ", ".join(map(repr, names)), names)


def _integer(least: int) -> _Rule:
    return _Rule(lambda v: type(v) is int and v >= least, f"an integer of at least {least}")


def _number(above: float) -> _Rule:
    # bool is an int to Python, but True is not a norm.
    return _Rule(lambda v: type(v) in (int, float) and math.isfinite(v) and v > above, f"a number above {above:g}")


def _seconds(least: float) -> _Rule:
    return _Rule(lambda v: type(v) in (int, float) and math.isfinite(v) and v >= least, f"seconds, at least {least:g}")


def _each(rule: _Rule, text: str) -> _Rule:
    return _Rule(lambda v: isinstance(v, tuple) and len(v) > 0 and all(map(rule.accepts, v)), text)


_AUTO = _one_of("auto")
_FLAG = _Rule(lambda v: isinstance(v, bool), "True or False")
_NONE = _Rule(lambda v: v is None, "None")
_RECOMPUTE = _one_of("auto", "never", "always")
_MODULE = _Rule(lambda v: isinstance(v, str) and v != "", "a module name")
# As large as the integers that a manifest is read with.
_SEED = _Rule(lambda v: type(v) is int and 0 <= v <= 2**62, "an integer of at least 0 and at most 2**62")
_PORT = _Rule(lambda v: type(v) is int and 1024 <= v <= 65535, "a port from 1024 to 65535")
_PORTS = _Rule(
    lambda v: isinstance(v, tuple) and len(v) == 2 and all(map(_PORT.accepts, v)) and v[0] <= v[1],
    "a pair of ports from 1024 to 65535, the lower one first",
)

_ALLOWED: Mapping[str, _Rule] = {
    "num_stages": _AUTO | _integer(1),
    "num_replicas": _AUTO | _integer(1) | _each(_integer(1), "a list of integers, one per stage"),
    "replicated_buffers": _FLAG,
    "num_lanes": _AUTO | _integer(1),
    "minibatch_size": _AUTO | _integer(1),
    "num_microbatches": _AUTO | _integer(1),
    "loss_reduction": _one_of("auto", "mean", "sum", "valid_tokens", "per_microbatch")
    | _Rule(callable, "a function (target) -> number of items that the loss is averaged over"),
    "loss_over": _one_of("auto", "microbatch", "minibatch"),
    "partitioner": _one_of("auto", "parameters", "prefix_sum", "antichain")
    | _each(_MODULE, "a list of module names, each the first of a stage"),
    "profile_budget_s": _number(0),
    "schedule": _one_of("auto", *SUPPORTED["schedule"]),
    "group_size": _AUTO | _integer(1),
    "slack": _AUTO | _integer(1) | _each(_integer(1), "a list of integers, one per hop"),
    "weight_versions": _AUTO | _integer(1),
    "update_interval": _one_of("auto", "per_replica") | _integer(1),
    "vertical_sync": _AUTO | _FLAG,
    "stale_correction": _one_of("none", "predict", "discount"),
    "discount_updates": _integer(1),
    "transport": _one_of("auto", *SUPPORTED["transport"]),
    "link_ports": _AUTO | _PORTS,
    "link_checksum": _one_of("auto", "on", "off"),
    "codec_forward": _one_of("auto", *SUPPORTED["codec_forward"]),
    "codec_backward": _one_of("auto", *SUPPORTED["codec_backward"]),
    "codec_sums": _one_of("none", "bf16"),
    "shard_optimizer": _FLAG,
    "memory_limit_bytes": _AUTO | _integer(1),
    "recompute": _RECOMPUTE
    | _each(_RECOMPUTE | _FLAG, "a list of these or of True and False, one per stage")
    | _each(_integer(0), "a list of stages by number"),
    "precision": _one_of(*SUPPORTED["precision"]),
    "compile_stages": _one_of("off", "inductor", "aot_eager"),
    "cuda_graphs": _FLAG,
    "max_grad_norm": _NONE | _number(0),
    "retune_interval_steps": _AUTO | _integer(0),
    "link_drift_threshold": _AUTO | _number(0),
    "min_gain": _AUTO | _number(0),
    "retune_microbatches": _FLAG,
    "checkpoint_interval_steps": _AUTO | _integer(1),
    "eval_interval_steps": _NONE | _integer(1),
    "seed": _SEED,
    "on_nonfinite": _one_of("stop", "skip"),
    "driver_grace_s": _seconds(5.0),
    "resource_timeout_s": _AUTO | _NONE | _number(0),
    "worker_price_per_hour": _NONE | _number(0),
    "verify": _one_of("first_step", "off"),
    "weights_on": _one_of("auto", "client", "workers"),
}


def _refuse_unknown_fields(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass so that an unknown keyword raises ConfigError, which suggests the most similar field."""
    generated = cls.__init__

    @functools.wraps(generated)
    def checked(self: _T, **values: Any) -> None:
        for name in values:
            if name not in _ALLOWED:
                hint = _nearest(name, tuple(_ALLOWED))
                raise ConfigError(f"PipelineConfig has no field {name!r}{hint}Fields: {', '.join(_ALLOWED)}.")
        generated(self, **values)

    # setattr, because assigning to a class's __init__ is an error to type checkers.
    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PipelineFields):
    __doc__ = PipelineFields.__doc__

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_allowed(field.name, value)
        check_combinations(self)

    @property
    def several_microbatches(self) -> bool:
        """True if a mini-batch has more than one micro-batch, or may get more while the run trains."""
        return self.num_microbatches != 1 or self.retune_microbatches

    @property
    def one_microbatch(self) -> str:
        """Settings with which a mini-batch has one micro-batch, as text for messages."""
        return "num_microbatches=1" + " and retune_microbatches=False" * self.retune_microbatches


def _plain(value: Any) -> Any:
    """Convert lists to tuples, and numbers of numpy to Python's, so that configurations can be compared and hashed."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _check_allowed(name: str, value: Any) -> None:
    rule = _ALLOWED[name]
    if not rule.accepts(value):
        hint = _nearest(value, rule.names) if isinstance(value, str) else ". "
        raise ConfigError(f"{name}={value!r} is not possible{hint}Allowed: {rule.text}.")


def _nearest(word: str, names: Sequence[str]) -> str:
    """Return ". Did you mean NAME? " with the most similar of ``names``; ". " if no name is similar to ``word``."""
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f". Did you mean {lowered[close[0]]!r}? " if close else ". "
