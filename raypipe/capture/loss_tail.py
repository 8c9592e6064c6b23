"""Tail of a model that returns its own loss: the operations from the first that mixes samples of a batch to the loss.

    image --tower--> x --+
                         +--> x @ y.T --cross_entropy--> loss
    text  --tower--> y --+
    '-- each sample alone --'  '--------- tail ---------'

The model without its tail computes the same for a mini-batch as for its micro-batches one after the other. The tail can
therefore be computed once, over the joined inputs of all micro-batches (``engine.stage.minibatch_loss``).

A value mixes samples if it is neither computed without data, as a temperature, nor for all rows what it is for the
parts of these rows, joined; views of all samples, one after the other, are joined view by view. All operations run side
by side, in fp32, on some rows and on both halves of them, to compare; and once more on made-up rows, since labels or
masks of the real ones may be equal.

    reads a value that mixes samples   mixes them too, whatever the numbers are: a mask of what exceeds a capacity has
                                       the same numbers as long as few rows exceed none
    has no dimension of samples        mixes samples if it is computed from data: shares of classes may be equal
    goes along the samples             mixes them, as roll, sort, cumsum, and reading or writing by an index
    draws random numbers               mixes samples if the draws are whole numbers, as of a permutation
    any other operation                mixes samples if the numbers differ
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from raypipe.capture.analyse import Analysis, Traced, is_open, line_of, mutated_args, storage_roots
from raypipe.capture.cut import stage_function
from raypipe.capture.flatten import as_output
from raypipe.capture.source_lines import Lines
from raypipe.engine.stage.minibatch_loss import held_by, join_blocks
from raypipe.engine.stage.randomness import bind_arguments, draws_randomness, dropout, keyed_call
from raypipe.engine.stage.stage import GraphFunction
from raypipe.errors import CaptureError
from raypipe.ir.precision import Precision

aten = torch.ops.aten

Tensors = Mapping[str, torch.Tensor]
Columns = Mapping[Any, torch.Tensor]

_ALONG = (
    "roll", "flip", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "sort", "argsort", "msort", "topk",
    "kthvalue", "unique_consecutive", "unique_dim", "_unique2", "index_select", "gather", "take", "take_along_dim",
    "embedding", "masked_scatter", "index_add", "index_copy", "index_fill", "index_reduce", "put", "scatter",
    "scatter_add", "scatter_reduce",
)  # fmt: skip
"""Operations of aten on the samples of their first tensor together: along ``dim``, or all dimensions without it."""
_AT_INDICES = ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put")
"""Operations with one index tensor, or None, for each dimension."""
_OF_SHAPES = (
    "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_empty", "aten::new_zeros",
    "aten::new_ones", "aten::new_full", "aten::sym_size",
)  # fmt: skip
"""Operations that read no values of their tensors."""
_UNSET = ("aten::empty", "aten::empty_like", "aten::new_empty")
_REPEATING = ("aten::cat", "aten::repeat")
"""Operations that place blocks of all samples one after the other."""
_ONE, _MIXED = frozenset({1}), frozenset[int]()
_RELATIVE = 1e-4
"""Difference, as a fraction of a value or of the median magnitude, that is rounding in fp32."""
_LOWER = (torch.float16, torch.bfloat16)
_LARGEST_SHARE = 0.5
"""Largest part of the model's numbers that a tail may read: the last stage holds them, and no cut divides them."""


class Halves(NamedTuple):
    """A model in one mode, divided in front of its tail.

    Attributes:
        body: the model without its tail. It returns the tail's inputs, then the parameters and buffers that the tail
            reads (``held_by``), then the outputs that metrics read.
        tail: function from the inputs of the tail to the terms of the loss.
        blocks: for each input of the tail, how it is joined (``join_blocks``).
    """

    body: Traced
    tail: GraphFunction
    blocks: tuple[int, ...]


def divide(
    analysis: Analysis, lines: Lines, tensors: Tensors, rows: Columns, precision: Precision, num_kept: int
) -> Halves:
    """Divide a model that returns its own loss in front of the operations that mix samples. The graph is not changed.

    Args:
        lines: the graph of ``analysis`` as plain data.
        tensors: parameters and buffers by name, with values.
        rows: columns by name; both halves of these rows are compared with all rows.
        precision: number format in which the tail computes.
        num_kept: number of the last outputs, which metrics read; all outputs before them are terms of the loss.

    Raises:
        CaptureError: the model cannot be divided; the message is a clause, to be put into another message.
    """
    blocks = _blocks(analysis, *(_ways(analysis, tensors, some) for some in (rows, _made_up(rows))))
    mixed = {node for node, number in blocks.items() if number == 0}
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
    joined = tuple(blocks.get(node, 1) for node in inputs)
    return Halves(_body(analysis, operations, inputs, held_by(tail), kept), tail, joined)


