"""State back into a stage, whatever the number of stages was: each takes the names that it holds.

    saved by 2 stages    stage_0: a b c       stage_1: d e f
                               | |  \\___________  |  \\ \\
    taken by 3 stages    stage_0: a b     stage_1: c d    stage_2: e f
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.checkpoint.find import Checkpoint
from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.sliced import kept_parts
from raypipe.engine.checkpoint.source import Kept, PartSource, StateSource, opened
from raypipe.engine.checkpoint.tensor_table import TensorInfo
from raypipe.engine.checkpoint.values import decode
from raypipe.engine.crossing import Crossing
from raypipe.engine.device import CPU, Crosses
from raypipe.engine.loss_scale import OPTIONS as OF_LOSS_SCALE
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["FreshOptions", "load_stage"]

_SCHEDULED = ("lr", "momentum", "betas")
"""Options that torch's schedulers turn; what they add to a group is in no optimizer's defaults."""


class FreshOptions(NamedTuple):
    """Options of the optimizer that are as the user gives them now; all others are as they were saved.

    Attributes:
        names: of options.
        scheduled: those that a scheduler turns, too: as the new one has them after as many steps.
        every: all of them.
    """

    names: frozenset[str] = frozenset()
    scheduled: bool = False
    every: bool = False

    def __or__(self, other: FreshOptions) -> FreshOptions:
        return FreshOptions(self.names | other.names, self.scheduled or other.scheduled, self.every or other.every)

    def takes(self, option: str, defaults: Collection[str]) -> bool:
        """Whether this option is one of them.

        Args:
            defaults: names of the optimizer's own options.
        """
        turned = self.scheduled and (option in _SCHEDULED or option not in defaults)
        return self.every or option in self.names or turned


def load_stage(
    source: StateSource | Checkpoint | Place,
    program: StageProgram,
    state: StageState,
    persistent: frozenset[str] | None = None,
    fresh: FreshOptions = FreshOptions(),  # noqa: B008  (immutable)
    crossing: Crossing | None = None,
) -> None:
    """Bring a stage to where the state was saved. Of a checkpoint only files with names that it holds are opened.

    Parameters and buffers are filled in place. The scheduler takes as many steps as the run had taken, then the
    saved options of the optimizer count.

    Args:
        source: or a checkpoint that ``find_checkpoint`` found good, or its folder.
        state: as it was made, before any step; unusable if this raises.
        persistent: names of all parameters and persistent buffers of the model; None skips the check that the
            source holds nothing else, and takes the buffers that it has.
        fresh: options of the optimizer that were changed since and are not taken back.
        crossing: to the device where the state lies; None for the CPU.

    Raises:
        CheckpointError: another model, another optimizer, or a file that is not there; names the parameter.
    """
    state.wait_until_read()
    crossing = crossing or Crossing(CPU)
    with opened(source) as found:
        targets = _targets(program, state, persistent, found.names)
        _check_names(targets, persistent, found)
        for name, target in targets.items():
            _check_like(name, found.info(name), target)
        with torch.no_grad():
            for name, tensor in found.read(targets):
                crossing.fill(targets[name], tensor, Crosses.RESTORED)
        state.updates = found.updates
        if state.optimizer is not None:
            _replay(state.scheduler, found.updates)
            if found.groups is not None:
                _load_optimizer(state, found.groups, found, fresh, crossing)


def _targets(
    program: StageProgram, state: StageState, persistent: frozenset[str] | None, stored: Collection[str]
) -> dict[str, torch.Tensor]:
    """What is to be filled: the parameters, and the buffers that a checkpoint holds."""
    kept = stored if persistent is None else persistent
    buffers = {name: state.buffers[name] for name in program.buffers if name in kept}
    return {**{name: state.parameters[name].data for name in program.parameters}, **buffers}


def _check_names(targets: Iterable[str], persistent: frozenset[str] | None, source: StateSource) -> None:
    missing = [name for name in targets if name not in source.names]
    surplus = sorted(set(source.names) - persistent) if persistent is not None else []
    for name, fault in [(n, "lacks") for n in missing] + [(n, "holds, unlike the model,") for n in surplus]:
        others = len(missing) + len(surplus) - 1
        more = f", and {others} other names differ" if others else ""
        raise CheckpointError(
            f"{source.title} {fault} {name!r}{more}: it was saved from another model. Give the run another name or "
            "storage_path, or the model that it had."
        )


def _check_like(name: str, found: TensorInfo, target: torch.Tensor) -> None:
    if found.shape != tuple(target.shape) or found.dtype != target.dtype:
        was, now = ((str(t.dtype).removeprefix("torch."), list(t.shape)) for t in (found, target))
        raise CheckpointError(
            f"{name!r} was {was[0]} of shape {was[1]} when the checkpoint was saved and is {now[0]} of shape {now[1]} "
            "now. Give the run another name or storage_path, or the model that it had."
        )


def _replay(scheduler: Any, steps: int) -> None:
    """A scheduler is a function of the number of steps: taking them again saves keeping its state."""
    if scheduler is None:
        return
    with warnings.catch_warnings():
        # torch sees steps of the scheduler without any of the optimizer and suspects a mistake
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        for _ in range(steps):
            scheduler.step()


def _load_optimizer(
    state: StageState, saved: Mapping[str, OptionGroup], source: StateSource, fresh: FreshOptions, crossing: Crossing
) -> None:
    """Options and state by name, through ``load_state_dict``, of which subclasses may have their own."""
    optimizer, slices = state.optimizer, state.slices
    assert optimizer is not None
    title = type(optimizer).__name__
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    groups = {name: _kept_options(group, fresh, optimizer.defaults) for name, group in saved.items()}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in stepped) and slices is None:
        raise CheckpointError(f"{title} holds a tensor that is no parameter of the model; leave it out.")
    packed, number = [], 0
    for at, group in enumerate(optimizer.param_groups):
        mine = [names[id(x)] for x in group["params"]] if slices is None else slices.groups[at]
        stop = number + len(group["params"])
        packed.append({**_options(title, mine, group, groups), "params": list(range(number, stop))})
        number = stop
    of_part = {"saved_part": source.kept_part} if isinstance(source, PartSource) else {}
    order, states = kept_parts(state, lambda trained: _saved_state(trained, source), **of_part)
    for values in states.values():  # all but the count of steps, for which torch decides, go where the parameters are
        tensors = {k: value for k, value in values.items() if k != "step" and isinstance(value, torch.Tensor)}
        values.update(crossing.named(tensors, Crosses.RESTORED))
    try:
        optimizer.load_state_dict({"state": states, "param_groups": packed})
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{title} does not take its state back: {type(error).__name__}: {error}. Use the saved run's optimizer."
        ) from error
    for at, values in states.items():  # torch casts to the parameter's dtype and takes a text for a list
        held = optimizer.state[order[at]]
        for key, value in values.items():
            now = held.get(key)
            if isinstance(value, str):
                held[key] = value
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)
    if fresh.names or fresh.every:
        _refuse_incomplete(title, optimizer, fresh)


def _refuse_incomplete(title: str, optimizer: torch.optim.Optimizer, fresh: FreshOptions) -> None:
    """Refuse new options that need state which the saved run has not kept, as amsgrad does, by a step of a copy."""
    held = [(x, group) for group in optimizer.param_groups for x in group["params"] if optimizer.state.get(x)]
    if not held:
        return
    smallest, group = min(held, key=lambda pair: pair[0].numel())
    copied = torch.nn.Parameter(smallest.detach().clone())
    copied.grad = torch.zeros_like(copied)
    tried = copy.copy(optimizer)
    tried.param_groups = [{**group, "params": [copied]}]
    tried.state = defaultdict(dict, {copied: copy.deepcopy(optimizer.state[smallest])})
    try:
        tried.step()
    except KeyError as error:
        raise CheckpointError(
            f"{title} needs {error} with its new options ({', '.join(sorted(fresh.names)) or 'all of them'}), and the "
            "saved run has not kept that. Leave the option as it was, or begin a run with another name from these "
            "weights: init_from=..."
        ) from None
    except Exception:  # noqa: BLE001  (what else a lonely parameter lacks, the step says in its own place)
        return


def _saved_state(trained: Mapping[str, torch.nn.Parameter], source: StateSource) -> Kept:
    """By parameter, what the optimizer kept for it; tensors of its shape in its own layout, as a step makes them.

    All tensors have memory of their own, whatever the source gives.
    """
    found = source.kept(trained.keys())
    for name, state in found.items():
        like = trained[name]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                made = torch.empty_like(
                    like if value.shape == like.shape else value, dtype=value.dtype, device="cpu", requires_grad=False
                )
                state[key] = made.copy_(value)
    return found


def _options(
    title: str, mine: Sequence[str], group: Mapping[str, Any], groups: Mapping[str, OptionGroup]
) -> dict[str, Any]:
    """The saved options of these parameters over those of the fresh group."""
    found: OptionGroup | None = None
    for name in mine:
        if name not in groups:
            raise CheckpointError(
                f"{name!r} is trained now and was not when the checkpoint was saved, so it has no optimizer state. "
                "Give the run another name, or freeze it again."
            )
        if groups[name].optimizer != title:
            raise CheckpointError(
                f"{name!r} was trained by {groups[name].optimizer} when the checkpoint was saved and is by {title} "
                "now. Give the run another name, or use that optimizer again."
            )
        if found is not None and groups[name].options != found.options:
            raise CheckpointError(
                f"{mine[0]!r} and {name!r} had other options of {title} each ({_difference(found, groups[name])}) and "
                "share a group now. Make the groups as in the saved run."
            )
        found = groups[name]
    fresh = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {**fresh, **dict(_decoded(found.options if found else {}, fresh, title))}


def _kept_options(group: OptionGroup, fresh: FreshOptions, defaults: Collection[str]) -> OptionGroup:
    """The saved group without the options that were changed since."""
    if not (fresh.names or fresh.scheduled or fresh.every):
        return group
    kept = {
        name: value for name, value in group.options.items() if name in OF_LOSS_SCALE or not fresh.takes(name, defaults)
    }
    return OptionGroup(group.optimizer, kept, group.parameters)


def _decoded(options: Mapping[str, Any], fresh: Mapping[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        read = decode(value, f"The option {key!r} of {title}")
        yield key, list(read) if isinstance(read, tuple) and isinstance(fresh.get(key), list) else read


def _difference(one: OptionGroup, other: OptionGroup) -> str:
    keys = sorted(one.options.keys() | other.options.keys())
    return ", ".join(key for key in keys if one.options.get(key) != other.options.get(key))
