"""Slices of a traced model: one generated function per stage.

    stage s     boundary s -> s + 1: every value made in 0..s that some stage after s reads
    [f g h] ==> [x, skip] ==> [k l m]

A value that jumps over a stage is an input *and* an output of that stage. Its gradient then enters the
backward as a root, before the stage's own uses add theirs, which is the order in which plain autograd adds
them: that keeps the sums equal to the bit.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence

import torch
from torch import fx

from raypipe.engine.capture.analyse import SYM_SIZE, Analysis, column_with, dim_with
from raypipe.engine.stage import GraphFunction, Site
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph

__all__ = ["assign_by_anchors", "assign_by_owner", "assign_by_position", "check_order", "slice_stages"]


def assign_by_position(analysis: Analysis, cuts: Sequence[int], order: Sequence[int] = ()) -> dict[fx.Node, int]:
    """Stage of every operation when the sequence is cut before each position in ``cuts``.

    Args:
        order: the sequence, positions in execution order; empty for that order itself.
    """
    places = order or range(len(analysis.nodes))
    return {analysis.nodes[at]: bisect.bisect_right(cuts, place) for place, at in enumerate(places)}


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
    analysis: Analysis, holders: dict[str, tuple[int, ...]], cut_bytes: Sequence[int | None], num_stages: int
) -> dict[fx.Node, int] | None:
    """Stage of every operation of the *other* mode, cut where least crosses between what each stage holds.

    The operations that read something held say in which stage they are; between two of different stages any
    position would do. None where this does not work out, because the mode runs its parts in another order.

    Args:
        holders: stages that hold each parameter or changing buffer, by name.
        cut_bytes: that cross a cut after each operation, None where there can be none.
    """
    names = {**analysis.traced.parameters, **analysis.traced.buffers}
    cuts: list[int] = []
    begin = 1  # first position at which the next cut may be

    def cut(stage: int, stop: int) -> bool:
        places = [(size, p) for p in range(begin, stop) if (size := cut_bytes[p - 1]) is not None]
        missing = stage - len(cuts)
        cuts.extend([min(places)[1]] * missing if places else [])
        return len(cuts) == stage

    for position, node in enumerate(analysis.nodes):
        held = [set(holders[names[n]]) for n in node.all_input_nodes if names.get(n, "") in holders]
        if not held:
            continue
        possible = [stage for stage in set.intersection(*held) if stage >= len(cuts)]
        if not possible or not cut(min(possible), position + 1):
            return None
        begin = position + 1
    return assign_by_position(analysis, cuts) if cut(num_stages - 1, len(analysis.nodes)) else None


def assign_by_owner(
    analysis: Analysis, holders: dict[str, tuple[int, ...]], together: Sequence[tuple[int, int]] = ()
) -> dict[fx.Node, int]:
    """Stage of every operation of the *other* mode, so that both modes hold the same tensors in the same place.

    An operation goes to the earliest stage that has its inputs and holds its parameters and buffers.

    Args:
        holders: stages that hold each parameter or changing buffer, by name.
        together: positions of the other mode that must share a stage.

    Raises:
        CaptureError: evaluation uses a parameter before training's place for it.
    """
    traced = analysis.traced
    names = {**traced.parameters, **traced.buffers}
    joined: dict[fx.Node, list[fx.Node]] = {}
    for one, other in together:
        a, b = analysis.nodes[one], analysis.nodes[other]
        joined.setdefault(a, []).append(b)
        joined.setdefault(b, []).append(a)
    stages = dict.fromkeys(analysis.nodes, 0)
    waiting = dict.fromkeys(analysis.nodes)
    while waiting:  # stages only grow, and the last one is the end of it
        node = next(iter(waiting))
        del waiting[node]
        partners = joined.get(node, [])
        earliest = max((stages[i] for i in (*node.all_input_nodes, *partners) if i in stages), default=0)
        earliest = max(earliest, stages[node])
        for used in node.all_input_nodes:
            held = holders.get(names.get(used, ""))
            if held is None:
                continue
            later = [s for s in held if s >= earliest]
            if not later:
                raise CaptureError(
                    f"Evaluation reads {names[used]!r} in stage {earliest} or later, but training holds it in stage "
                    f"{held[-1]}: the model runs its parts in another order in eval mode. Move the cut with "
                    "PipelineConfig(partitioner=[...])."
                )
            earliest = max(earliest, later[0])
        if earliest > stages[node]:
            stages[node] = earliest
            waiting.update(dict.fromkeys(n for n in (*node.users, *partners) if n in stages))
    return stages


def slice_stages(analysis: Analysis, stages: dict[fx.Node, int], num_stages: int, title: str) -> list[GraphFunction]:
    """One function per stage.

    Args:
        stages: stage of each node of analysis.nodes, never decreasing along an edge.
        title: names the functions in tracebacks.
    """
    _check_buffers(analysis, stages)
    last_use = dict(stages)
    for node in analysis.nodes:
        for used in node.all_input_nodes:
            if used in last_use:
                last_use[used] = max(last_use[used], stages[node])
    for node in analysis.outputs:
        if node in last_use:
            last_use[node] = num_stages - 1
    boundaries = [
        [node for node in analysis.nodes if stages[node] <= stage < last_use[node]] for stage in range(num_stages - 1)
    ]
    return [
        _Slice(
            analysis,
            [node for node in analysis.nodes if stages[node] == stage],
            boundaries[stage - 1] if stage else [],
            list(analysis.outputs) if stage == num_stages - 1 else boundaries[stage],
        ).function(f"{title} stage {stage}")
        for stage in range(num_stages)
    ]


def _check_buffers(analysis: Analysis, stages: dict[fx.Node, int]) -> None:
    for buffer in analysis.changing_buffers:
        using = sorted({stages[user] for user in buffer.users if user in stages})
        if len(using) > 1:
            raise CaptureError(
                f"The buffer {analysis.traced.buffers[buffer]!r} is updated during forward and used in stages {using}; "
                "a changing buffer must stay within one stage. Move the cut with PipelineConfig(partitioner=[...])."
            )


class _Slice:
    """Copies one stage's operations into a graph of their own."""

    def __init__(self, analysis: Analysis, body: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
        self.analysis = analysis
        self.traced = analysis.traced
        self.body = body
        self.inputs = inputs
        self.outputs = outputs
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def function(self, title: str) -> GraphFunction:
        traced, analysis = self.traced, self.analysis
        leaves = self._leaves()
        sites = [(node, used) for node in self.body for used in node.all_input_nodes if used in traced.parameters]
        buffers = [b for b in traced.buffers if b in leaves]
        constants = [c for c in traced.constants if c in leaves]
        columns = [c for c in traced.columns if c in leaves]
        site_leaves = {}
        for node, used in sites:
            site_leaves[node, used] = self.graph.placeholder(f"{used.name}__{analysis.sites[node, used]}")
        for placeholder in (*buffers, *constants):
            self.env[placeholder] = self.graph.placeholder(placeholder.name)
        for node in self.inputs:
            self.env[node] = self.graph.placeholder(f"in_{node.name}")
        for column in columns:
            self.env[column] = self.graph.placeholder(f"column_{column.name}")
        self.env[traced.key] = self.graph.placeholder("key")
        for node in self.body:
            own = {used: site_leaves[node, used] for used in node.all_input_nodes if used in traced.parameters}
            self._copy(node, own)
        self.graph.output(tuple(self._value(node, {}) for node in self.outputs))
        code = self.graph.python_code("self")
        return GraphFunction(
            source=code.src,
            names=code.globals,
            constants=tuple(traced.constants[c] for c in constants),
            sites=tuple(Site(traced.parameters[used], analysis.sites[node, used]) for node, used in sites),
            buffers=tuple(traced.buffers[b] for b in buffers),
            columns=tuple(traced.columns[c] for c in columns),
            num_inputs=len(self.inputs),
            num_outputs=len(self.outputs),
            title=title,
            column_shapes=tuple(_static_shape(c) for c in columns),
        )

    def _leaves(self) -> set[fx.Node]:
        """Placeholders of the model that this stage reads, through rebuilt values too."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = [used for node in self.body for used in node.all_input_nodes] + self.outputs
        direct = set(stack)
        while stack:
            node = stack.pop()
            if node in seen or node in self.inputs:
                continue
            seen.add(node)
            if node.op == "placeholder":
                found.add(node)
            elif node in self.analysis.rebuildable:
                if node.target is SYM_SIZE:
                    continue
                stack += node.all_input_nodes
        sizes = [node for node in seen | direct if node.target is SYM_SIZE and node in self.analysis.rebuildable]
        for node in sizes:
            if not any(dim_with(source, node.meta["val"]) is not None for source in [*self.inputs, *found]):
                column, _ = column_with(self.traced, node.meta["val"])  # type: ignore[misc]
                found.add(column)
        return found

    def _copy(self, node: fx.Node, own: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._value(n, own))
        self.env[node] = copy = self.graph.create_node("call_function", node.target, args, kwargs, node.name)
        return copy

    def _value(self, node: fx.Node, own: dict[fx.Node, fx.Node]) -> fx.Node:
        if node in own:
            return own[node]
        if node in self.env:
            return self.env[node]
        if node.target is SYM_SIZE and node in self.analysis.rebuildable:
            self.env[node] = size = self._size(node)
            return size
        if node in self.analysis.rebuildable:
            return self._copy(node, {})
        raise CaptureError(f"{node.name} is read in a stage that does not have it; please report this model.")

    def _size(self, node: fx.Node) -> fx.Node:
        """A symbolic size, read off any tensor of this stage that has it."""
        for source in (*self.inputs, *self.traced.columns):
            dim = dim_with(source, node.meta["val"])
            if dim is not None and source in self.env:
                return self.graph.call_function(torch.ops.aten.sym_size.int, (self.env[source], dim))
        raise CaptureError(f"No tensor of the stage has the size {node.meta['val']}; please report this model.")


def _static_shape(column: fx.Node) -> tuple[int | None, ...]:
    """Of a data column, None for sizes that may change."""
    sizes = column.meta["val"].shape
    return tuple(None if isinstance(s, torch.SymInt) and s.node.expr.free_symbols else int(s) for s in sizes)
