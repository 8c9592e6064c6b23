"""Tail of a model that returns its own loss: the operations from the first that mixes samples of a batch to the loss.

    image --tower--> x --+
                         +--> x @ y.T --cross_entropy--> loss
    text  --tower--> y --+
    '-- each sample alone --'  '--------- tail ---------'

The model without its tail computes the same for a mini-batch as for its micro-batches one after the other. The tail can
therefore be computed once, over the joined inputs of all micro-batches (``engine.stage.minibatch_loss``).

A value mixes samples if it is neither computed without data, as a temperature, nor for all rows what it is for the
parts of these rows, joined. All operations run side by side on some rows and on both halves of them, to compare:

    reads a value that mixes samples   mixes them too, whatever the numbers are: a mask of what exceeds a capacity has
                                       the same numbers as long as few rows exceed none
    puts items back by an index        mixes samples if the numbers differ: experts compute on gathered tokens, and each
                                       token gets its own result back
    has no dimension of samples        mixes samples if it is computed from data: shares of classes may be equal
    any other operation                mixes samples if the numbers differ
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from raypipe.capture.analyse import UNCAST, Analysis, Traced, is_open, line_of, mutated_args, storage_roots
from raypipe.capture.cut import stage_function
from raypipe.capture.flatten import as_output
from raypipe.capture.source_lines import Lines
from raypipe.engine.stage.minibatch_loss import held_by
from raypipe.engine.stage.mixed_precision import computing, converted, uncast
from raypipe.engine.stage.randomness import bind_arguments, draws_randomness, dropout, keyed_call
from raypipe.engine.stage.stage import GraphFunction
from raypipe.errors import CaptureError
from raypipe.ir.precision import Precision

aten = torch.ops.aten

Tensors = Mapping[str, torch.Tensor]
Columns = Mapping[Any, torch.Tensor]

_BY_INDEX = (
    "aten::index", "aten::index_select", "aten::gather", "aten::take_along_dim", "aten::index_add", "aten::index_copy",
    "aten::index_put", "aten::_index_put_impl", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce",
)  # fmt: skip
_OF_SHAPES = (
    "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_empty", "aten::new_zeros",
    "aten::new_ones", "aten::new_full", "aten::sym_size",
)  # fmt: skip
"""Operations that read no values of their tensors."""
_RELATIVE = 1e-4
"""Difference, as a fraction of the largest value, that is rounding in fp32; in coarser types eight times their eps."""
_LARGEST_SHARE = 0.5
"""Largest part of the model's numbers that a tail may read: the last stage holds them, and no cut divides them."""


class Halves(NamedTuple):
    """A model in one mode, divided in front of its tail.

    Attributes:
        body: the model without its tail. It returns the tail's inputs, then the parameters and buffers that the tail
            reads (``held_by``), then the outputs that metrics read.
        tail: function from the inputs of the tail to the terms of the loss.
    """

    body: Traced
    tail: GraphFunction


def divide(
    analysis: Analysis, lines: Lines, tensors: Tensors, rows: Columns, precision: Precision, num_kept: int
) -> Halves:
    """Divide a model that returns its own loss in front of the operations that mix samples. The graph is not changed.

    Args:
        lines: the graph of ``analysis`` as plain data.
        tensors: parameters and buffers by name, with values.
        rows: columns by name; both halves of these rows are compared with all rows.
        num_kept: number of the last outputs, which metrics read; all outputs before them are terms of the loss.

    Raises:
        CaptureError: the model cannot be divided; the message is the reason, a clause.
    """
    mixed = _mixing(analysis, tensors, rows, precision)
    count = len(analysis.outputs) - num_kept
    terms, kept = analysis.outputs[:count], analysis.outputs[count:]
    operations, inputs = _tail(analysis, terms, mixed)
    _refuse(analysis, operations, inputs, tensors)
    if any(node in mixed for node in kept):
        raise CaptureError("a metric reads an output that several samples of a batch share")
    numbers = {value.name: number for number, value in enumerate(lines.values)}
    of = lambda nodes: [numbers[node.name] for node in nodes]  # noqa: E731
    tail = stage_function(lines, of(operations), of(inputs), of(terms), "loss over the mini-batch")
    tail.precision, tail.sizes = precision, None  # of a whole mini-batch; the first stage has checked its parts
    return Halves(_body(analysis, operations, inputs, held_by(tail), kept), tail)


