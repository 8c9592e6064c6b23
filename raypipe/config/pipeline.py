"""PipelineConfig: every choice a person can make about a pipeline, frozen and checked once.

Two tables decide what is accepted. ``_ALLOWED`` says which values make sense at all; ``SUPPORTED``
says which of those this release runs. A value that only a later release runs is refused by its
field's name instead of being ignored. ``"auto"`` is always accepted: the plan says what it became.

The model leaves out what depends on the model, the data or the cluster: PlanError speaks of those.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from raypipe.config.checks import check_together
from raypipe.errors import ConfigError

__all__ = ["SUPPORTED", "Auto", "PipelineConfig"]

Auto = Literal["auto"]
_T = TypeVar("_T")

SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "num_replicas": (1,),
    "schedule": ("gpipe", "1f1b", "kfkb", "slack", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"),
    "transport": ("tcp", "object_store", "collective"),
    "codec_forward": ("none", "bf16", "fp16", "int8"),
    "codec_backward": ("none", "bf16", "fp16", "int8"),
    "recompute": ("never",),
    "precision": ("fp32",),
}
"""Values this release runs besides "auto"; a field that is not listed runs with every allowed value.

Lists (replicas per stage) are looked up item by item.
"""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a field may hold: the predicate, and the same in words."""

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


def _each(rule: _Rule, text: str) -> _Rule:
    return _Rule(lambda v: isinstance(v, tuple) and len(v) > 0 and all(map(rule.accepts, v)), text)


_AUTO = _one_of("auto")
_FLAG = _Rule(lambda v: isinstance(v, bool), "True or False")
_NONE = _Rule(lambda v: v is None, "None")
_CODEC = _one_of("auto", "none", "bf16", "fp16", "int8", "fp8", "int4")
_RECOMPUTE = _one_of("auto", "never", "always")
_MODULE = _Rule(lambda v: isinstance(v, str) and v != "", "a module name")
_PORT = _Rule(lambda v: type(v) is int and 1024 <= v <= 65535, "a port from 1024 to 65535")
_PORTS = _Rule(
    lambda v: isinstance(v, tuple) and len(v) == 2 and all(map(_PORT.accepts, v)) and v[0] <= v[1],
    "a pair of ports from 1024 to 65535, the lower one first",
)
_CSV = _Rule(lambda v: isinstance(v, str) and v.endswith(".csv"), "the path of a schedule .csv file")

