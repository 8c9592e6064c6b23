"""Which stage every operation of a traced model belongs to, and what crosses from stage to stage.

    stage s     boundary s -> s + 1: every value made in 0..s that some stage after s reads
    [f g h] ==> [x, skip] ==> [k l m]

A value that jumps over a stage is an input *and* an output of that stage. Its gradient then enters the
backward as a root, before the stage's own uses add theirs, which is the order in which plain autograd adds
them: that keeps the sums equal to the bit.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence

from raypipe.engine.capture.lines import Lines
from raypipe.engine.capture.slice import stage_function
from raypipe.engine.stage import GraphFunction
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph

__all__ = ["assign_by_anchors", "assign_by_owner", "assign_by_position", "check_order", "slice_stages"]


def assign_by_position(lines: Lines, cuts: Sequence[int], order: Sequence[int] = ()) -> dict[int, int]:
    """Stage of every operation when the sequence is cut before each position in ``cuts``.

    Args:
        order: the sequence, positions in execution order; empty for that order itself.
    """
    places = order or range(len(lines.operations))
    return {lines.operations[at]: bisect.bisect_right(cuts, place) for place, at in enumerate(places)}


def check_order(graph: ModelGraph, cuts: Sequence[int], order: Sequence[int]) -> None:
    """Refuse an order whose stages would not compute what the model computes, to the bit.

    Raises:
        CaptureError: names the two operations that stand wrong.
    """
    if sorted(order) != list(range(len(graph.nodes))):
        raise CaptureError(
            f"The order of a partition names {len(order)} positions, but the model has {len(graph.nodes)} operations, "
            "each of which must come exactly once. Make the plan anew from this model."
        )
    stage = {at: bisect.bisect_right(cuts, place) for place, at in enumerate(order)}
    rules = (
        (graph.edges or (), "reads what is made there", operator.gt),
        (graph.before, "must not run before it", operator.gt),
        (graph.together, "must share its stage", operator.ne),
    )
    for pairs, why, wrong in rules:
        for earlier, later in pairs:
            if wrong(stage[earlier], stage[later]):
                a, b = graph.nodes[earlier].name, graph.nodes[later].name
                raise CaptureError(
                    f"The order of the partition puts {a!r} in stage {stage[earlier]} and {b!r}, which {why}, in stage "
                    f"{stage[later]}. Plan with a solver that keeps edges, together and before of the graph."
                )


def assign_by_anchors(
    lines: Lines, holders: Mapping[str, tuple[int, ...]], cut_bytes: Sequence[int | None], num_stages: int
) -> dict[int, int] | None:
    """Stage of every operation of the *other* mode, cut where least crosses between what each stage holds.

    The operations that read something held say in which stage they are; between two of different stages any
    position would do. None where this does not work out, because the mode runs its parts in another order.

    Args:
        holders: stages that hold each parameter or changing buffer, by name.
        cut_bytes: that cross a cut after each operation, None where there can be none.
    """
    names = lines.held_names()
    cuts: list[int] = []
    begin = 1  # first position at which the next cut may be

    def cut(stage: int, stop: int) -> bool:
        places = [(size, p) for p in range(begin, stop) if (size := cut_bytes[p - 1]) is not None]
        missing = stage - len(cuts)
        cuts.extend([min(places)[1]] * missing if places else [])
        return len(cuts) == stage

    for position, number in enumerate(lines.operations):
        read = lines.values[number].inputs
        held = [set(holders[names[used]]) for used in read if names.get(used, "") in holders]
        if not held:
            continue
        possible = [stage for stage in set.intersection(*held) if stage >= len(cuts)]
        if not possible or not cut(min(possible), position + 1):
            return None
        begin = position + 1
    return assign_by_position(lines, cuts) if cut(num_stages - 1, len(lines.operations)) else None


def assign_by_owner(
    lines: Lines, holders: Mapping[str, tuple[int, ...]], together: Sequence[tuple[int, int]] = ()
) -> dict[int, int]:
    """Stage of every operation of the *other* mode, so that both modes hold the same tensors in the same place.

    An operation goes to the earliest stage that has its inputs and holds its parameters and buffers.

    Args:
        holders: stages that hold each parameter or changing buffer, by name.
        together: positions of the other mode that must share a stage.

    Raises:
        CaptureError: evaluation uses a parameter before training's place for it.
    """
    names, users, joined = lines.held_names(), lines.users(), _joined(lines, together)
    stages = dict.fromkeys(lines.operations, 0)
    waiting = dict.fromkeys(lines.operations)
    while waiting:  # stages only grow, and the last one is the end of it
        number = next(iter(waiting))
        del waiting[number]
        read, partners = lines.values[number].inputs, joined.get(number, [])
        earliest = max((stages[i] for i in (*read, *partners) if i in stages), default=0)
        earliest = max(earliest, stages[number])
        for used in read:
            if (name := names.get(used, "")) in holders:
                earliest = _holder_from(earliest, holders[name], name)
        if earliest > stages[number]:
            stages[number] = earliest
            waiting.update(dict.fromkeys(n for n in (*users.get(number, ()), *partners) if n in stages))
    return stages


def _joined(lines: Lines, together: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """By operation, those that must share its stage."""
    found: dict[int, list[int]] = {}
    for one, other in together:
        a, b = lines.operations[one], lines.operations[other]
        found.setdefault(a, []).append(b)
        found.setdefault(b, []).append(a)
    return found


def _holder_from(earliest: int, holders: Sequence[int], name: str) -> int:
    """The first stage from ``earliest`` on that holds a tensor."""
    found = next((stage for stage in holders if stage >= earliest), None)
    if found is None:
        raise CaptureError(
            f"Evaluation reads {name!r} in stage {earliest} or later, but training holds it in stage {holders[-1]}: "
            "the model runs its parts in another order in eval mode. Move the cut with "
            "PipelineConfig(partitioner=[...])."
        )
    return found


def slice_stages(lines: Lines, stages: Mapping[int, int], num_stages: int, title: str) -> list[GraphFunction]:
    """One function per stage.

    Args:
        stages: stage of each operation, never decreasing along an edge.
        title: names the functions in tracebacks.
    """
    _check_buffers(lines, stages)
    last_use = dict(stages)
    for number in lines.operations:
        for used in lines.values[number].inputs:
            if used in last_use:
                last_use[used] = max(last_use[used], stages[number])
    for number in lines.outputs:
        if number in last_use:
            last_use[number] = num_stages - 1
    boundaries = [
        [number for number in lines.operations if stages[number] <= stage < last_use[number]]
        for stage in range(num_stages - 1)
    ]
    return [
        stage_function(
            lines,
            [number for number in lines.operations if stages[number] == stage],
            boundaries[stage - 1] if stage else [],
            list(lines.outputs) if stage == num_stages - 1 else boundaries[stage],
            f"{title} stage {stage}",
        )
        for stage in range(num_stages)
    ]


def _check_buffers(lines: Lines, stages: Mapping[int, int]) -> None:
    users = lines.users()
    for buffer in lines.changing_buffers:
        using = sorted({stages[user] for user in users.get(buffer, ())})
        if len(using) > 1:
            raise CaptureError(
                f"The buffer {lines.values[buffer].of!r} is updated during forward and used in stages {using}; "
                "a changing buffer must stay within one stage. Move the cut with PipelineConfig(partitioner=[...])."
            )