def _made_up(rows: Columns) -> Columns:
    """Make up rows from the values of each column, in random order; a column of one value gets a second one."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, x in rows.items():
        values = x.flatten()
        if x.dtype == torch.bool:
            values = torch.tensor([False, True])
        elif values.numel() and bool((values == values[0]).all()) and values[0] >= 0:
            values = torch.stack([values[0], values[0] - 1 if values[0] >= 1 else values[0] + 1])
        drawn = torch.randint(0, max(1, values.numel()), x.shape, generator=generator)
        made[name] = values[drawn] if x.dim() and x.numel() else x
    return made


def _blocks(analysis: Analysis, *ways: Mapping[fx.Node, frozenset[int]]) -> dict[fx.Node, int]:
    """Choose the number of blocks by which each value is joined (``join_blocks``); 0 for a value that mixes samples.

    If several numbers fit, it is the largest behind an operation that makes blocks, such as cat, else the smallest.

    Args:
        ways: results of ``_ways`` for several sets of rows.
    """
    found: dict[fx.Node, int] = {}
    for node in analysis.traced.graph.nodes:
        known = [some[node] for some in ways if node in some]
        fitting = frozenset.intersection(*known) if known else _ONE
        behind = _name(node) in _REPEATING or any(found[used] > 1 for used in node.all_input_nodes)
        found[node] = (max if behind else min)(fitting, default=0)
    return found


def _ways(analysis: Analysis, tensors: Tensors, rows: Columns) -> dict[fx.Node, frozenset[int]]:
    """Find the numbers of blocks with which ``join_blocks`` makes a node's value for all rows from those of its halves.

    The set is empty for a value that mixes samples, and for one that no stage could send, such as a tuple of these.
    """
    traced, count = analysis.traced, len(next(iter(rows.values())))
    half = count // 2
    parts = [rows, *({name: x[cut] for name, x in rows.items()} for cut in (slice(half), slice(half, None)))]
    live = {*analysis.nodes, *analysis.rebuildable}
    nodes = [node for node in traced.graph.nodes if node in live]
    last = {used: node for node in nodes for used in node.all_input_nodes}
    roots, mixed, ways = storage_roots(traced.graph), set[fx.Node](), dict[fx.Node, frozenset[int]]()
    of_data = {*traced.columns, traced.key}  # draws of micro-batches differ, as data do
    with torch.no_grad():
        runs = [_placeholders(traced, tensors, part) for part in parts]
        for node in nodes:
            calls = [fx.map_arg((node.args, node.kwargs), known.__getitem__) for known in runs]
            own = _positions(node, calls[0], of_data)
            crosses = _crosses(node, calls, own)
            for known, (args, kwargs) in zip(runs, calls, strict=True):
                known[node] = _computed(node, args, kwargs)
            inputs = node.all_input_nodes
            if _name(node) not in _OF_SHAPES and not of_data.isdisjoint(inputs):
                of_data.add(node)
            reads = any(used in mixed and used not in own and not _is_size(runs[0][used]) for used in inputs)
            ways[node] = _joins([known[node] for known in runs], count, of_data=node in of_data)
            if reads or crosses or is_open(node.meta.get("val")) or not ways[node]:
                mixed.add(node)
                changed = {roots[one] for one in mutated_args(node)}
                mixed |= {one for one, root in roots.items() if root in changed}
            for used in inputs:
                if last[used] is node:
                    for known in runs:
                        del known[used]
    return ways | dict.fromkeys(mixed, frozenset())


def _is_size(value: Any) -> bool:
    """Return True for a number, such as a size; if it differs between rows, the values that depend on it show that."""
    return not isinstance(value, torch.Tensor | tuple | list)


def _positions(node: fx.Node, call: Any, of_data: set[fx.Node]) -> set[fx.Node]:
    """Return the index tensors of an operation that select every sample in order, as arange(n) in x[arange(n), at].

    Args:
        call: (args, kwargs) of the operation for all rows.
        of_data: nodes that are computed from data or random numbers.
    """
    if _name(node).removeprefix("aten::").rstrip("_") not in _AT_INDICES:
        return set()
    x, indices = call[0][:2]
    pairs = zip(node.args[1], indices, x.shape, strict=False)  # type: ignore[arg-type]
    return {
        used
        for used, index, size in pairs
        if isinstance(used, fx.Node) and used not in of_data and torch.equal(index.flatten(), torch.arange(size))
    }


def _crosses(node: fx.Node, calls: Sequence[Any], own: set[fx.Node]) -> bool:
    """Return True if an operation may compute a sample's result from other samples, whatever its values are.

    Args:
        calls: (args, kwargs) of the operation for all rows, and for each half of them.
        own: index tensors that select every sample in order, see ``_positions``.
    """
    if _draws(node):
        return not node.meta["val"].is_floating_point()
    name = _name(node).removeprefix("aten::").rstrip("_")
    if name not in _ALONG and name not in _AT_INDICES:
        return False
    (whole, *_), (part, *_) = (args for args, _ in calls[:2])
    changed = {dim for dim, sizes in enumerate(zip(whole.shape, part.shape, strict=True)) if sizes[0] != sizes[1]}
    if name in _AT_INDICES:
        return any(
            used is not None and used not in own
            for dim, used in enumerate(node.args[1])  # type: ignore[arg-type]
            if dim in changed
        )
    bound = bind_arguments(node.target, *calls[0])
    dims = bound.get("dim", bound.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims or range(whole.dim())
    return any(dim % max(1, whole.dim()) in changed for dim in dims)


def _placeholders(traced: Traced, tensors: Tensors, columns: Columns) -> dict[fx.Node, Any]:
    """Return the value of every placeholder for some rows; those that operations may change are copies."""
    held = {node: tensors[name] for node, name in traced.parameters.items()}
    held |= {node: columns[name].clone() for node, name in traced.columns.items()}
    held |= {node: tensors[name].clone() for node, name in traced.buffers.items()}
    held |= {node: x.float() if x.dtype in _LOWER else x for node, x in traced.constants.items()}
    return {**held, traced.key: None}


def _computed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation for a trial: without dropout, constants as random numbers, and norms as in evaluation.

    Random numbers and batch statistics belong to a micro-batch in any pipeline, so they do not count as mixing samples.
    """
    target: Any = node.target
    args, kwargs = pytree.tree_map(_wider, (tuple(args), dict(kwargs)))
    if target is dropout:
        return args[0]
    if target is keyed_call:
        op, _, _, *rest = args
        bound = bind_arguments(op, rest, {name: value for name, value in kwargs.items() if name != "draws"})
        bound |= {name: 0.0 for name in ("dropout_p", "p", "dropout") if name in bound}
        drawn = op(**bound)
        return drawn.fill_(0.5) if _draws(node) else drawn
    if target is aten.batch_norm.default and args[3] is not None:
        args = (*args[:5], False, *args[6:])
    if target is torch.ops.raypipe.cumulative_batch_norm.default:
        x, mean, variance, _, weight, bias, eps = args
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
    result = target(*args, **kwargs)
    return result.zero_() if _name(node) in _UNSET else result


