"""Restore of a stage from a checkpoint of any number of stages: the stage reads the tensors that it holds, by name.

    saved by 2 stages    stage_0: a b c       stage_1: d e f
                               | |  \\___________  |  \\ \\
    read by 3 stages     stage_0: a b     stage_1: c d    stage_2: e f
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.device.device import CPU, TransferKind
from raypipe.engine.io.checkpoint.find_checkpoint import Checkpoint
from raypipe.engine.io.checkpoint.manifest import OptionGroup
from raypipe.engine.io.checkpoint.state_source import Kept, StateSource, StoredState, opened
from raypipe.engine.io.checkpoint.tensor_file import TensorInfo, decode
from raypipe.engine.io.storage import Place
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import LOSS_SCALE_OPTIONS as OF_LOSS_SCALE
from raypipe.engine.optim.state import StageState
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError

_SCHEDULED = ("lr", "momentum", "betas")
"""Optimizer options that torch's schedulers change. Schedulers also add options, such as initial_lr, to each group."""


class FreshOptions(NamedTuple):
    """Selection of optimizer options that keep their present value in a restore; all other options are restored.

    Attributes:
        names: names of selected options.
        scheduled: True also selects the options that a scheduler changes. The new scheduler sets them: it makes as many
            steps as the saved run had made.
        every: True selects all options.
    """

    names: frozenset[str] = frozenset()
    scheduled: bool = False
    every: bool = False

    def __or__(self, other: FreshOptions) -> FreshOptions:
        return FreshOptions(self.names | other.names, self.scheduled or other.scheduled, self.every or other.every)

    def takes(self, option: str, defaults: Collection[str]) -> bool:
        """Return True if an option keeps its present value; ``defaults`` has the keys of ``Optimizer.defaults``."""
        turned = self.scheduled and (option in _SCHEDULED or option not in defaults)
        return self.every or option in self.names or turned


def load_stage(
    source: StateSource | Checkpoint | Place,
    program: StageProgram,
    state: StageState,
    persistent: frozenset[str] | None = None,
    fresh: FreshOptions = FreshOptions(),  # noqa: B008  (immutable)
    crossing: DeviceTransfer | None = None,
) -> None:
    """Restore the state of a stage. Files of a checkpoint that hold no tensor of the stage are not opened.

    Parameters and buffers are filled in place. The scheduler takes as many steps as it had taken in the saved run; then
    the saved options of the optimizer are set.

    Args:
        source: source of state, a checkpoint of ``find_checkpoint``, or the folder of a checkpoint.
        state: state to change in place, before any step; unusable if this raises.
        persistent: names of all parameters and persistent buffers of the model. None restores all buffers that the
            source has, and skips the check that the source has no other names.
        fresh: options of the optimizer that keep their present values, because the user has changed them since.
        crossing: transfer to the device of the state; None for the CPU.

    Raises:
        CheckpointError: the source is of another model or optimizer, or a file is missing; names the parameter.
    """
    state.wait_until_read()
    crossing = crossing or DeviceTransfer(CPU)
    with opened(source) as opened_source:
        targets = _targets(program, state, persistent, opened_source.names)
        _check_names(targets, persistent, opened_source)
        for name, target in targets.items():
            _check_like(name, opened_source.info(name), target)
        with torch.no_grad():
            for name, tensor in opened_source.read(targets):
                crossing.fill(targets[name], tensor, TransferKind.RESTORED)
        state.updates = opened_source.updates
        if state.optimizer is not None:
            _replay(state.scheduler, opened_source.updates)
            if isinstance(opened_source, StoredState):
                _load_optimizer(state, opened_source, fresh, crossing)


