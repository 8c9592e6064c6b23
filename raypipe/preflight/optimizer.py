"""Trial of every stage's optimizer and learning-rate scheduler on small parameters, before a run starts.

    whole model   a b c d        12 steps
    stage         a b | c d      12 steps                must move its parameters as the whole model's optimizer does
    loaded        a b | c d      7 steps, load, 5 steps  must move them as the stage's optimizer that was saved
    slice         a b/2 | b/2    3 steps                 must move them as the stage's optimizer (shard_optimizer=True)

A small parameter has the name, dtype and number of dimensions of a real one, but at most 3 elements in each dimension.
An optimizer that fails on small parameters, because it depends on sizes, is tried at full size.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.data.item_randomness import generator_states, own_generators
from raypipe.engine.io.checkpoint.snapshot import optimizer_parts
from raypipe.engine.io.checkpoint.tensor_file import check_storable
from raypipe.engine.optim.slices import ParameterSlice, Slices, flat
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler, new_optimizer, rate_of
from raypipe.engine.stage.randomness import draws_randomness
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CaptureError, CheckpointError, ConfigError
from raypipe.preflight.dry_run import no_reads_of
from raypipe.user_lines import quoted, short

_EXAMPLE = "lambda p: torch.optim.AdamW(p, lr=3e-4)"
_SCHEDULER = "lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)"
_APART = (
    "Each stage steps only its own parameters, so let a parameter's name, shape, gradient and state decide, not its "
    f"position, a norm or number of all parameters, or Python's random numbers: optimizer={_EXAMPLE}. "
    "PipelineConfig(max_grad_norm=...) clips the norm of the whole model's gradient, and num_stages=1 trains with this "
    "optimizer as it is."
)
_OWN = (
    "Let it read the parameters that the optimizer is called with, as in group['params'], and keep an average of them "
    "in self.state[parameter]; a callback's on_checkpoint can read all of them."
)
_SIDE = 3
_FEW = 1_000_000
"""Largest number of elements of parameters that are tried at full size."""
_SAVED, _STEPS = 7, 12
"""Steps before the state is saved, and steps in all. An optimizer may count steps outside of its state: loading then
loses the count, which shows if the count has an effect within so many steps."""
_SCALES = (1.0, 100.0, 0.01)
"""Scales of the gradients of successive steps: below and above the limits of an optimizer that clips."""
_TOLERANCE = 1e-5
"""Tolerance of a tensor's movement, as a fraction of its largest movement."""

Tensors = Mapping[str, torch.Tensor]
Named = list[tuple[str, torch.nn.Parameter]]


def try_optimizers(
    programs: Sequence[StageProgram],
    parameters: Mapping[str, torch.nn.Parameter],
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    *,
    replicated: bool = False,
    sharded: bool = False,
    rates_by: str | None = None,
) -> bool:
    """Step the optimizer of each stage and an optimizer of the whole model, and compare how they move parameters.

    Args:
        parameters: parameters of the whole model, by name; not changed.
        replicated: True if stages have replicas, each with an optimizer of its own.
        sharded: True if replicas shard the state of their optimizer, and each steps slices of parameters.
        rates_by: configured field that multiplies learning rates, such as "stale_correction='discount'"; or None.

    Returns:
        True if a step of the optimizer draws random numbers.

    Raises:
        ConfigError: an optimizer or scheduler cannot be built or stepped, or a stage's optimizer moves parameters
            differently than an optimizer of the whole model; names the stage and the fix.
    """
    owned = {x.index: [name for name in x.parameters if name in x.trainable] for x in programs}
    stages = {stage: names for stage, names in owned.items() if names}
    names_owned = {name for names in stages.values() for name in names}  # forward may have changed requires_grad since
    trained = {name: p for name, p in parameters.items() if name in names_owned}
    draws, side = False, None
    with warnings.catch_warnings(), own_generators():
        warnings.simplefilter("ignore")
        for side in (_SIDE,) if any(p.is_meta for p in trained.values()) else (_SIDE, None):
            try:
                for stage, names in stages.items():
                    named = [(name, _stand_in(parameters[name], side)) for name in names]
                    draws |= _step_once(stage, named, make_optimizer, make_scheduler, parameters, rates_by)
                break
            except ConfigError:
                if side is None or any(p.is_meta for p in trained.values()):
                    raise
        if side is not None or sum(p.numel() for p in trained.values()) <= _FEW:
            stand_ins = {name: _stand_in(p, side).detach() for name, p in trained.items()}
            draws |= _compare(stages, stand_ins, make_optimizer, make_scheduler)
            if sharded:  # an optimizer may treat large matrices otherwise
                stand_ins |= {name: _stand_in(trained[name], None).detach() for name in _one_of_each_shape(trained)}
                _compare_slices(stages, stand_ins, make_optimizer)
        elif sharded:
            raise ConfigError(
                "shard_optimizer=True: the optimizer depends on sizes of parameters, and the model is too large to try "
                "at full size if it steps every element by itself. Let names and numbers of dimensions decide, or "
                "leave shard_optimizer out."
            )
    if draws:
        _refuse_copies(programs, replicated=replicated)
    return draws


