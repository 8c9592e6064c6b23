"""Optimizers of stages must do what one optimizer of the whole model does, and go on from what they have saved.

    one of all parameters     a b c d     step, step, step
    one per stage             a b | c d   step, step, step      the same numbers?
    one that was loaded       a b | c d         load, step      the same numbers?
    one per slice             a b/2 | b/2   step, step, step    the same numbers?  where replicas share out its state

Tried on stand-ins with drawn values and gradients. What fails the first comparison decides by the position or the
number of its parameters, or computes something of all of them together, such as a norm; what fails the second one keeps
something that a checkpoint does not have; what fails the last one computes something of a whole parameter, such as its
norm or means of its rows. All would train wrongly without a word. So would a count that is kept outside of the state,
for what happens at every hundredth step: it is told by its being another one after a load.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.item_randomness import generator_states, own_generators
from raypipe.engine.remembered import read_memory_of
from raypipe.engine.replicas.chunks import flat
from raypipe.engine.replicas.slices import Part, Slices
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, new_optimizer
from raypipe.engine.trial.same_draws import SameDraws
from raypipe.engine.user_lines import short
from raypipe.errors import ConfigError

__all__ = ["compare_apart", "compare_sliced"]

_SCALES = (1.0, 100.0, 0.01)
"""Of the gradients of each step, so that limits are reached and are not."""
_TOLERANCE = 1e-5
"""Of the largest movement of a tensor."""
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROW = (torch.bfloat16, torch.float16)
_OF_STATE = re.compile(r"\bself\.(state|param_groups|defaults)\b")

Tensors = Mapping[str, torch.Tensor]


def compare_apart(
    programs: Sequence[StageProgram],
    stand_ins: Tensors,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    *,
    copies: bool,
) -> bool:
    """Step both, and refuse what differs. An optimizer that cannot be made for the whole model is not compared.

    Args:
        stand_ins: what trains, small, by name in the order of named_parameters(); their values are not read.
        copies: replicas or stages hold the same parameter, each with an optimizer of its own.

    Returns:
        Whether steps of the optimizer draw numbers.

    Raises:
        ConfigError: names the parameter, what differs, and what to write.
    """
    with warnings.catch_warnings(), own_generators():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        values, drawn = _drawn(stand_ins)
        before = generator_states()
        try:
            whole = _Stepped(values, make_optimizer, make_scheduler).after(drawn)
        except Exception:  # noqa: BLE001  (a function for parts of a model need not take all of it)
            return False
        kind = type(whole.optimizer).__name__
        if whole.scheduler_draws:
            raise ConfigError(
                f"lr_scheduler: the step of {type(whole.scheduler).__name__} draws random numbers: every stage would "
                "draw others, and so would a run that goes on. Let the rate follow from the number of steps, or from "
                "random.Random(step)."
            )
        if draws := not (after := generator_states()).same_as(before):
            _refuse_draws(kind, programs, copies=copies, keyed=after._replace(torch=before.torch).same_as(before))
            whole = _Stepped(values, make_optimizer, make_scheduler, SameDraws()).after(drawn)
        if whole.scheduler is not None and not all(map(whole.moved, values)):  # some rate is 0 for longer than this
            compare_apart(programs, stand_ins, make_optimizer, None, copies=copies)
        if any(value.dtype in _NARROW for value in values.values()):  # which hide small movements
            wider = {name: x.float() if x.dtype in _NARROW else x for name, x in stand_ins.items()}
            compare_apart(programs, wider, make_optimizer, make_scheduler, copies=copies)
        count = 0
        for program in programs:
            held = {n: values[n] for n in program.parameters if n in program.trainable and n in values}
            if not held:
                continue
            apart = _Stepped(held, make_optimizer, make_scheduler, SameDraws() if draws else None).after(drawn[:-1])
            loaded = apart.loaded(make_optimizer, make_scheduler)
            before_it = apart.beside_state()
            apart.step(drawn[-1])
            count += apart.draws.count if apart.draws else 0
            _compare_with_whole(kind, program.index, apart, whole)
            if loaded is not None:
                beside = apart.beside_state()  # the other one may count on in the same variable
                loaded.step(drawn[-1])
                _compare_loaded(kind, apart, loaded)
                _compare_beside(kind, before_it, beside, loaded.beside_state())
        if whole.draws and count != whole.draws.count:
            raise ConfigError(
                f"optimizer: the steps of {kind} draw {whole.draws.count} numbers for all parameters of the model, and "
                f"{count} where every stage steps its own, so it draws for all of them together. Stages step apart: "
                "let it draw for each parameter alone, as torch.randn_like(parameter)."
            )
    return draws


def _drawn(stand_ins: Tensors) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Values of the stand-ins, and gradients for each step.

    Those of 32 bits are drawn in 64: a step at the beginning of a warm-up moves a number by less than 32 bits tell.
    """
    values = {n: torch.randn(x.shape, dtype=_WIDER.get(x.dtype, x.dtype)) for n, x in stand_ins.items()}
    return values, [{name: scale * torch.randn_like(x) for name, x in values.items()} for scale in _SCALES]