def _mixing(analysis: Analysis, tensors: Tensors, rows: Columns, precision: Precision) -> set[fx.Node]:
    """Return the nodes whose values mix samples, and those that no stage could send, such as tuples of them."""
    traced, half = analysis.traced, len(next(iter(rows.values()))) // 2
    parts = [rows, *({name: x[cut] for name, x in rows.items()} for cut in (slice(half), slice(half, None)))]
    live = {*analysis.nodes, *analysis.rebuildable}
    nodes = [node for node in traced.graph.nodes if node in live]
    last = {used: node for node in nodes for used in node.all_input_nodes}
    roots, mixed = storage_roots(traced.graph), set[fx.Node]()
    of_data = {*traced.columns, traced.key}  # draws of micro-batches differ, as data do
    with torch.no_grad(), computing(precision):
        runs = [_placeholders(traced, tensors, part, precision) for part in parts]
        for node in nodes:
            for known in runs:
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = _computed(node, args, kwargs)
            inputs = node.all_input_nodes
            if _name(node) not in _OF_SHAPES and not of_data.isdisjoint(inputs):
                of_data.add(node)
            reads = any(used in mixed and used not in analysis.rebuildable for used in inputs)
            if _mixes(node, [known[node] for known in runs], reads=reads, of_data=node in of_data):
                mixed.add(node)
                changed = {roots[one] for one in mutated_args(node)}
                mixed |= {one for one, root in roots.items() if root in changed}
            for used in inputs:
                if last[used] is node:
                    for known in runs:
                        del known[used]
    return mixed


def _placeholders(traced: Traced, tensors: Tensors, columns: Columns, precision: Precision) -> dict[fx.Node, Any]:
    """Return the value of every placeholder for some rows; those that operations may change are copies."""
    held = {node: tensors[name] for node, name in traced.parameters.items()}
    read = {node: columns[name].clone() for node, name in traced.columns.items()}
    read |= {node: tensors[name].clone() for node, name in traced.buffers.items()}
    wide = {**held, **read}
    return {**dict(zip(wide, converted(list(wide.values()), precision), strict=True)), **traced.constants} | {
        traced.key: None
    }


def _computed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation without dropout, with one value in place of random numbers, and norms as in evaluation.

    Random numbers and statistics of batch norms are those of a micro-batch in any pipeline.
    """
    target: Any = node.target
    if target is dropout:
        return args[0]
    if target is keyed_call:
        op, _, _, *rest = args
        bound = bind_arguments(op, rest, {name: value for name, value in kwargs.items() if name != "draws"})
        bound |= {name: 0.0 for name in ("dropout_p", "p", "dropout") if name in bound}
        drawn = op(**bound)
        return drawn.fill_(0.5) if draws_randomness(op, (), bound) else drawn
    if target is aten.batch_norm.default and args[3] is not None:
        args = (*args[:5], False, *args[6:])
    if target is torch.ops.raypipe.cumulative_batch_norm.default:
        x, mean, variance, _, weight, bias, eps = args
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
    kind = node.meta.get(UNCAST)
    if kind and getattr(target, "__module__", "") != "_operator":
        return uncast(kind, target, *args, **kwargs)
    return target(*args, **kwargs)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if hasattr(node.target, "_schema") else ""


def _mixes(node: fx.Node, values: Sequence[Any], *, reads: bool, of_data: bool) -> bool:
    """Return True if a node's value mixes samples.

    Args:
        values: value for all rows, for their first half and for their second half.
        reads: True if an input of the node mixes samples.
        of_data: True if the value is computed from data or random numbers.
    """
    if is_open(node.meta.get("val")):
        return True
    if reads and node.target is not operator.getitem and _name(node).rstrip("_") not in _BY_INDEX:
        return True
    if isinstance(values[0], tuple | list):
        return any(not _joins(*items, of_data=of_data) for items in zip(*values, strict=False))
    return not _joins(*values, of_data=of_data)


def _joins(whole: Any, first: Any, second: Any, *, of_data: bool) -> bool:
    """Return True if a value for all rows is that of both halves joined, or the same for any rows."""
    if not isinstance(whole, torch.Tensor):
        return not of_data and bool(whole == first == second)
    if not whole.dim() == first.dim() == second.dim():
        return False
    changed = [dim for dim, size in enumerate(whole.shape) if (size, size) != (first.shape[dim], second.shape[dim])]
    if len(changed) > 1:
        return False
    if not changed:
        return not of_data and _close(whole, first) and _close(whole, second)
    joined_size = first.shape[changed[0]] + second.shape[changed[0]]
    return whole.shape[changed[0]] == joined_size and _close(whole, torch.cat([first, second], changed[0]))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = one[one.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    relative = max(_RELATIVE, 8 * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=relative, atol=relative * largest, equal_nan=True)


def _tail(
    analysis: Analysis, terms: Sequence[fx.Node], mixed: set[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Return (operations of the tail, its inputs), both in execution order.

    The tail begins as late as possible: everything between its inputs and the loss mixes samples.
    """
    roots, members = storage_roots(analysis.traced.graph), dict[fx.Node, list[fx.Node]]()
    for node in analysis.nodes:
        for changed in mutated_args(node):
            members.setdefault(roots[changed], []).append(node)
    tail, inputs, stack = set[fx.Node](), set[fx.Node](), list(terms)
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or node in analysis.rebuildable or node in tail:
            continue
        if node not in mixed:
            inputs.add(node)
            continue
        tail.add(node)
        stack += [*node.all_input_nodes, *members.get(roots[node], ())]
    return tuple(n for n in analysis.nodes if n in tail), tuple(n for n in analysis.nodes if n in inputs)