_ALLOWED: Mapping[str, _Rule] = {
    "num_stages": _AUTO | _integer(1),
    "num_replicas": _AUTO | _integer(1) | _each(_integer(1), "a list of integers, one per stage"),
    "minibatch_size": _AUTO | _integer(1),
    "num_microbatches": _AUTO | _integer(1),
    "loss_reduction": _one_of("auto", "mean", "sum", "valid_tokens")
    | _Rule(callable, "a function (target) -> number of items that the loss is averaged over"),
    "partitioner": _one_of("auto", "parameters", "prefix_sum", "antichain", "hierarchical")
    | _each(_MODULE, "a list of module names, each the first of a stage"),
    "schedule": _one_of("auto", "gpipe", "1f1b", "kfkb", "slack", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw")
    | _CSV,
    "group_size": _AUTO | _integer(1),
    "slack": _AUTO | _integer(1) | _each(_integer(1), "a list of integers, one per hop"),
    "weight_versions": _AUTO | _integer(1),
    "update_interval": _AUTO | _integer(1),
    "vertical_sync": _AUTO | _FLAG,
    "transport": _one_of("auto", "object_store", "collective", "tcp"),
    "link_ports": _AUTO | _PORTS,
    "codec_forward": _CODEC,
    "codec_backward": _CODEC,
    "memory_limit_bytes": _AUTO | _integer(1),
    "recompute": _RECOMPUTE | _each(_RECOMPUTE, "a list of these, one per stage"),
    "precision": _one_of("fp32", "bf16", "fp16"),
    "max_grad_norm": _NONE | _number(0),
    "retune_interval_steps": _AUTO | _integer(0),
    "link_drift_threshold": _AUTO | _number(0),
    "min_gain": _AUTO | _number(0),
    "retune_microbatches": _FLAG,
    "checkpoint_interval_steps": _AUTO | _integer(1),
    "seed": _integer(0),
    "on_nonfinite": _one_of("stop", "skip"),
    "verify": _one_of("first_step", "off"),
}


def _refuse_unknown_fields(cls: type[_T]) -> type[_T]:
    """Turn the TypeError for an unknown keyword into a ConfigError that knows the right name."""
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
class PipelineConfig:
    """How a model is cut, scheduled and joined; ``"auto"`` leaves the choice to the planner.

    Attributes:
        num_stages: stages of the pipeline; "auto" takes as many of scaling_config's workers as are worth
            it, two where nothing was said. Schedules "interleaved" and "zb-v" put num_stages / num_workers on each
            worker, two with "auto" and always in "zb-v".
        num_replicas: workers per stage; a list gives one number per stage.
        minibatch_size: samples per optimizer step.
        num_microbatches: micro-batches that a mini-batch is cut into; the last may be smaller. "auto"
            follows from the profile, or is 4 per stage with partitioner "parameters".
        loss_reduction: how the loss averages, so that micro-batches can be weighed to make the loss of the mini-batch:
            "mean" over samples (micro-batch i weighs b_i / B), "sum", "valid_tokens" (targets other than -100), or a
            function (target) -> number of items. "auto" finds out when the run is planned: ignore_index, class weights
            and shifted labels from the graph of the loss, tried on real rows; what no weights make right is refused.
            Evaluation weighs mini-batches in the same way, and adds up sums.
        partitioner: "prefix_sum" cuts the profiled operations in their own order, "antichain" in any
            order that the model allows, "hierarchical" with replicas (to plan with, not to run yet);
            "auto" takes the first two. "parameters" profiles nothing and gives every stage about the
            same parameter bytes; a list of module names starts a new stage at each of them.
        schedule: order of forwards and backwards; "auto" is 1F1B with as much slack as the links ask for, kFkB or,
            where the halves of the backwards that the run measures say so, "zb-h1", turned by the controller while the
            run trains. "zb-h1" parts backwards and puts off what only the weights need: shorter steps for more
            memory behind the first stage; where max_grad_norm is None and no parameter is tied, its steps overlap.
            "interleaved" and "zb-v" (which parts backwards too) give every worker several stages, so that the
            pipeline fills in smaller pieces: shorter steps for more messages. The controller leaves them as they are.
        group_size: k of kFkB: forwards in a row before as many backwards; "auto" begins with 2, and the
            controller turns it.
        slack: r of slack: forwards that each stage starts earlier than the next, 1 being 1F1B; a list gives one
            number per hop. Asynchronous schedules take it too: more micro-batches under way hide slower links,
            and in "pipedream" cost weight versions and make gradients later.
        weight_versions: most weight versions that a stage keeps, in asynchronous schedules ("pipedream" and
            "2bw", which do not run empty between mini-batches). "pipedream" with a number updates as often as
            that many versions allow.
        update_interval: micro-batches per update of the weights, in "pipedream"; 1 unless weight_versions
            says otherwise. An update averages the loss over its own samples.
        vertical_sync: a micro-batch uses the same weight version on every stage, in "pipedream".
        transport: how boundary tensors travel.
        link_ports: (lowest, highest) TCP port that workers may listen on for the links, for firewalls; each
            worker on a host takes one of its own. "auto" leaves the choice to the system.
        codec_forward, codec_backward: what boundary tensors and their gradients travel as; anything but "none"
            is lossy, see raypipe.engine.codec for how much. "auto" lets the controller compress a link, "bf16" or
            "int8" forward and "bf16" back, while that makes steps shorter by more than min_gain.
        memory_limit_bytes: per worker, of everything that a stage holds; a plan that needs more is
            refused. "auto" keeps to what the devices of a described cluster offer.
        recompute: run forwards again instead of keeping activations; a list gives one word per stage.
        precision: of the computation.
        max_grad_norm: clips the gradient norm of the whole model, for which all stages wait for each other before
            every step; None leaves it. Where updates come more often than once per num_stages micro-batches, each
            stage clips its own to this times the root of its share of the parameters.
        retune_interval_steps, link_drift_threshold, min_gain: patience of the controller, which turns k, the slack
            and codecs where these are "auto": most steps between looks (20; 0 never changes anything), relative change
            of a link that is looked at sooner (0.25), relative gain in step time worth a change (0.03).
        retune_microbatches: the controller may change the number of micro-batches too, to another divisor of the
            mini-batch. Then sums are taken in another order and dropout draws other numbers, so that a run depends on
            its links; batch normalisation sees other batches.
        checkpoint_interval_steps: steps between two checkpoints; "auto" saves every ten minutes. A run
            saves at its end and when it is stopped in any case.
        seed: keys all randomness, together with step and micro-batch.
        on_nonfinite: what happens where the loss or the gradient norm of a mini-batch is not finite: "stop" ends the
            run, "skip" leaves the step out on all stages. Parameters, optimizer and scheduler stay as they are, buffers
            (batch statistics) keep what the forwards wrote, as in plain PyTorch, and metrics and events say so; ten in
            a row end the run. Stages wait for each other's norms before every step, as they do with max_grad_norm.
        verify: "first_step" runs two micro-batches through the model itself and through its stages before training
            begins, while the actors start, and refuses the run where loss, gradients or buffers differ. That needs
            about twice the memory of the model in this process. "off" trains what was captured, unseen.

    Raises:
        ConfigError: a field is unknown, ill-typed, out of range, at odds with another one, or has a
            value that this release does not run; the message names field, value and what is allowed.
    """

    num_stages: int | Auto = "auto"
    num_replicas: int | Sequence[int] | Auto = "auto"
    minibatch_size: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    loss_reduction: str | Callable[[Any], float] = "auto"
    partitioner: str | Sequence[str] = "auto"
    schedule: str = "auto"
    group_size: int | Auto = "auto"
    slack: int | Sequence[int] | Auto = "auto"
    weight_versions: int | Auto = "auto"
    update_interval: int | Auto = "auto"
    vertical_sync: bool | Auto = "auto"
    transport: str = "auto"
    link_ports: tuple[int, int] | Auto = "auto"
    codec_forward: str = "none"
    codec_backward: str = "none"
    memory_limit_bytes: int | Auto = "auto"
    recompute: str | Sequence[str] = "auto"
    precision: str = "fp32"
    max_grad_norm: float | None = None
    retune_interval_steps: int | Auto = "auto"
    link_drift_threshold: float | Auto = "auto"
    min_gain: float | Auto = "auto"
    retune_microbatches: bool = False
    checkpoint_interval_steps: int | Auto = "auto"
    seed: int = 0
    on_nonfinite: str = "stop"
    verify: str = "first_step"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_allowed(field.name, value)
            _check_supported(field.name, value)
        check_together(self)


def _plain(value: Any) -> Any:
    """Lists become tuples and foreign numbers (numpy's) Python's own, so that configs compare and hash."""
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


def _check_supported(name: str, value: Any) -> None:
    if name not in SUPPORTED or value == "auto":
        return
    if isinstance(value, tuple):
        missing = any(item != "auto" and item not in SUPPORTED[name] for item in value)
    else:
        missing = value not in SUPPORTED[name]
    if missing:
        default = PipelineConfig.__dataclass_fields__[name].default
        running = dict.fromkeys(["auto", *SUPPORTED[name]] if _ALLOWED[name].accepts("auto") else SUPPORTED[name])
        words = " or ".join(map(repr, running))
        raise ConfigError(
            f"{name}={value!r} comes with a later release; this release runs {name} {words}. "
            f"Leave {name} out to run with {default!r}."
        )


def _nearest(word: str, names: Sequence[str]) -> str:
    """End of one sentence and, where some name is close to the word, a question."""
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f". Did you mean {lowered[close[0]]!r}? " if close else ". "
