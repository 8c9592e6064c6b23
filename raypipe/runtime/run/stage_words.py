"""What each stage holds, in the user's own names: "transformer.wte (Embedding) to transformer.h.0 (GPT2Block)"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition

__all__ = ["stage_words"]


def stage_words(classes: Mapping[str, str], graph: ModelGraph, partition: Partition) -> tuple[tuple[str, str], ...]:
    """("stage 0", the modules from the first to the last that it holds), as Plan.reasons keep them.

    Named are the largest modules of which no other stage has a part. A stage without one, cut out of the middle of a
    module, gets that module's name; where operations belong to no module, their own names stand in.

    Args:
        classes: class name of every module of the model, by path.
    """
    paths = [[graph.nodes[i].module for i in partition.nodes_of(stage)] for stage in partition.stages]
    holders: dict[str, set[int]] = {}
    for index, found in enumerate(paths):
        for path in found:
            for ancestor in _ancestors(path):
                holders.setdefault(ancestor, set()).add(index)
    words = []
    for stage, found in zip(partition.stages, paths, strict=True):
        wholes = [whole for path in found if (whole := _largest_alone(path, holders))]
        if wholes:
            held = _from_to([_called(classes, wholes[0]), _called(classes, wholes[-1])])
        elif any(found):
            held = "a part of " + _called(classes, next(filter(None, found)))
        else:
            held = _from_to([stage.first_node, stage.last_node])
        words.append((f"stage {stage.index}", held))
    return tuple(words)


def _ancestors(path: str) -> list[str]:
    """ "h.0.mlp" -> h, h.0, h.0.mlp; nothing of the model itself."""
    names = path.split(".") if path else []
    return [".".join(names[:i]) for i in range(1, len(names) + 1)]


def _largest_alone(path: str, holders: dict[str, set[int]]) -> str:
    alone = [ancestor for ancestor in _ancestors(path) if len(holders[ancestor]) == 1]
    return alone[0] if alone else ""


def _called(classes: Mapping[str, str], path: str) -> str:
    if path not in classes:  # an operation of the loss, say
        return path
    return f"layer {path} ({classes[path]})" if path.isdigit() else f"{path} ({classes[path]})"


def _from_to(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"