def _wider(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in _LOWER else argument


def _draws(node: fx.Node) -> bool:
    """Return True if a node draws random numbers; dropout does not count."""
    if node.target is not keyed_call:
        return False
    op, _, _, *rest = node.args
    bound = bind_arguments(op, rest, {name: value for name, value in node.kwargs.items() if name != "draws"})
    return draws_randomness(op, (), bound | {name: 0.0 for name in ("dropout_p", "p", "dropout") if name in bound})


def _name(node: fx.Node) -> str:
    return node.target._schema.name if hasattr(node.target, "_schema") else ""


def _joins(values: Sequence[Any], rows: int, *, of_data: bool) -> frozenset[int]:
    """Return the numbers of blocks with which ``join_blocks`` makes the first of ``values`` from the other two.

    Args:
        values: value for all rows, for their first half and for their second half.
        rows: number of all rows.
        of_data: True if the value is computed from data or random numbers.
    """
    whole, first, second = values
    if isinstance(whole, tuple | list):
        return _ONE if all(_joins(items, rows, of_data=of_data) for items in zip(*values, strict=False)) else _MIXED
    if not isinstance(whole, torch.Tensor):
        return _ONE if not of_data and bool(whole == first == second) else _MIXED
    if not whole.dim() == first.dim() == second.dim():
        return _MIXED
    changed = [dim for dim, size in enumerate(whole.shape) if (size, size) != (first.shape[dim], second.shape[dim])]
    if not changed:
        return _ONE if not of_data and _close(whole, first) and _close(whole, second) else _MIXED
    dim, size = changed[0], whole.shape[changed[0]]
    if len(changed) > 1 or size != first.shape[dim] + second.shape[dim]:
        return _MIXED
    known = {1} if size % rows else {1, size // rows}
    known = {number for number in known if first.shape[dim] % number == 0 == second.shape[dim] % number}
    return frozenset(number for number in known if _close(whole, join_blocks([first, second], dim, number)))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    sizes = one[one.isfinite() & (one != 0)].abs()
    typical = float(sizes.median()) if sizes.numel() else 0.0  # not the largest: that is the fill of a mask
    return torch.allclose(one, other, rtol=_RELATIVE, atol=_RELATIVE * typical, equal_nan=True)


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
    """Raise CaptureError if the last stage cannot compute the tail; the message is a clause."""
    traced, roots = analysis.traced, storage_roots(analysis.traced.graph)
    read = {used: node for node in reversed(tail) for used in node.all_input_nodes}
    if traced.key in read:
        raise CaptureError(
            f"it draws random numbers{line_of(read[traced.key])} from values that mix samples of a batch"
        )
    drawn = next((node for node in inputs if _draws(node)), None)
    if drawn is not None:
        raise CaptureError(f"operations that mix samples of a batch read random numbers drawn{line_of(drawn)}")
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
    """Copy the graph without its tail; it returns the outputs of ``Halves.body``."""
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
