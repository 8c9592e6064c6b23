"""Optimizer state of which every replica of a stage holds slices: in files by slice, and whole again when it is read.

    replica 0   stage_0.optimizer.safetensors     exp_avg@0/weight       elements 0 to 2048
    replica 1   stage_0.optimizer.1.safetensors   exp_avg@2048/weight    the rest;   step/bias    what is no slice
    read        exp_avg/weight: all elements, whoever wrote them, for any number of replicas

A replica writes its own part, behind its back like every stage; what is no slice is written by who steps the beginning
of the parameter. The manifest lists the files of a stage together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.replicas.slices import Part, sliced
from raypipe.engine.state import StageState
from raypipe.errors import CheckpointError

__all__ = ["kept_parts", "name_in_file", "split_name", "together", "whole"]

MARK = "@"
"""Between a key of the optimizer's and the element with which a slice begins."""


def name_in_file(key: str, part: Part) -> str:
    """Of a slice of what an optimizer keeps under ``key``.

    Raises:
        CheckpointError: the key has a sign in it that tells slices apart.
    """
    if MARK in key:
        raise CheckpointError(
            f"The optimizer keeps {key!r} for {part.name!r}: with shard_optimizer=True a key must have no {MARK!r}."
        )
    return f"{key}{MARK}{part.first}/{part.name}"


def split_name(stored: str) -> tuple[str, int | None, str]:
    """(key of the optimizer's, first element of a slice or None where it is none, parameter) of a name in a file."""
    title, _, name = stored.partition("/")
    key, _, first = title.rpartition(MARK)
    return (key, int(first), name) if first.isdecimal() and key else (title, None, name)


def whole(
    pieces: Iterable[tuple[str, Callable[[], torch.Tensor]]],
    trained: Collection[str],
    shape_of: Callable[[str], Sequence[int]],
) -> dict[tuple[str, str], torch.Tensor]:
    """What an optimizer keeps, by parameter and key, of slices and of what is none.

    Args:
        pieces: names in files, and what reads each.
        trained: parameters that are wanted.
        shape_of: of a parameter.

    Raises:
        CheckpointError: slices of something are missing.
    """
    found: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], int] = {}
    for stored, read in pieces:
        key, at, name = split_name(stored)
        if name not in trained:
            continue
        piece = read()
        if at is None:
            found[name, key] = piece
            continue
        if (name, key) not in found:
            found[name, key] = torch.empty(tuple(shape_of(name)), dtype=piece.dtype)
        found[name, key].view(-1)[at : at + piece.numel()] = piece
        filled[name, key] = filled.get((name, key), 0) + piece.numel()
    for (name, key), count in filled.items():
        if count != found[name, key].numel():
            raise CheckpointError(
                f"The checkpoint has {count} of the {found[name, key].numel()} elements of {key!r} of {name!r}. Use an "
                "older one."
            )
    return found


def kept_parts(
    state: StageState,
    saved: Callable[[Mapping[str, torch.nn.Parameter]], Mapping[str, Mapping[str, Any]]],
    saved_part: Callable[[Part], Mapping[str, Any] | None] = lambda part: None,
) -> tuple[list[torch.nn.Parameter], dict[int, dict[str, Any]]]:
    """What the optimizer steps, in the order of its groups, and by place there what it kept for it.

    Args:
        saved: reads what was kept for these parameters, by name, of whole ones. Where replicas share it out it is asked
            for one parameter at a time, so that the whole of it is never here.
        saved_part: reads it of a part alone; None where that cannot be.
    """
    assert state.optimizer is not None
    order = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    parts = {} if state.slices is None else state.slices.part_of()
    places: dict[str, list[int]] = {}
    for at, parameter in enumerate(order):
        part = parts.get(id(parameter))
        places.setdefault(names[id(parameter)] if part is None else part.name, []).append(at)
    wanted = {name: state.parameters[name] for name in places}
    found: dict[int, dict[str, Any]] = {}
    for at, parameter in enumerate(order):
        if (part := parts.get(id(parameter))) is not None and (values := saved_part(part)) is not None:
            places[part.name].remove(at)
            if values:
                found[at] = dict(values)
    wanted = {name: whole_one for name, whole_one in wanted.items() if places[name]}
    for some in [wanted] if not parts else [{name: whole_one} for name, whole_one in wanted.items()]:
        for name, values in saved(some).items():
            for at in places[name]:
                part = parts.get(id(order[at]))
                found[at] = dict(values)
                if part is not None:
                    found[at] = {key: sliced(value, wanted[name], part) for key, value in values.items()}
    return order, found


def together(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The manifest's entries of stages, with what further replicas wrote in those of the replica that leads.

    Args:
        entries: of ``write_snapshot`` on every stage and replica, in any order.

    Raises:
        CheckpointError: a replica's part belongs to no stage.
    """
    leading = [dict(entry) for entry in entries if not entry.get("replica")]
    by_stage = {entry.get("stage"): entry for entry in leading}
    further = [entry for entry in entries if entry.get("replica")]
    for entry in sorted(further, key=lambda entry: (entry["stage"], entry["replica"])):
        of_stage = by_stage.get(entry["stage"])
        if of_stage is None:
            raise CheckpointError(
                f"Replica {entry['replica']} of stage {entry['stage']} wrote its part, and the first one did not."
            )
        of_stage["pieces"] = [*of_stage.get("pieces", ()), entry["optimizer"]]
        of_stage["scalars"] = {**of_stage["scalars"], **entry["scalars"]}
    for entry in leading:
        entry.pop("replica", None)
    return leading
