"""A traced model in one mode as data: one line of source for each operation. It pickles, and can be cut without fx.

    fx graph --lines_of--> Value, Value, Value, ...      add = torch.ops.aten.add.Tensor( # , # )
                                                         name  text around what it reads  ^   ^ numbers of values

What a line says of a tensor is its shape, in which a symbolic size is an expression over the sizes of the data's
columns: wherever two shapes hold the same expression, the sizes are equal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from raypipe.engine.capture.analyse import SYM_SIZE, Analysis
from raypipe.engine.capture.traced import UNCAST
from raypipe.engine.precision import uncast
from raypipe.engine.region import names_of

__all__ = ["Kind", "Lines", "Shape", "Value", "lines_of"]

Shape = tuple[int | str, ...]
"""Sizes; a text where a size depends on the data."""


class Kind(Enum):
    """What a value is to whoever cuts the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COLUMN = "column"
    KEY = "key"
    OPERATION = "operation"
    """Belongs to exactly one stage."""
    REBUILT = "rebuilt"
    """Follows from constants, unchanging buffers and sizes: computed in every stage that reads it."""
    SIZE = "size"
    """Of a tensor, read off any that has it."""


@dataclass(frozen=True, slots=True)
class Value:
    """A placeholder or an operation of a traced model.

    Attributes:
        name: unique in the model; what the source of a stage calls it.
        kind: what cutting does with it.
        of: what the user calls a parameter, a buffer or a data column.
        text: source of the operation, parted where it reads another value.
        reads: numbers of the values between the parts of ``text``.
        shape: of a tensor; () of anything else.
        size: the expression that a SIZE stands for.
        sites: of an operation, numbers of the parameters that it reads and which use of each this is.
    """

    name: str
    kind: Kind
    of: Any = None
    text: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    shape: Shape = ()
    size: str = ""
    sites: tuple[tuple[int, int], ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """What it reads, each once, in the order in which it is read first."""
        return tuple(dict.fromkeys(self.reads))

    def dim_of(self, size: str) -> int | None:
        """The first dimension that has this size; None where none has."""
        return self.shape.index(size) if size in self.shape else None

    @property
    def static_shape(self) -> tuple[int | None, ...]:
        """None for sizes that depend on the data."""
        return tuple(size if isinstance(size, int) else int(size) if size.isdigit() else None for size in self.shape)


@dataclass(frozen=True, slots=True)
class Lines:
    """A traced model in one mode; values go by their numbers.

    Attributes:
        values: placeholders first, then operations in execution order.
        operations: those of kind OPERATION; positions in this list are those of the ModelGraph.
        changing_buffers: buffers that a forward updates.
        outputs: the model's outputs that are tensors.
        constants: tensors that the model closed over.
        names: what the source of operations refers to, besides torch's own names.
    """

    values: tuple[Value, ...]
    operations: tuple[int, ...]
    changing_buffers: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, torch.Tensor]
    names: Mapping[str, Any]

    def of_kind(self, kind: Kind) -> list[int]:
        """In their order."""
        return [number for number, value in enumerate(self.values) if value.kind is kind]

    def held_names(self) -> dict[int, str]:
        """Of parameters and buffers, by number."""
        held = (Kind.PARAMETER, Kind.BUFFER)
        return {number: value.of for number, value in enumerate(self.values) if value.kind in held}

    def column_with(self, size: str) -> int:
        """The first data column that has this size."""
        return next(number for number in self.of_kind(Kind.COLUMN) if size in self.values[number].shape)

    def users(self) -> dict[int, list[int]]:
        """By value, the operations that read it."""
        found: dict[int, list[int]] = {}
        for number in self.operations:
            for used in self.values[number].inputs:
                found.setdefault(used, []).append(number)
        return found


def lines_of(analysis: Analysis) -> Lines:
    """The data of a traced model, of which nothing refers to fx any more."""
    traced = analysis.traced
    own = set(analysis.nodes)
    nodes = [n for n in traced.graph.nodes if n.op == "placeholder" or n in own or n in analysis.rebuildable]
    number = {node: i for i, node in enumerate(nodes)}
    texts, names = _texts(nodes, number)
    sites: dict[fx.Node, list[tuple[int, int]]] = {}
    for (node, used), index in analysis.sites.items():
        sites.setdefault(node, []).append((number[used], index))
    named = {**traced.parameters, **traced.buffers, **traced.columns}
    shapes: dict[Shape, Shape] = {}  # one object for each, which is then pickled once
    values = []
    for node in nodes:
        kind, shape = _kind(node, analysis), _shape(node)
        text, reads = texts.get(node, ((), ())) if kind is not Kind.SIZE else ((), ())
        size = str(_size(node.meta["val"])) if kind is Kind.SIZE else ""
        uses = tuple(sites.get(node, ()))
        values.append(Value(node.name, kind, named.get(node), text, reads, shapes.setdefault(shape, shape), size, uses))
    return Lines(
        tuple(values),
        tuple(number[node] for node in analysis.nodes),
        tuple(sorted(number[node] for node in analysis.changing_buffers)),
        tuple(number[node] for node in analysis.outputs),
        {number[node]: tensor for node, tensor in traced.constants.items()},
        names,
    )


def _kind(node: fx.Node, analysis: Analysis) -> Kind:
    traced = analysis.traced
    if node.op == "placeholder":
        kinds = ((traced.parameters, Kind.PARAMETER), (traced.buffers, Kind.BUFFER), (traced.constants, Kind.CONSTANT))
        return next((k for held, k in kinds if node in held), Kind.COLUMN if node in traced.columns else Kind.KEY)
    if node not in analysis.rebuildable:
        return Kind.OPERATION
    return Kind.SIZE if node.target is SYM_SIZE else Kind.REBUILT


def _shape(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(map(_size, value.shape)) if isinstance(value, torch.Tensor) else ()


def _size(size: Any) -> int | str:
    return sys.intern(str(size.node.expr)) if isinstance(size, torch.SymInt) else int(size)


_MARK = re.compile(r"value(\d+)of")


def _texts(
    nodes: list[fx.Node], number: Mapping[fx.Node, int]
) -> tuple[dict[fx.Node, tuple[tuple[str, ...], tuple[int, ...]]], dict[str, Any]]:
    """Of each operation, the source around what it reads, and the numbers of that; and the names that sources use.

    fx writes it: of a copy of the graph in which every node's name is its number.
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
    found = {}
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
            found[by_name[name]] = (tuple(map(sys.intern, parts[::2])), tuple(map(int, parts[1::2])))
    return found, names