def _stand_in(parameter: torch.Tensor, side: int | None) -> torch.nn.Parameter:
    shape = [size if side is None else min(size, side) for size in parameter.shape]
    return torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))


def _one_of_each_shape(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[str]:
    """Yield the name of one parameter of every shape, the smallest first, up to _FEW elements in total."""
    shapes, total = set(), 0
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].numel()):
        if parameter.shape not in shapes and total + parameter.numel() <= _FEW:
            shapes.add(parameter.shape)
            total += parameter.numel()
            yield name


def _refuse_copies(programs: Sequence[StageProgram], *, replicated: bool) -> None:
    shared = [f"{name!r} is held by stages {list(at)}" for p in programs for name, at in p.shared_with.items()]
    if shared or replicated:
        raise ConfigError(
            f"optimizer: its step draws random numbers, and {shared[0] if shared else 'every stage has replicas'}: "
            "each holder would draw others, and the copies would no longer be the same. Use an optimizer that draws "
            f"nothing, or {'a plan that holds it once' if shared else 'num_replicas=1'}."
        )


def _step_once(
    stage: int, named: Named, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None,
    users: Mapping[str, torch.nn.Parameter], rates_by: str | None,
) -> bool:  # fmt: skip
    """Make a stage's optimizer and scheduler, step both with zero gradients, and check that their state can be saved.

    Args:
        users: the user's own parameters by name, which a step must not read.

    Returns:
        True if the step draws random numbers.
    """
    optimizer = _optimizer(stage, named, make_optimizer)  # without gradients: AdafactorSchedule reads them
    if rates_by and any(rate_of(group) is None for group in optimizer.param_groups):
        raise ConfigError(
            f"{rates_by} multiplies learning rates, and {type(optimizer).__name__} has groups whose 'lr' is missing or "
            "not a number. Leave it out, or name the optimizer's rate 'lr'."
        )
    scheduler = None if make_scheduler is None else _scheduler(stage, optimizer, make_scheduler)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    before = generator_states().torch
    for field, stepped in (("optimizer", optimizer), ("lr_scheduler", scheduler)):
        try:
            if stepped is not None:
                with no_reads_of(users, f"{field}: the step of {type(stepped).__name__}", _OWN):
                    stepped.step()
        except CaptureError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # noqa: BLE001  (the user's code)
            raise ConfigError(
                f"{field}: the step of {type(stepped).__name__} fails on stage {stage}{quoted(error)}: {short(error)} "
                "It is called without arguments, and must step from the gradients of the stage's own parameters and "
                "the number of steps, not from a metric or a loss that it computes again."
            ) from None
    try:
        parts = optimizer_parts(optimizer, {id(p): name for name, p in named}, {name for name, _ in named})
        for name, tensor in parts.tensors.items():
            check_storable(name, tensor)
    except CheckpointError as error:
        raise ConfigError(f"optimizer: {error}") from None
    return not torch.equal(before, generator_states().torch)


