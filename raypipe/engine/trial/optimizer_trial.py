"""The optimizer and scheduler of every stage, made and stepped once on small stand-ins for its parameters.

A stand-in has its parameter's name, number of dimensions and type, and at most three places in each dimension. What
goes by sizes may fail on these alone: then it is tried again on copies of full size before anything is said.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raypipe.engine.checkpoint.snapshot import optimizer_parts
from raypipe.engine.checkpoint.tensor_table import check_storable
from raypipe.engine.item_randomness import own_generators
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, new_optimizer
from raypipe.engine.trial.optimizer_apart import compare_apart, compare_sliced
from raypipe.engine.trial.reads import no_reads_of
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import CaptureError, CheckpointError, ConfigError

__all__ = ["PLATEAU", "try_optimizers"]

PLATEAU = (
    "lr_scheduler makes ReduceLROnPlateau, which waits for a metric that stages do not have. Take one that follows "
    "from the number of steps: lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=1000)."
)
_OWN = (
    "Let it read the parameters that the optimizer is called with, as in group['params'], and keep an average of them "
    "in self.state[parameter]; a callback's on_checkpoint can read all of them."
)
_OF_RATES = (
    "lr_scheduler: without it the optimizers of stages step as one of the whole model would, and with it they do not. "
    "Let its rates follow from the number of steps, and from no parameters, clock or count of its own."
)
_EXAMPLE = "lambda p: torch.optim.AdamW(p, lr=3e-4)"
_SIDE = 3
_FEW = 1_000_000
"""Numbers of a model that may be copied whole where an optimizer goes by sizes."""

Named = list[tuple[str, torch.nn.Parameter]]


def try_optimizers(
    programs: Sequence[StageProgram],
    parameters: Mapping[str, torch.nn.Parameter],
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    *,
    replicated: bool = False,
    sharded: bool = False,
) -> bool:
    """Make what every stage will make, step it, and compare it with one optimizer of the whole model.

    Args:
        parameters: of the whole model, by name.
        replicated: stages have replicas, each with an optimizer of its own.
        sharded: these share out the state of their optimizer, and step slices of parameters.

    Returns:
        Whether steps of the optimizer draw numbers, as far as that was tried.

    Raises:
        ConfigError: it cannot be made or stepped, or would step otherwise than one of the whole model; names the stage
            and what to write.
    """
    small, draws = True, False
    for program in programs:
        held = {name: parameters[name] for name in program.parameters if name in program.trainable}
        if not held:
            continue
        sides = (_SIDE,) if any(p.is_meta for p in held.values()) else (_SIDE, None)
        found: ConfigError | None = None
        for side in sides:
            try:
                named = [(n, _copy(p, side)) for n, p in held.items()]
                _try(program.index, named, make_optimizer, make_scheduler, parameters)
                found = None
                break
            except ConfigError as error:
                found = error
            small = False
        if found is not None:
            raise found
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if small or sum(p.numel() for p in trained.values()) <= _FEW:
        stand_ins = {name: _copy(p, _SIDE if small else None).detach() for name, p in trained.items()}
        copies = replicated or any(program.shared_with for program in programs)
        try:
            draws = compare_apart(programs, stand_ins, make_optimizer, make_scheduler, copies=copies)
        except ConfigError as error:
            if make_scheduler is not None and not str(error).startswith("lr_scheduler"):
                compare_apart(programs, stand_ins, make_optimizer, None, copies=copies)
                differs, _, _ = str(error).partition(". ")  # the rest says what an optimizer should do
                raise ConfigError(f"{_OF_RATES} With it, {differs}.") from None
            raise
        if sharded:
            compare_sliced(programs, stand_ins, make_optimizer, make_scheduler)
            whole = {name: _copy(trained[name], None).detach() for name in _of_each_shape(trained)}
            compare_sliced(programs, whole, make_optimizer, make_scheduler)  # some treat large matrices otherwise
    elif sharded:
        raise ConfigError(
            "shard_optimizer=True: the optimizer goes by sizes of parameters, and the model is too large to try "
            "whether it steps every element by itself. Let names and numbers of dimensions decide, or leave "
            "shard_optimizer out."
        )
    return draws


def _of_each_shape(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """One parameter of every shape, the smallest first, as far as they may be copied whole."""
    found, total = {}, 0
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].numel()):
        if parameter.shape not in found and total + parameter.numel() <= _FEW:
            found[parameter.shape] = name
            total += parameter.numel()
    return list(found.values())


def _copy(parameter: torch.nn.Parameter, side: int | None) -> torch.nn.Parameter:
    shape = [d if side is None else min(d, side) for d in parameter.shape]
    made = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
    made.grad = torch.zeros_like(made)
    return made


def _try(
    stage: int, named: Named, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None,
    users: Mapping[str, torch.nn.Parameter],
) -> None:  # fmt: skip
    """Make both and step them.

    Args:
        users: parameters of the user's own model, which a step must leave alone.
    """
    with warnings.catch_warnings(), own_generators():
        warnings.simplefilter("ignore")
        optimizer = _optimizer(stage, named, make_optimizer)
        scheduler = None if make_scheduler is None else _scheduler(stage, optimizer, make_scheduler)
        for name, made in (("optimizer", optimizer), ("lr_scheduler", scheduler)):
            try:
                if made is not None:
                    with no_reads_of(users, f"{name}: the step of {type(made).__name__}", _OWN):
                        made.step()
            except CaptureError as error:
                raise ConfigError(str(error)) from None
            except Exception as error:  # noqa: BLE001  (told in one paragraph)
                raise ConfigError(
                    f"{name}: the step of {type(made).__name__} fails on stage {stage}{quoted(error)}: {short(error)} "
                    "It must step from the gradients of the stage's own parameters, and from nothing else."
                ) from None
        _check_kept(optimizer, named)


def _check_kept(optimizer: Any, named: Named) -> None:
    """Refuse what a checkpoint could not hold of an optimizer that has stepped."""
    try:
        found = optimizer_parts(optimizer, {id(p): name for name, p in named}, {name for name, _ in named})
        for name, tensor in found.tensors.items():
            check_storable(name, tensor)
    except CheckpointError as error:
        raise ConfigError(f"optimizer: {error}") from None


def _optimizer(stage: int, named: Named, make: MakeOptimizer) -> Any:
    try:
        made: Any = new_optimizer(make, named)
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        names = ", ".join(name for name, _ in named[:2]) + (", ..." if len(named) > 2 else "")
        if "with/without names" in str(error):  # torch's words on a named group beside an empty one
            raise ConfigError(
                f"optimizer cannot be made for stage {stage}, which trains {names}{quoted(error)}: some of its groups "
                "get none of these parameters, and torch takes no empty group beside one whose parameters have names. "
                "Leave such groups out: torch.optim.AdamW([group for group in groups if group['params']], lr=3e-4)."
            ) from None
        raise ConfigError(
            f"optimizer cannot be made for stage {stage}, which trains {names}{quoted(error)}: {short(error)} Every "
            f"stage calls it with its own named parameters, so it must take any part of them: optimizer={_EXAMPLE}."
        ) from None
    if not all(hasattr(made, name) for name in ("step", "param_groups", "state_dict")):
        raise ConfigError(
            f"optimizer returns {type(made).__name__} instead of an optimizer. Let it return one: optimizer={_EXAMPLE}."
        )
    kind = type(made).__name__
    if all(callable(getattr(made, name, None)) for name in ("train", "eval")):
        raise ConfigError(
            f"optimizer makes {kind}, which has other weights for evaluation than for training, and train() and eval() "
            "to change between the two. Evaluations, checkpoints and exports of a run would have those of training. "
            f"Take one whose parameters are what is evaluated: optimizer={_EXAMPLE}."
        )
    given = {id(parameter) for _, parameter in named}
    if any(id(parameter) not in given for group in made.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"optimizer makes {kind} with parameters that it was not called with. Every stage trains copies of its "
            f"own, so take those that come as the argument, not model.parameters(): optimizer={_EXAMPLE}."
        )
    if isinstance(made, torch.optim.LBFGS) or _asks_for(made.step):
        raise ConfigError(
            f"optimizer makes {kind}, whose step asks for a closure that computes the loss again, which a pipeline "
            f"does not. Take one that steps from the gradients alone: optimizer={_EXAMPLE}."
        )
    return made


def _scheduler(stage: int, optimizer: Any, make: MakeScheduler) -> Any:
    try:
        made: Any = make(optimizer)
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise ConfigError(
            f"lr_scheduler cannot be made for the optimizer of stage {stage}{quoted(error)}: {short(error)} It "
            "is called with the optimizer alone: "
            "lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)."
        ) from None
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(PLATEAU)
    if not all(hasattr(made, name) for name in ("step", "state_dict")):
        raise ConfigError(
            f"lr_scheduler returns {type(made).__name__} instead of a scheduler. Let it return one: "
            "lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)."
        )
    turned = getattr(made, "optimizer", optimizer)
    if not any(group is own for group in getattr(turned, "param_groups", []) for own in optimizer.param_groups):
        raise ConfigError(
            f"lr_scheduler makes {type(made).__name__} for another optimizer than the one that it is called with, so "
            "that the rates of this one would not change. Every stage has an optimizer of its own, so take the "
            "argument: lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)."
        )
    if asked := _asks_for(made.step):
        raise ConfigError(
            f"lr_scheduler makes {type(made).__name__}, whose step asks for {asked}, which stages do not have. Take "
            "one that follows from the number of steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )
    return made


def _asks_for(step: Any) -> str:
    """The first argument that a step cannot do without."""
    kinds = inspect.Parameter
    for name, parameter in inspect.signature(step).parameters.items():
        if parameter.default is kinds.empty and parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            return name
    return ""