def _targets(
    program: StageProgram, state: StageState, persistent: frozenset[str] | None, stored: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of the state to fill, by name: all parameters, and the buffers that ``persistent`` names.

    Args:
        stored: names in the source; if ``persistent`` is None, the buffers among them are filled.
    """
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


def _check_like(name: str, saved: TensorInfo, target: torch.Tensor) -> None:
    if saved.shape != tuple(target.shape) or saved.dtype != target.dtype:
        was, now = ((str(t.dtype).removeprefix("torch."), list(t.shape)) for t in (saved, target))
        raise CheckpointError(
            f"{name!r} was {was[0]} of shape {was[1]} when the checkpoint was saved and is {now[0]} of shape {now[1]} "
            "now. Give the run another name or storage_path, or the model that it had."
        )


def _replay(scheduler: Any, steps: int) -> None:
    """Step a new scheduler ``steps`` times, which restores its state: the state depends only on the number of steps."""
    if scheduler is None:
        return
    with warnings.catch_warnings():
        # torch sees steps of the scheduler without any of the optimizer and suspects a mistake
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        for _ in range(steps):
            scheduler.step()


def _load_optimizer(state: StageState, source: StoredState, fresh: FreshOptions, crossing: DeviceTransfer) -> None:
    """Restore the optimizer's options and state by parameter name, through its class's load_state_dict.

    Args:
        state: state of the stage; its optimizer is changed in place.
        source: saved options and state.
        fresh: options that are not restored: they keep their present values.
        crossing: transfer of the saved tensors to the device of the parameters.

    Raises:
        CheckpointError: the optimizer does not load the saved state, holds a tensor that is no parameter, or needs
            state that the saved run did not have.
    """
    optimizer, slices = state.optimizer, state.slices
    assert optimizer is not None
    title = type(optimizer).__name__
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    groups = {name: _kept_options(group, fresh, optimizer.defaults) for name, group in source.groups.items()}
    if slices is None and any(id(x) not in names for group in optimizer.param_groups for x in group["params"]):
        raise CheckpointError(f"{title} holds a tensor that is no parameter of the model; leave it out.")
    packed, number = [], 0
    for at, group in enumerate(optimizer.param_groups):
        mine = [names[id(x)] for x in group["params"]] if slices is None else slices.groups[at]
        stop = number + len(group["params"])
        packed.append({**_options(title, mine, group, groups), "params": list(range(number, stop))})
        number = stop
    stepped, states = _saved_states(state, source)
    for values in states.values():  # torch places the count of steps; all else goes to the parameters' device
        tensors = {k: value for k, value in values.items() if k != "step" and isinstance(value, torch.Tensor)}
        values.update(crossing.named(tensors, TransferKind.RESTORED))
    try:
        optimizer.load_state_dict({"state": states, "param_groups": packed})
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{title} does not load its state: {type(error).__name__}: {error}. Use the saved run's optimizer."
        ) from error
    for index, values in states.items():  # torch casts to the parameter's dtype and takes a text for a list
        held = optimizer.state[stepped[index]]
        for key, value in values.items():
            now = held.get(key)
            if isinstance(value, str):
                held[key] = value
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)
    if fresh.names or fresh.every:
        _refuse_incomplete(title, optimizer, fresh)


def _refuse_incomplete(title: str, optimizer: torch.optim.Optimizer, fresh: FreshOptions) -> None:
    """Refuse new options, such as amsgrad=True, that need optimizer state which the saved run did not have.

    To find out, a copy of the optimizer makes a step of a copy of its smallest parameter.

    Raises:
        CheckpointError: the step lacks state; names its key.
    """
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
            "saved run did not keep it. Leave the option as it was, or begin a run with another name from these "
            "weights: init_from=..."
        ) from None
    except Exception:  # noqa: BLE001  (other errors are raised by the first step of the run)
        return


def _saved_states(state: StageState, source: StoredState) -> tuple[list[torch.nn.Parameter], dict[int, dict[str, Any]]]:
    """Read the saved state of everything that the optimizer steps: parameters, and slices of parameters.

    Returns:
        (parameters and slices in the order of the optimizer's groups, {index in that list: state by key}).
    """
    assert state.optimizer is not None
    stepped = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    parts = {} if state.slices is None else state.slices.part_of()
    whole = _read_state({names[id(x)]: x for x in stepped if id(x) not in parts}, source)
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(stepped):
        part = parts.get(id(parameter))
        values = whole.get(names[id(parameter)], {}) if part is None else source.kept_part(part)
        if values:
            states[index] = dict(values)
    return stepped, states


def _read_state(trained: Mapping[str, torch.nn.Parameter], source: StoredState) -> Kept:
    """Read the saved optimizer state of the whole parameters ``trained``, by name, into new tensors.

    A tensor of the parameter's shape gets the parameter's strides, as if a step of the optimizer had created it.
    """
    states = source.kept(trained.keys())
    for name, values in states.items():
        like = trained[name]
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                copied = torch.empty_like(
                    like if value.shape == like.shape else value, dtype=value.dtype, device="cpu", requires_grad=False
                )
                values[key] = copied.copy_(value)
    return states


def _options(
    title: str, mine: Sequence[str], group: Mapping[str, Any], groups: Mapping[str, OptionGroup]
) -> dict[str, Any]:
    """Return the options of a parameter group: the saved options of its parameters, and present values of all others.

    Args:
        title: class name of the optimizer.
        mine: names of the group's parameters.
        groups: saved options by parameter name.

    Raises:
        CheckpointError: a parameter was not trained, was trained by another optimizer, or was saved with other options
            than the rest of the group.
    """
    saved: OptionGroup | None = None
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
        if saved is not None and groups[name].options != saved.options:
            raise CheckpointError(
                f"{mine[0]!r} and {name!r} had other options of {title} each ({_difference(saved, groups[name])}) and "
                "share a group now. Make the groups as in the saved run."
            )
        saved = groups[name]
    fresh = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {**fresh, **dict(_decoded(saved.options if saved else {}, fresh, title))}


def _kept_options(group: OptionGroup, fresh: FreshOptions, defaults: Collection[str]) -> OptionGroup:
    """Return the saved group without the options that ``fresh.takes``, given ``defaults``; the loss scale is kept."""
    if not (fresh.names or fresh.scheduled or fresh.every):
        return group
    kept = {
        name: value for name, value in group.options.items() if name in OF_LOSS_SCALE or not fresh.takes(name, defaults)
    }
    return OptionGroup(group.optimizer, kept, group.parameters)


def _decoded(options: Mapping[str, Any], fresh: Mapping[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        read = decode(value, f"The option {key!r} of {title}")
        yield key, _as_lists(read, fresh.get(key))


def _as_lists(read: Any, like: Any) -> Any:
    """Convert tuples in ``read`` to lists where ``like`` has lists; steps of an optimizer may write to lists."""
    if not isinstance(read, tuple) or not isinstance(like, list | tuple):
        return read
    parts = like if len(like) == len(read) else [None] * len(read)
    items = [_as_lists(one, part) for one, part in zip(read, parts, strict=True)]
    return items if isinstance(like, list) else tuple(items)


def _difference(one: OptionGroup, other: OptionGroup) -> str:
    keys = sorted(one.options.keys() | other.options.keys())
    return ", ".join(key for key in keys if one.options.get(key) != other.options.get(key))