def _optimizer(stage: int, named: Named, make: MakeOptimizer) -> Any:
    try:
        optimizer: Any = new_optimizer(make, named)
    except Exception as error:  # noqa: BLE001  (the user's code)
        names = ", ".join(name for name, _ in named[:2]) + (", ..." if len(named) > 2 else "")
        why = f"{short(error)} Every stage calls it with its own named parameters, so it must take any part of them: "
        cure = f"optimizer={_EXAMPLE}."
        if "with/without names" in str(error):  # torch's message on a named group next to an empty one
            why = "a param group is empty on this stage, and torch rejects it beside groups with named parameters. "
            cure = "Leave it out: torch.optim.AdamW([group for group in groups if group['params']], lr=3e-4)."
        raise ConfigError(
            f"optimizer cannot be made for stage {stage}, which trains {names}{quoted(error)}: {why}{cure}"
        ) from None
    kind = type(optimizer).__name__
    if not all(hasattr(optimizer, name) for name in ("step", "param_groups", "state_dict")):
        raise ConfigError(f"optimizer returns {kind} instead of an optimizer. Let it return one: optimizer={_EXAMPLE}.")
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ConfigError(
            f"optimizer makes {kind}, which has other weights for evaluation than for training, and train() and eval() "
            "to change between the two. Evaluations, checkpoints and exports of a run would have those of training. "
            f"Take one whose parameters are what is evaluated: optimizer={_EXAMPLE}."
        )
    own = {id(parameter) for _, parameter in named}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"optimizer makes {kind} with parameters that it was not called with. Every stage trains copies of its "
            f"own, so take those that come as the argument, not model.parameters(): optimizer={_EXAMPLE}."
        )
    return optimizer


def _scheduler(stage: int, optimizer: Any, make: MakeScheduler) -> Any:
    error: Exception | None = None
    scheduler: Any = None
    without_rate = [group for group in optimizer.param_groups if group.get("lr", 0.0) is None]
    try:
        scheduler = make(optimizer)
    except Exception as raised:  # noqa: BLE001  (the user's code)
        error = raised
    if without_rate and (error or (isinstance(scheduler, LRScheduler) and without_rate[0].get("lr") is None)):
        raise ConfigError(
            f"lr_scheduler: param group {optimizer.param_groups.index(without_rate[0])} of {type(optimizer).__name__} "
            "has lr=None, which no scheduler can scale: the optimizer finds its rate itself. Leave lr_scheduler out, "
            "or give the optimizer a rate, as in Adafactor(parameters, lr=1e-3, relative_step=False)."
        )
    if error is not None:
        raise ConfigError(
            f"lr_scheduler cannot be made for the optimizer of stage {stage}{quoted(error)}: {short(error)} It "
            f"is called with the optimizer alone: {_SCHEDULER}."
        )
    kind = type(scheduler).__name__
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict")):
        raise ConfigError(f"lr_scheduler returns {kind} instead of a scheduler. Let it return one: {_SCHEDULER}.")
    scaled = getattr(getattr(scheduler, "optimizer", optimizer), "param_groups", [])
    if not any(group is own for group in scaled for own in optimizer.param_groups):
        raise ConfigError(
            f"lr_scheduler makes {kind} for another optimizer than the one that it is called with, so that the rates "
            "of this one would not change. Every stage has an optimizer of its own, so take the argument: "
            f"{_SCHEDULER}."
        )
    return scheduler