def _refuse(analysis: Analysis, tail: Sequence[fx.Node], inputs: Sequence[fx.Node], tensors: Tensors) -> None:
    """Raise CaptureError, with a clause as its message, if the last stage cannot compute the tail."""
    traced, roots = analysis.traced, storage_roots(analysis.traced.graph)
    read = {used: node for node in reversed(tail) for used in node.all_input_nodes}
    if traced.key in read:
        raise CaptureError(
            f"it draws random numbers{line_of(read[traced.key])} from values that mix samples of a batch"
        )
    for node in (*read, *inputs):
        if roots[node] in analysis.changing_buffers:
            name = traced.buffers[roots[node]]
            raise CaptureError(f"operations that mix samples of a batch use the buffer {name!r}, which forward changes")
    behind = next((n for n in analysis.nodes if n not in tail and not set(tail).isdisjoint(n.all_input_nodes)), None)
    if behind is not None:  # a change of a buffer
        raise CaptureError(f"values that mix samples of a batch are read{line_of(behind)} by more than the loss")
    largest = _LARGEST_SHARE * sum(tensors[name].numel() for name in traced.parameters.values())
    if sum(tensors[traced.parameters[node]].numel() for node in read if node in traced.parameters) > largest:
        raise CaptureError(
            f"samples of a batch are mixed before most of the parameters, by {tail[0].name!r}{line_of(tail[0])}"
        )


def _body(
    analysis: Analysis, tail: Sequence[fx.Node], inputs: Sequence[fx.Node], held: Sequence[str], kept: Sequence[fx.Node]
) -> Traced:
    """Copy the graph without its tail; for what it returns see ``Halves``."""
    traced, graph, copies = analysis.traced, fx.Graph(), dict[fx.Node, fx.Node]()
    live = {*analysis.nodes, *analysis.rebuildable}
    for node in traced.graph.nodes:
        if node.op == "placeholder" or (node in live and node not in tail):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    body = replace(
        traced,
        graph=graph,
        parameters={copies[node]: name for node, name in traced.parameters.items()},
        buffers={copies[node]: name for node, name in traced.buffers.items()},
        constants={copies[node]: tensor for node, tensor in traced.constants.items()},
        columns={copies[node]: name for node, name in traced.columns.items()},
        key=copies[traced.key],
        pinned=[(copies[root], copies[last]) for root, last in traced.pinned if root in copies and last in copies],
    )
    named = {name: node for node, name in (*body.buffers.items(), *body.parameters.items())}
    outputs = [*(copies[node] for node in inputs), *(named[name] for name in held), *(copies[node] for node in kept)]
    graph.output(tuple(as_output(graph, node, body) for node in outputs))
    return body
