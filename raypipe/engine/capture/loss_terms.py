"""What the terms of a traced loss average over, as a program that counts it from the data columns.

    loss = cross_entropy(logits, shifted labels) + 0.1 * mse(...)
             |                                            |
             counts labels other than -100                counts samples

From the loss the graph is followed back through sums and constant factors to the terms. The way from the data to a
term's labels (a shift, a view, padding) depends on nothing but the data, so it is cut out and runs by itself.

Where terms average over different items no single weight of the sum is right. ``return_parts`` makes the model return
such terms one by one, so that each can have its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from raypipe.engine.capture.traced import Traced
from raypipe.engine.loss_counts import Bound, LossCounts, count_labels
from raypipe.engine.randomness import bind_arguments
from raypipe.engine.region import names_of
from raypipe.engine.stage import GraphFunction

__all__ = ["LossTerms", "loss_terms", "return_parts"]

aten = torch.ops.aten

_LABELS = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss2d", "aten::nll_loss_nd")
_SAME_VALUE = (
    "aten::to", "aten::_to_copy", "aten::alias", "aten::clone", "aten::contiguous", "aten::squeeze", "aten::view",
    "aten::reshape", "aten::neg", "aten::detach",
)  # fmt: skip
_BENT = (
    "aten::abs", "aten::clamp", "aten::clamp_min", "aten::clamp_max", "aten::relu", "aten::leaky_relu",
    "aten::hardtanh", "aten::maximum", "aten::minimum", "aten::max", "aten::min", "aten::threshold",
)  # fmt: skip
_MEAN, _SUM = 1, 2
"""torch's numbers of reductions; 0 is none."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a loss averages over, as far as its graph tells.

    Attributes:
        counts: where a term averages over something that the data decides; None where all average over samples.
        sums: every term adds up instead.
        parts: summands of the loss, each of which averages over one thing only, with the number of its count; empty
            where one weight is right for all or the loss cannot be parted like this.
        bent: name of an operation that bends the average of a term, as flooding does with abs; "" of none. Until
            training reaches the bend, losses of micro-batches add up all the same, so that no trial shows it.
    """

    counts: LossCounts | None
    sums: bool
    parts: tuple[tuple[fx.Node, int], ...] = ()
    bent: str = ""

    def summed(self) -> LossTerms:
        """The same of a model that returns the sum."""
        assert self.counts is not None
        return replace(self, counts=replace(self.counts, parts=()), parts=())


@dataclass(frozen=True, slots=True)
class _Count:
    """One way of counting: a node that is the number, or labels with their ignore_index and class weights.

    Attributes:
        bounds: what the loss makes of the number before it divides by it.
    """

    node: fx.Node
    ignore_index: int | None = None
    class_weights: fx.Node | None = None
    bounds: tuple[Bound, ...] = ()


_SAMPLES, _ADDED_UP = "samples", "added up"


def loss_terms(traced: Traced, data: Set[fx.Node], tensors: Mapping[str, torch.Tensor]) -> LossTerms:
    """Analyse the graph of a loss, or of a model that returns its loss.

    Args:
        data: placeholders that are data columns; the others may be outputs of a model.
        tensors: the model's parameters and buffers by name, for class weights.
    """
    output = next(node for node in traced.graph.nodes if node.op == "output")
    loss: Any = output.args[0]
    reach = _Reach(traced, data)
    terms = list(_addends(loss[0], reach))
    bent = next((_name(term).removeprefix("aten::").rstrip("_") for term in terms if _bends(term, reach)), "")
    # A loss on labels that is part of the sum in some other way (stacked, in a maximum) counts labels all the same.
    below = _needed([loss[0]])
    others = [node for node in traced.graph.nodes if node in below and _name(node) in _LABELS]
    hidden = [kind for node in others if isinstance(kind := _kind(node, reach), _Count)]
    found = dict.fromkeys((*(_kind(node, reach) for node in terms), *hidden))
    counts = [kind for kind in found if isinstance(kind, _Count)]
    if not counts:
        return LossTerms(None, set(found) == {_ADDED_UP}, bent=bent)
    several = len(counts) + (_SAMPLES in found) > 1 and _ADDED_UP not in found
    parts = tuple(_parts(loss[0], counts, reach)) if several else ()
    samples_too = _SAMPLES in found or any(count == len(counts) for _, count in parts)
    words = " and ".join(dict.fromkeys((*map(_words, counts), *(["samples"] if samples_too else []))))
    program = _program(traced, counts, tensors)
    bounds = tuple(count.bounds for count in counts)
    return LossTerms(
        LossCounts(program, samples_too, words, tuple(count for _, count in parts), bounds),
        sums=False,
        parts=parts,
        bent=bent,
    )


def return_parts(traced: Traced, terms: LossTerms) -> None:
    """Let a model that returns its loss return the parts of it instead, and behind them what metrics read."""
    output = next(node for node in traced.graph.nodes if node.op == "output")
    returned: Any = output.args[0]
    output.args = ((*(node for node, _ in terms.parts), *returned[1:]),)


def _parts(loss: fx.Node, counts: list[_Count], reach: _Reach) -> list[tuple[fx.Node, int]]:
    """The summands and their counts; none where a summand averages over several things, or over nothing known."""
    found: list[tuple[fx.Node, int]] = []
    stack = [loss]
    while stack:
        node = stack.pop()
        summands = node.args[:2] if _name(node) == "aten::add" and not node.kwargs else ()
        if summands and all(isinstance(part, fx.Node) for part in summands):
            stack += reversed(summands)  # type: ignore[arg-type]
            continue
        kinds = {_kind(term, reach) for term in _addends(node, reach)}
        labels = {_kind(other, reach) for other in _needed([node]) if _name(other) in _LABELS}
        inner = (kinds | {kind for kind in labels if isinstance(kind, _Count)}) or {_SAMPLES}
        if len(inner) > 1:
            return []
        (kind,) = inner
        found.append((node, counts.index(kind) if isinstance(kind, _Count) else len(counts)))
    return found


class _Reach:
    """What nodes depend on.

    Attributes:
        of_data: those that follow from data columns, and from nothing that training changes.
        fixed: those that are the same for every micro-batch.
    """

    def __init__(self, traced: Traced, data: Set[fx.Node]) -> None:
        self.of_data = set(data)
        self.fixed = {*traced.constants, *traced.buffers, *traced.parameters}
        countable = {*data, *traced.constants, *traced.buffers}
        for node in traced.graph.nodes:
            inputs = node.all_input_nodes
            if node.op != "call_function" or traced.key in inputs:
                continue
            if all(used in self.fixed for used in inputs):
                self.fixed.add(node)
            if all(used in countable for used in inputs):
                countable.add(node)
                if any(used in self.of_data for used in inputs):
                    self.of_data.add(node)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _addends(loss: fx.Node, reach: _Reach) -> Iterator[fx.Node]:
    """The terms that a loss is the sum of, without constant factors."""
    stack = [loss]
    while stack:
        node = stack.pop()
        name, args = _name(node), node.args
        parts = [argument for argument in args[:2] if isinstance(argument, fx.Node)]
        if name in ("aten::add", "aten::sub", "aten::add_", "aten::sub_"):
            stack += parts
        elif name in _SAME_VALUE:
            stack += parts[:1]
        elif name in ("aten::mul", "aten::div", "aten::mul_", "aten::div_") and _scales(node, reach):
            varying = [part for part in parts if part not in reach.fixed]
            stack += varying[:1]
        elif node not in reach.fixed:
            yield node


def _scales(node: fx.Node, reach: _Reach) -> bool:
    """Whether a product or quotient only multiplies one value by something that is the same for every micro-batch."""
    first, second = node.args[:2]
    if not isinstance(second, fx.Node):
        return True
    if second in reach.fixed:
        return True
    return "mul" in _name(node) and (not isinstance(first, fx.Node) or first in reach.fixed)


def _bends(term: fx.Node, reach: _Reach) -> bool:
    """Whether a term is straight in an average but for a bend somewhere."""
    inputs = [node for node in term.all_input_nodes if node not in reach.fixed and node not in reach.of_data]
    return _name(term).rstrip("_") in _BENT and any(_is_number(node) for node in inputs)


def _kind(node: fx.Node, reach: _Reach) -> _Count | str:
    """What one term averages over."""
    name = _name(node)
    if name in _LABELS:
        given = bind_arguments(node.target, node.args, node.kwargs)
        labels, reduction = given["target"], given["reduction"]
        if reduction == _SUM:
            return _ADDED_UP
        weights = given["weight"]
        known = labels in reach.of_data and (weights is None or weights in reach.fixed)
        if reduction != _MEAN or labels.meta["val"].is_floating_point() or not known:
            return _SAMPLES
        return _Count(labels, given["ignore_index"], weights)
    if name in ("aten::div", "aten::div_"):
        divisor = node.args[1]
        if isinstance(divisor, fx.Node) and divisor in reach.of_data and _is_number(divisor):
            number, bounds = _unbounded(divisor)
            return _Count(number, bounds=bounds)
        return _SAMPLES
    if "reduction" in (given := _arguments(node)):
        return _ADDED_UP if given["reduction"] == _SUM else _SAMPLES
    return _ADDED_UP if name in ("aten::sum", "aten::dot") else _SAMPLES


def _arguments(node: fx.Node) -> dict[str, Any]:
    return bind_arguments(node.target, node.args, node.kwargs) if hasattr(node.target, "_schema") else {}


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _unbounded(divisor: fx.Node) -> tuple[fx.Node, tuple[Bound, ...]]:
    """The number before it was kept above zero, as by clamp(min=1) or + 1e-8, and what did that."""
    name, first = _name(divisor), divisor.args[0] if divisor.args else None
    if not isinstance(first, fx.Node):
        return divisor, ()
    given = _arguments(divisor)
    bound: Bound | None = None
    if name in ("aten::clamp", "aten::clamp_min"):
        least, most = given.get("min"), given.get("max")
        if not isinstance(least, fx.Node) and not isinstance(most, fx.Node):
            bound = Bound(-math.inf if least is None else float(least), math.inf if most is None else float(most))
    elif name == "aten::add" and isinstance(added := given.get("other"), int | float) and given.get("alpha", 1) == 1:
        bound = Bound(added=float(added))
    elif name in ("aten::to", "aten::_to_copy") and _is_number(first):
        number, bounds = _unbounded(first)
        return (number, bounds) if bounds else (divisor, ())
    if bound is None:
        return divisor, ()
    number, bounds = _unbounded(first)
    return number, (*bounds, bound)


def _words(count: _Count) -> str:
    if count.ignore_index is None:
        return f"the number that it divides by ({count.node.name})"
    weighed = ", by their classes' weights" if count.class_weights is not None else ""
    return f"labels other than {count.ignore_index}{weighed}"


def _program(traced: Traced, counts: list[_Count], tensors: Mapping[str, torch.Tensor]) -> GraphFunction:
    """From data columns to the number of each count."""
    graph = fx.Graph()
    wanted = _needed([node for count in counts for node in (count.node, count.class_weights) if node is not None])
    columns = [node for node in traced.columns if node in wanted]
    constants = [node for node in (*traced.constants, *traced.buffers, *traced.parameters) if node in wanted]
    env = {node: graph.placeholder(node.name) for node in (*constants, *columns)}
    graph.placeholder("key")
    copy: Callable[[fx.Node], fx.Node] = env.__getitem__
    for node in traced.graph.nodes:
        if node.op == "call_function" and node in wanted:
            env[node] = graph.node_copy(node, copy)
    numbers = []
    for count in counts:
        number = env[count.node]
        if count.ignore_index is not None:
            weights = None if count.class_weights is None else env[count.class_weights]
            number = graph.call_function(count_labels, (number, count.ignore_index, weights))
        numbers.append(number)
    graph.output(tuple(numbers))
    code = graph.python_code("self")
    return GraphFunction(
        source=code.src,
        names=names_of(code),
        constants=tuple(_tensor(node, traced, tensors) for node in constants),
        sites=(),
        buffers=(),
        columns=tuple(traced.columns[node] for node in columns),
        num_inputs=0,
        num_outputs=len(counts),
        title="count of the loss",
    )


def _tensor(node: fx.Node, traced: Traced, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if node in traced.constants:
        return traced.constants[node]
    return tensors[traced.buffers.get(node) or traced.parameters[node]].detach().clone()


def _needed(targets: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found