def compare_sliced(
    programs: Sequence[StageProgram],
    stand_ins: Tensors,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
) -> None:
    """Step two halves of every parameter apart, as replicas do that share out the optimizer's state.

    Args:
        stand_ins: as of ``compare_apart``.

    Raises:
        ConfigError: names the parameter and what to write.
    """
    with warnings.catch_warnings(), own_generators():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        values, drawn = _drawn(stand_ins)
        for program in programs:
            held = {n: values[n] for n in program.parameters if n in program.trainable and n in values}
            if not held:
                continue
            whole = _Stepped(held, make_optimizer, make_scheduler)
            halves = [_Stepped(held, make_optimizer, make_scheduler) for _ in range(2)]
            parts = [
                [
                    Part(n, *ends)
                    for n, x in held.items()
                    if x.dim()
                    for ends in [_half(x.numel(), half)]
                    if ends[0] < ends[1]
                ]
                for half in range(2)
            ]
            kind, of_stage = type(whole.optimizer).__name__, f"on stage {program.index}"
            try:
                for half, stepped in enumerate(halves):
                    stepped.slices = Slices(parts, half, stepped.parameters)
                    stepped.slices.take_over(stepped.optimizer)
                for gradients in drawn:
                    whole.step(gradients)
                    for stepped in halves:
                        stepped.step(gradients)
            except Exception as error:  # noqa: BLE001  (told in one paragraph)
                raise _not_by_element(kind, f"its step fails {of_stage}: {short(error)}") from None
            for own, stepped in zip(parts, halves, strict=True):
                given = {x for group in stepped.optimizer.param_groups for x in group["params"]}
                if not stepped.optimizer.state.keys() <= given:
                    raise _not_by_element(kind, f"it keeps state {of_stage} for other tensors than those of its groups")
                for name, first, stop in own:
                    if not _moved_alike(stepped, whole, name, slice(first, stop)):
                        raise _not_by_element(kind, f"it moves a part of {name!r} {of_stage} otherwise than all of it")


