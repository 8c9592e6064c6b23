"""State back into a stage, whatever the number of stages was: each takes the names that it holds.

    saved by 2 stages    stage_0: a b c       stage_1: d e f
                               | |  \\___________  |  \\ \\
    taken by 3 stages    stage_0: a b     stage_1: c d    stage_2: e f
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from raypipe.engine.checkpoint.find import Checkpoint, read_manifest
from raypipe.engine.checkpoint.manifest import Manifest, OptionGroup
from raypipe.engine.checkpoint.tensor_file import TensorFile, TensorInfo
from raypipe.engine.checkpoint.values import decode
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
    checkpoint: Checkpoint | Place,
    program: StageProgram,
    state: StageState,
    persistent: frozenset[str] | None = None,
    fresh: FreshOptions = FreshOptions(),  # noqa: B008  (immutable)
) -> None:
    """Bring a stage to where the checkpoint was saved. Only files with names that it holds are opened.

    Parameters and buffers are filled in place. The scheduler takes as many steps as the run had taken, then the
    saved options of the optimizer count.

    Args:
        checkpoint: that ``find_checkpoint`` found good, or its folder: checksums are not compared again.
        state: as it was made, before any step; unusable if this raises.
        persistent: names of all parameters and persistent buffers of the model; None skips the check that the
            checkpoint holds nothing else, and takes the buffers that it has.
        fresh: options of the optimizer that were changed since and are not taken back.

    Raises:
        CheckpointError: another model, another optimizer, or a file that is not there; names the parameter.
    """
    if isinstance(checkpoint, Place):
        checkpoint = Checkpoint(checkpoint, read_manifest(checkpoint))
    manifest = checkpoint.manifest
    stored = manifest.stored
    targets = _targets(program, state, persistent, stored)
    _check_names(targets, persistent, stored, checkpoint)
    with ExitStack() as files:
        tensors = _Tensors(checkpoint, files, optimizer=False)
        for name, target in targets.items():
            _check_like(name, tensors.info(stored[name], name), target)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(tensors.read(stored[name], name))
        if state.optimizer is not None:
            _replay(state.scheduler, manifest.position["updates"])
            kept = _Tensors(checkpoint, files, optimizer=True)
            _load_optimizer(state.optimizer, state.parameters, manifest, kept, fresh)


class _Tensors:
    """The files of a checkpoint, each opened when the first tensor is asked for."""

    def __init__(self, checkpoint: Checkpoint, files: ExitStack, *, optimizer: bool) -> None:
        self._checkpoint, self._files, self._optimizer = checkpoint, files, optimizer
        self._opened: dict[int, TensorFile] = {}

    def info(self, stage: int, name: str) -> TensorInfo:
        found = self._file(stage).tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._checkpoint.place}: stage {stage} holds no {name!r}, though its manifest says so. Use an "
                "older checkpoint."
            )
        return found

    def read(self, stage: int, name: str) -> torch.Tensor:
        self.info(stage, name)
        return self._file(stage).read(name)

    def _file(self, stage: int) -> TensorFile:
        if stage not in self._opened:
            entry = self._checkpoint.manifest.stages[stage]
            shard = entry.optimizer if self._optimizer else entry.tensors
            assert shard is not None
            self._opened[stage] = self._files.enter_context(TensorFile(self._checkpoint.files / shard.file))
        return self._opened[stage]


def _targets(
    program: StageProgram, state: StageState, persistent: frozenset[str] | None, stored: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """What is to be filled: the parameters, and the buffers that a checkpoint holds."""
    kept = stored.keys() if persistent is None else persistent
    buffers = {name: state.buffers[name] for name in program.buffers if name in kept}
    return {**{name: state.parameters[name].data for name in program.parameters}, **buffers}


def _check_names(
    targets: Iterable[str], persistent: frozenset[str] | None, stored: Mapping[str, int], checkpoint: Checkpoint
) -> None:
    missing = [name for name in targets if name not in stored]
    surplus = sorted(stored.keys() - persistent) if persistent is not None else []
    for name, fault in [(n, "lacks") for n in missing] + [(n, "holds, unlike the model,") for n in surplus]:
        others = len(missing) + len(surplus) - 1
        more = f", and {others} other names differ" if others else ""
        raise CheckpointError(
            f"{checkpoint.place} {fault} {name!r}{more}: it was saved from another model. Give the run another name or "
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
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    manifest: Manifest,
    tensors: _Tensors,
    fresh: FreshOptions,
) -> None:
    """Options and state by name, through ``load_state_dict``, of which subclasses may have their own."""
    title = type(optimizer).__name__
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = {
        name: _kept_options(group, fresh, optimizer.defaults)
        for entry in manifest.stages
        for group in entry.groups
        for name in group.parameters
    }
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in order):
        raise CheckpointError(f"{title} holds a tensor that is no parameter of the model; leave it out.")
    packed, number = [], 0
    for group in optimizer.param_groups:
        mine = [names[id(parameter)] for parameter in group["params"]]
        packed.append({**_options(title, mine, group, groups), "params": list(range(number, number + len(mine)))})
        number += len(mine)
    saved = _saved_state({names[id(parameter)]: parameter for parameter in order}, manifest, tensors)
    states = {at: saved[names[id(parameter)]] for at, parameter in enumerate(order) if names[id(parameter)] in saved}
    try:
        optimizer.load_state_dict({"state": states, "param_groups": packed})
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{title} does not take its state back: {type(error).__name__}: {error}. Use the saved run's optimizer."
        ) from error
    for at, state in states.items():  # torch casts to the parameter's dtype and takes a text for a list
        held = optimizer.state[order[at]]
        for key, value in state.items():
            now = held.get(key)
            if isinstance(value, str):
                held[key] = value
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)


def _saved_state(
    trained: Mapping[str, torch.nn.Parameter], manifest: Manifest, tensors: _Tensors
) -> dict[str, dict[str, Any]]:
    """By parameter, what the optimizer kept for it, where it kept anything."""
    saved: dict[str, dict[str, Any]] = {}
    for name, keys in _kept(manifest, trained.keys()).items():
        like = trained[name]
        for key, stage in keys:
            value = tensors.read(stage, f"{key}/{name}")
            if value.shape == like.shape:  # in the parameter's own layout, as the optimizer would make it
                value = torch.empty_like(like, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)
            saved.setdefault(name, {})[key] = value
    for entry in manifest.stages:
        for name, values in entry.scalars.items():
            if name in trained:
                decoded = {key: decode(value, f"{key!r} of {name!r}") for key, value in values.items()}
                saved.setdefault(name, {}).update(decoded)
    return saved


def _kept(manifest: Manifest, wanted: Collection[str]) -> dict[str, list[tuple[str, int]]]:
    """By parameter, the keys of its state tensors with the stage that wrote them."""
    found: dict[str, list[tuple[str, int]]] = {}
    for entry in manifest.stages:
        for stored in entry.optimizer.names if entry.optimizer else ():
            key, _, name = stored.partition("/")
            if name in wanted:
                found.setdefault(name, []).append((key, entry.stage))
    return found


def _options(
    title: str, mine: list[str], group: Mapping[str, Any], groups: Mapping[str, OptionGroup]
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
    kept = {name: value for name, value in group.options.items() if not fresh.takes(name, defaults)}
    return OptionGroup(group.optimizer, kept, group.parameters)


def _decoded(options: Mapping[str, Any], fresh: Mapping[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        read = decode(value, f"The option {key!r} of {title}")
        yield key, list(read) if isinstance(read, tuple) and isinstance(fresh.get(key), list) else read


def _difference(one: OptionGroup, other: OptionGroup) -> str:
    keys = sorted(one.options.keys() | other.options.keys())
    return ", ".join(key for key in keys if one.options.get(key) != other.options.get(key))
