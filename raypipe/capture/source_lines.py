"""Plain data of a traced model in one mode: a line of source for each operation, which can be cut without fx.

    fx graph --lines_of--> Value, Value, Value, ...      add = torch.ops.aten.add.Tensor( # , # )
                                                         name  text                       ^   ^ reads: numbers of values

Symbolic sizes in shapes are expressions over the sizes of the data columns; equal expressions are equal sizes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from raypipe.capture.analyse import SYM_SIZE, UNCAST, Analysis
from raypipe.engine.stage.generated_source import names_of
from raypipe.engine.stage.mixed_precision import uncast
from raypipe.engine.stage.stage import ColumnSizes

Shape = tuple[int | str, ...]
"""Sizes by dimension; a size that depends on the data is an expression as text."""


class ValueKind(Enum):
    """Kind of a value, which decides how cutting the model into stages treats it."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COLUMN = "column"
    KEY = "key"
    OPERATION = "operation"
    """Belongs to exactly one stage."""
    REBUILT = "rebuilt"
    """Operation on constants, unchanging buffers and sizes only: computed in every stage that reads it."""
    SIZE = "size"
    """Symbolic size: read in every stage that needs it, from any tensor there with this size."""


@dataclass(frozen=True, slots=True)
class Value:
    """A placeholder or an operation of a traced model.

    Attributes:
        name: unique name in the model, used in the source of a stage.
        kind: decides how cutting treats the value.
        of: the user's name of a parameter, a buffer or a data column.
        text: source of the operation, split at each reference to another value.
        reads: indices in ``Lines.values`` of these other values, which belong between the parts of ``text``.
        shape: shape of a tensor; () for other values.
        size: expression of the symbolic size if ``kind`` is SIZE.
        sites: (index in ``Lines.values`` of a parameter that the operation reads, index of this use among all uses of
            the parameter).
    """

    name: str
    kind: ValueKind
    of: Any = None
    text: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    shape: Shape = ()
    size: str = ""
    sites: tuple[tuple[int, int], ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Indices in ``Lines.values`` of the values that the operation reads, each once, in order of first use."""
        return tuple(dict.fromkeys(self.reads))

    def dim_of(self, size: str) -> int | None:
        """Return the first dimension with this symbolic size; None if not found."""
        return self.shape.index(size) if size in self.shape else None


@dataclass(frozen=True, slots=True)
class Lines:
    """A traced model in one mode. The number of a value is its index in ``values``.

    Attributes:
        values: placeholders first, then operations in execution order.
        operations: numbers of the values of kind OPERATION, in the order of the ModelGraph's nodes.
        changing_buffers: numbers of the buffers that a forward updates.
        outputs: numbers of the model's outputs that are tensors.
        constants: number -> tensor that forward reads and that is neither a parameter nor a buffer.
        names: objects that the source of operations refers to by name, besides torch's own names.
        conditions: Python expressions over symbolic sizes of the columns; the operations are valid only if all hold.
        fixed: reason why the operations are valid only for the example's sizes, besides the number of samples; "" if
            they are valid for more.
    """

    values: tuple[Value, ...]
    operations: tuple[int, ...]
    changing_buffers: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, torch.Tensor]
    names: Mapping[str, Any]
    conditions: tuple[str, ...] = ()
    fixed: str = ""

    def of_kind(self, kind: ValueKind) -> list[int]:
        """List the indices in ``values`` of the values of this kind, ascending."""
        return [number for number, value in enumerate(self.values) if value.kind is kind]

    def held_names(self) -> dict[int, str]:
        """Map the indices in ``values`` of parameters and buffers to the user's names of them."""
        held = (ValueKind.PARAMETER, ValueKind.BUFFER)
        return {number: value.of for number, value in enumerate(self.values) if value.kind in held}

    @property
    def column_sizes(self) -> ColumnSizes:
        """Sizes of the columns for which the operations are valid."""
        columns = [self.values[number] for number in self.of_kind(ValueKind.COLUMN)]
        shapes = {c.of: tuple(int(size) if str(size).isdigit() else size for size in c.shape) for c in columns}
        return ColumnSizes(shapes, self.conditions, self.fixed)

    @property
    def checked_columns(self) -> set[int]:
        """Indices in ``values`` of the columns whose sizes have to meet conditions, or to be equal to one another."""
        columns = self.of_kind(ValueKind.COLUMN)
        symbols = {n: [size for size in self.values[n].shape if isinstance(size, str)] for n in columns}
        lengths = Counter(size for n in columns for size in {*self.values[n].shape[1:]} if isinstance(size, str))
        named = {word for condition in self.conditions for word in re.findall(r"\w+", condition)}
        first = {self.column_with(size) for sizes in symbols.values() for size in sizes if size in named}
        equal = {n for n in columns if any(lengths[size] > 1 for size in symbols[n])}
        return first | equal

    def column_with(self, size: str) -> int:
        """Return the index in ``values`` of the first data column with this symbolic size."""
        return next(number for number in self.of_kind(ValueKind.COLUMN) if size in self.values[number].shape)

    def users(self) -> dict[int, list[int]]:
        """Map each value that an operation reads to the operations that read it, as indices in ``values``."""
        users: dict[int, list[int]] = {}
        for number in self.operations:
            for used in self.values[number].inputs:
                users.setdefault(used, []).append(number)
        return users


def lines_of(analysis: Analysis) -> Lines:
    """Convert a traced model to plain data without references to fx."""
    traced = analysis.traced
    own = set(analysis.nodes)
    nodes = [n for n in traced.graph.nodes if n.op == "placeholder" or n in own or n in analysis.rebuildable]
    number = {node: i for i, node in enumerate(nodes)}
    texts, names = _texts(nodes, number)
    sites: dict[fx.Node, list[tuple[int, int]]] = {}
    for (node, used), index in analysis.sites.items():
        sites.setdefault(node, []).append((number[used], index))
    named = {**traced.parameters, **traced.buffers, **traced.columns}
    shapes: dict[Shape, Shape] = {}  # equal shapes become one object, which is pickled once
    values = []
    for node in nodes:
        kind, shape = _kind(node, analysis), _shape(node)
        text, reads = texts.get(node, ((), ())) if kind is not ValueKind.SIZE else ((), ())
        size = str(_size(node.meta["val"])) if kind is ValueKind.SIZE else ""
        uses = tuple(sites.get(node, ()))
        values.append(Value(node.name, kind, named.get(node), text, reads, shapes.setdefault(shape, shape), size, uses))
    return Lines(
        tuple(values),
        tuple(number[node] for node in analysis.nodes),
        tuple(sorted(number[node] for node in analysis.changing_buffers)),
        tuple(number[node] for node in analysis.outputs),
        {number[node]: tensor for node, tensor in traced.constants.items()},
        names,
        traced.conditions,
        traced.fixed,
    )


def _kind(node: fx.Node, analysis: Analysis) -> ValueKind:
    traced = analysis.traced
    if node.op == "placeholder":
        kinds = (
            (traced.parameters, ValueKind.PARAMETER),
            (traced.buffers, ValueKind.BUFFER),
            (traced.constants, ValueKind.CONSTANT),
        )
        return next(
            (k for held, k in kinds if node in held), ValueKind.COLUMN if node in traced.columns else ValueKind.KEY
        )
    if node not in analysis.rebuildable:
        return ValueKind.OPERATION
    return ValueKind.SIZE if node.target is SYM_SIZE else ValueKind.REBUILT


def _shape(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(map(_size, value.shape)) if isinstance(value, torch.Tensor) else ()


def _size(size: Any) -> int | str:
    return sys.intern(str(size.node.expr)) if isinstance(size, torch.SymInt) else int(size)


_MARK = re.compile(r"value(\d+)of")


def _texts(
    nodes: list[fx.Node], number: Mapping[fx.Node, int]
) -> tuple[dict[fx.Node, tuple[tuple[str, ...], tuple[int, ...]]], dict[str, Any]]:
    """Generate the Python source of every operation, split where it refers to other values.

    fx generates the source from a copy of the graph, in which each node's name contains the node's index in ``number``.

    Returns:
        ({node: (fragments of its source, numbers of the values to which it refers between these fragments)},
        {name: object} for the objects to which the source refers by name).
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        name = f"value{number[node]}of"
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        target = name if node.op == "placeholder" else node.target
        copies[node] = graph.create_node(node.op, target, args, kwargs, name)
    graph.output(())
    code = graph.python_code("self")
    names = names_of(code)
    texts = {}
    by_name = {f"value{i}of": node for node, i in number.items()}
    for line in code.src.splitlines():
        name, equals, right = line.strip().partition(" = ")
        if equals and name in by_name:
            source = re.sub(r";  (value\d+of = )+None$", "", right)
            kind = by_name[name].meta.get(UNCAST)
            if kind and getattr(by_name[name].target, "__module__", "") != "_operator":  # items, arithmetic on sizes
                function, _, arguments = source.partition("(")
                source = f"uncast({kind!r}, {function}, {arguments}"
                names["uncast"] = uncast
            parts = _MARK.split(source)
            texts[by_name[name]] = (tuple(map(sys.intern, parts[::2])), tuple(map(int, parts[1::2])))
    return texts, names