def _half(size: int, half: int) -> tuple[int, int]:
    """First element, and that behind the last."""
    return (size // 2, size) if half else (0, size // 2)


def _not_by_element(kind: str, why: str) -> ConfigError:
    return ConfigError(
        f"shard_optimizer=True is not possible with {kind}, which does not step every element of a parameter by "
        f"itself: {why}. Replicas step slices of parameters then. Take an optimizer such as AdamW or SGD, or leave "
        "shard_optimizer out."
    )


class _Beside(NamedTuple):
    """What an optimizer keeps where no checkpoint looks.

    Attributes:
        numbers: by path.
        tensors: by the attribute or variable that holds them.
    """

    numbers: dict[str, int | float]
    tensors: dict[str, list[torch.Tensor]]


class _Stepped:
    """An optimizer and its scheduler over copies of some values."""

    def __init__(
        self, values: Tensors, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None,
        draws: SameDraws | None = None,
    ) -> None:  # fmt: skip
        self.start, self.draws = values, draws
        self.parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = new_optimizer(make_optimizer, list(self.parameters.items()))
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.steps = 0
        self.scheduler_draws = False

    slices: Slices | None = None

    def after(self, drawn: Sequence[Tensors]) -> _Stepped:
        """Itself, after steps with these gradients."""
        for gradients in drawn:
            self.step(gradients)
        return self

    def moved(self, name: str) -> bool:
        """Whether a parameter is not where it began."""
        return not torch.equal(self.parameters[name].detach(), self.start[name])

    def step(self, gradients: Tensors) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()
        if self.slices is not None:
            self._hide_others(gradients, self.slices)
            self.slices.take_gradients()
        if self.draws is not None:
            self.draws.seed = self.steps
        with self.draws or contextlib.nullcontext():
            self.optimizer.step()
        self._schedule()

    def _hide_others(self, gradients: Tensors, slices: Slices) -> None:
        """Of a whole gradient a replica has its parts only; what reads more of it shall not come to a number."""
        for name in slices.names:
            self.parameters[name].grad = torch.full_like(gradients[name], math.nan)
        for name, first, stop in slices.held:
            flat(self.parameters[name].grad)[first:stop] = flat(gradients[name])[first:stop]  # type: ignore[arg-type]

    def _schedule(self) -> None:
        self.steps += 1
        if self.scheduler is not None:
            before = generator_states()
            self.scheduler.step()
            self.scheduler_draws = self.scheduler_draws or not generator_states().same_as(before)

    def beside_state(self) -> _Beside:
        """What the optimizer, its class and its hooks reach."""
        memory, tensors = read_memory_of(self.optimizer, "self"), defaultdict(list)
        for path, tensor in memory.tensors.items():
            if not _OF_STATE.search(path):
                tensors[path.split("[")[0]].append(tensor)
        numbers = {p: x for p, x in memory.values.items() if isinstance(x, int | float) and not _OF_STATE.search(p)}
        return _Beside(numbers, tensors)

    def loaded(self, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None) -> _Stepped | None:
        """Another one that goes on from here as a run does; None where the optimizer has no such methods."""
        if not hasattr(self.optimizer, "load_state_dict"):
            return None
        draws = None if self.draws is None else SameDraws()
        made = _Stepped({n: p.detach() for n, p in self.parameters.items()}, make_optimizer, make_scheduler, draws)
        made.start = self.start
        for _ in range(self.steps):
            made._schedule()
        try:
            made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        except Exception as error:  # noqa: BLE001  (told in one paragraph)
            kind = type(self.optimizer).__name__
            raise ConfigError(
                f"optimizer: {kind} does not take its own state_dict() back: {short(error)} A run goes on from "
                "checkpoints and copies of it. Keep state in self.state[parameter] and param_groups only."
            ) from None
        return made

    def options(self, name: str) -> dict[str, Any]:
        """Of the group of a parameter; empty where it has none."""
        for group in self.optimizer.param_groups:
            if any(x is self.parameters[name] for x in group["params"]):
                return {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return {}


def _refuse_draws(kind: str, programs: Sequence[StageProgram], *, copies: bool, keyed: bool) -> None:
    if not keyed:
        raise ConfigError(
            f"optimizer: the step of {kind} draws from Python's or numpy's generator, whose numbers no run would draw "
            "again. Draw with torch (torch.randn_like), whose draws are keyed by PipelineConfig(seed=...) and the step."
        )
    if not copies:
        return
    shared = next(
        (f"{name!r} is held by stages {list(at)}" for p in programs for name, at in p.shared_with.items()), ""
    )
    raise ConfigError(
        f"optimizer: the step of {kind} draws random numbers, and {shared or 'every stage has replicas'}: each holder "
        "would draw others, and the copies would no longer be the same. Use an optimizer that draws nothing, or "
        f"{'a plan that holds it once' if shared else 'num_replicas=1'}."
    )


def _compare_with_whole(kind: str, stage: int, apart: _Stepped, whole: _Stepped) -> None:
    for name in apart.parameters:
        mine, wholes = apart.options(name), whole.options(name)
        for key in sorted(mine.keys() & wholes.keys()):
            if not _same(mine[key], wholes[key]):
                raise ConfigError(
                    f"optimizer gives {name!r} {key}={_short(mine[key])} on stage {stage}, and {key}="
                    f"{_short(wholes[key])} where it is called with all parameters of the model. Every stage calls it "
                    "with its own parameters only, so let names and shapes decide, not their position or number: "
                    "optimizer=lambda p: torch.optim.SGD([{'params': [x], 'lr': rate_of(name)} for name, x in p])."
                )
        if not _moved_alike(apart, whole, name):
            raise ConfigError(
                f"optimizer: the step of {kind} moves {name!r} on stage {stage} otherwise than where it steps all "
                "parameters of the model: it takes their number, or a number of all of them such as a norm. Stages "
                "step apart, so let it decide for each parameter alone; to clip the norm of the whole model's "
                "gradient set PipelineConfig(max_grad_norm=...). num_stages=1 trains with it as it is."
            )


def _compare_loaded(kind: str, apart: _Stepped, loaded: _Stepped) -> None:
    differs = next((name for name in apart.parameters if not _moved_alike(loaded, apart, name)), None)
    if differs is not None:
        raise ConfigError(
            f"optimizer: {kind} steps {differs!r} otherwise after its state_dict() was loaded into a new one, so a "
            "run that goes on from a checkpoint or recovers would train differently. Keep all that the step needs "
            "in self.state[parameter] or in the options of param_groups."
        )


def _compare_beside(kind: str, earlier: _Beside, apart: _Beside, loaded: _Beside) -> None:
    """What lies beside the state: before the last step and after it, and where a state_dict was loaded before it."""
    for attribute, held in apart.tensors.items():
        if not _all_same(held, loaded.tensors.get(attribute, [])):
            raise ConfigError(
                f"optimizer: {kind} keeps tensors in {attribute}, which are others after its state_dict() was "
                "loaded into a new one, so a run that goes on from a checkpoint or recovers may train differently. "
                "Keep them in self.state[parameter]."
            )
    for path, value in apart.numbers.items():
        counted = earlier.numbers.get(path, value) != value
        if counted and path in loaded.numbers and not math.isclose(value, loaded.numbers[path]):
            raise ConfigError(
                f"optimizer: {kind} counts on in {path}, which is {value:g} after {len(_SCALES)} steps, and "
                f"{loaded.numbers[path]:g} where its state_dict() was loaded into a new one before the last of them, "
                "so a run that goes on from a checkpoint or recovers may train differently. Keep it in an option of "
                "groups, as group['steps'], or in self.state[parameter]."
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.as_tensor(one).allclose(torch.as_tensor(other), rtol=_TOLERANCE, atol=0.0))
    return bool(one == other)


def _moved_alike(one: _Stepped, other: _Stepped, name: str, part: slice = slice(None)) -> bool:
    """Whether both moved a parameter, or a part of its elements, by the same: a small rate makes small differences."""
    start = other.start[name].reshape(-1)[part]
    if not start.numel():
        return True
    found, wanted = (x.parameters[name].detach().reshape(-1)[part] - start for x in (one, other))
    rounding = torch.finfo(start.dtype).eps * float(start.abs().max())
    bound = _TOLERANCE * float(wanted.abs().nan_to_num().max()) + 4 * rounding
    return torch.allclose(found, wanted, rtol=0.0, atol=bound, equal_nan=True)


def _all_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:40]