class _FixedDraws(TorchDispatchMode):
    """Dispatch mode that seeds torch before every random operation, so that the order of parameters has no effect."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_randomness(op, args, kwargs or {}):
            torch.manual_seed(self._seed)
        return op(*args, **(kwargs or {}))


class _Stepped:
    """Optimizer and scheduler that step copies of some values.

    Args:
        values: initial values by name.
        fixed: True to seed every random operation of a step alike, so that parameters of one shape get the same
            numbers in whatever sequence they are stepped.

    Attributes:
        slices: slices of parameters that one replica steps; None if whole parameters are stepped.
    """

    slices: Slices | None = None

    def __init__(
        self, values: Tensors, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None = None,
        *, fixed: bool = False,
    ) -> None:  # fmt: skip
        self.start, self.fixed, self.steps = values, fixed, 0
        self.parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = new_optimizer(make_optimizer, list(self.parameters.items()))
        self.kind = type(self.optimizer).__name__
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None

    def step(self, gradients: Sequence[Tensors]) -> _Stepped:
        """Step the optimizer and the scheduler once per item of ``gradients``, and return this object.

        Args:
            gradients: for each step, the gradients of all parameters by name.
        """
        for by_name in gradients:
            for name, parameter in self.parameters.items():
                parameter.grad = by_name[name].clone()
            if self.slices is not None:  # NaN where other replicas hold the gradient
                for name in self.slices.names:
                    self.parameters[name].grad = torch.full_like(by_name[name], math.nan)
                for name, first, stop in self.slices.held:
                    flat(self.parameters[name].grad)[first:stop] = flat(by_name[name])[first:stop]  # type: ignore[arg-type]
                self.slices.take_gradients()
            with _FixedDraws(self.steps) if self.fixed else contextlib.nullcontext():
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
        return self

    def loaded(self, make_optimizer: MakeOptimizer) -> _Stepped:
        """Return a copy with a new optimizer that has loaded this optimizer's state_dict, as when a run resumes.

        Raises:
            ConfigError: the optimizer does not load its own state.
        """
        new = _Stepped({n: p.detach() for n, p in self.parameters.items()}, make_optimizer, fixed=self.fixed)
        new.start, new.steps = self.start, self.steps
        try:
            new.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        except Exception as error:  # noqa: BLE001  (the user's code)
            raise ConfigError(
                f"optimizer: {self.kind} does not load its own state_dict(): {short(error)} A run resumes from "
                "checkpoints and copies of it. Keep state in self.state[parameter] and param_groups only."
            ) from None
        return new

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of a parameter's param group; empty if no group contains the parameter."""
        for group in self.optimizer.param_groups:
            if any(x is self.parameters[name] for x in group["params"]):
                return {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return {}

    def moves_like(self, other: _Stepped, name: str, part: slice = slice(None)) -> bool:
        """Return True if a parameter, or ``part`` of its elements, has moved from its start as in ``other``."""
        start = other.start[name].reshape(-1)[part]
        moved, expected = (x.parameters[name].detach().reshape(-1)[part] - start for x in (self, other))
        rounding = torch.finfo(start.dtype).eps * float(start.abs().max()) if start.numel() else 0.0
        largest = float(expected.abs().nan_to_num().max()) if start.numel() else 0.0
        return torch.allclose(moved, expected, rtol=0.0, atol=_TOLERANCE * largest + 4 * rounding, equal_nan=True)


def _compare(
    stages: Mapping[int, Sequence[str]], stand_ins: Tensors, make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
) -> bool:  # fmt: skip
    """Check that the optimizer of each stage moves its parameters as one optimizer of all parameters does.

    Also checks that it moves them equally after its state_dict was loaded into a new optimizer, and that schedulers set
    equal learning rates. Nothing is checked if no optimizer can be made for the whole model.

    Args:
        stages: names of the parameters of each stage.
        stand_ins: tensors with the shapes and dtypes of the parameters to try, by name; their values are not used.

    Returns:
        True if a step draws random numbers.

    Raises:
        ConfigError: an optimizer or scheduler of a stage differs, or does not load its own state.
    """
    # In float64, since a step at the beginning of a warm-up changes a number by less than float32 resolves.
    wide = {name: x.double() if x.is_floating_point() else x for name, x in stand_ins.items()}
    for values in (wide, stand_ins):
        values, gradients = _random(values)
        before = generator_states().torch
        try:
            whole = _Stepped(values, make_optimizer).step(gradients)
        except Exception:  # noqa: BLE001  (some have no float64, or take parts of a model only)
            continue
        draws = not torch.equal(before, generator_states().torch)
        if draws:
            whole = _Stepped(values, make_optimizer, fixed=True).step(gradients)
        for stage, names in stages.items():
            _compare_stage(stage, {name: values[name] for name in names}, whole, gradients, make_optimizer)
        if make_scheduler is not None:
            _compare_rates(stages, values, gradients[:3], make_optimizer, make_scheduler)
        return draws
    return False


def _random(stand_ins: Tensors) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Make random values like ``stand_ins``, in shape and dtype, and gradients by name for each of _STEPS steps."""
    torch.manual_seed(0)
    values = {name: torch.randn(x.shape, dtype=x.dtype) for name, x in stand_ins.items()}
    scales = [_SCALES[step % len(_SCALES)] for step in range(_STEPS)]
    return values, [{name: scale * torch.randn_like(x) for name, x in values.items()} for scale in scales]


def _compare_stage(
    stage: int, values: Tensors, whole: _Stepped, gradients: Sequence[Tensors], make_optimizer: MakeOptimizer
) -> None:
    own = _Stepped(values, make_optimizer, fixed=whole.fixed).step(gradients[:_SAVED])
    loaded = own.loaded(make_optimizer) if hasattr(own.optimizer, "load_state_dict") else None
    own.step(gradients[_SAVED:])
    for name in values:
        if difference := _differing_option(own.options(name), whole.options(name)):
            raise ConfigError(
                f"optimizer: {whole.kind} gives {name!r} {difference[0]} on stage {stage}, and {difference[1]} when it "
                f"is made of all parameters of the model. {_APART}"
            )
        if not own.moves_like(whole, name):
            raise ConfigError(
                f"optimizer: the step of {whole.kind} moves {name!r} on stage {stage} otherwise than when it steps all "
                f"parameters of the model. {_APART}"
            )
    if loaded is None:
        return
    loaded.step(gradients[_SAVED:])
    for name in values:
        if not loaded.moves_like(own, name):
            raise ConfigError(
                f"optimizer: {whole.kind} moves {name!r} otherwise after its state_dict() was loaded into a new one, "
                "so a run that resumes or recovers would train differently. Keep all that the step needs in "
                "self.state[parameter] or in the options of param_groups."
            )


def _compare_rates(
    stages: Mapping[int, Sequence[str]], values: Tensors, gradients: Sequence[Tensors],
    make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler,
) -> None:  # fmt: skip
    try:
        whole = _Stepped(values, make_optimizer, make_scheduler).step(gradients)
    except Exception:  # noqa: BLE001  (one with fewer steps than these ends its run with an error of its own)
        return
    for stage, names in stages.items():
        own = _Stepped({name: values[name] for name in names}, make_optimizer, make_scheduler).step(gradients)
        for name in names:
            if difference := _differing_option(own.options(name), whole.options(name)):
                raise ConfigError(
                    f"lr_scheduler: {type(own.scheduler).__name__} sets {difference[0]} for {name!r} on stage {stage}, "
                    f"and {difference[1]} for an optimizer of all parameters of the model. Let rates follow from the "
                    "number of steps alone, not from parameters, random numbers or a clock."
                )


def _differing_option(own: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first option that differs, as texts of both values ("lr=0.1", "lr=0.05"); None if all are equal."""
    for key in sorted(own.keys() & whole.keys()):
        if any(isinstance(x, torch.Tensor | float) for x in (own[key], whole[key])):
            same = torch.as_tensor(own[key]).allclose(torch.as_tensor(whole[key]), rtol=_TOLERANCE, atol=0.0)
        else:
            same = own[key] == whole[key]
        if not same:
            return tuple(f"{key}={x:g}" if isinstance(x, float) else f"{key}={x!s:.40}" for x in (own[key], whole[key]))  # type: ignore[return-value]
    return None


def _compare_slices(stages: Mapping[int, Sequence[str]], stand_ins: Tensors, make_optimizer: MakeOptimizer) -> None:
    """Raise ConfigError if the optimizer moves a parameter differently when two replicas step one half of it each."""
    values, gradients = _random(stand_ins)
    for stage, names in stages.items():
        whole = _Stepped({name: values[name] for name in names}, make_optimizer)
        whole.step(gradients[:3])
        sizes = {name: values[name].numel() for name in names if values[name].dim()}
        firsts = [ParameterSlice(name, 0, size // 2) for name, size in sizes.items() if size > 1]
        seconds = [ParameterSlice(name, size // 2, size) for name, size in sizes.items() if size]
        for replica in range(2):
            half = _Stepped(whole.start, make_optimizer)
            if why := _slice_differs(whole, half, (firsts, seconds), replica, gradients[:3]):
                raise ConfigError(
                    f"shard_optimizer=True is not possible with {whole.kind}, which does not step every element of a "
                    f"parameter by itself. On stage {stage} {why} Replicas step slices of parameters then. Take an "
                    "optimizer such as AdamW or SGD, or leave shard_optimizer out."
                )


def _slice_differs(
    whole: _Stepped, half: _Stepped, parts: Sequence[list[ParameterSlice]], replica: int, gradients: Sequence[Tensors]
) -> str:
    """Step the slices of one replica with ``half``; describe the first difference to ``whole``, or return "".

    Args:
        whole: optimizer of whole parameters, which has made the same steps.
        parts: slices by replica.
    """
    try:
        half.slices = Slices(parts, replica, half.parameters)
        half.slices.take_over(half.optimizer)
        half.step(gradients)
    except Exception as error:  # noqa: BLE001  (the user's code)
        return f"its step fails: {short(error)}"
    if not half.optimizer.state.keys() <= {x for group in half.optimizer.param_groups for x in group["params"]}:
        return "it keeps state for other tensors than those of its groups."
    differing = [name for name, first, stop in parts[replica] if not half.moves_like(whole, name, slice(first, stop))]
    return f"it changes a part of {differing[0]!r} differently than all of it." if differing else ""
