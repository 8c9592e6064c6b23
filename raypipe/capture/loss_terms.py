"""Divisors of the terms of a traced loss, as a function that computes them from the data columns.

    loss = cross_entropy(logits, shifted labels) + 0.1 * mse(...)
             |                                            |
             counts labels other than -100                counts samples

The graph is followed from the loss back through sums and constant factors to its terms. The labels or the divisor of a
term follow from the data alone (by a shift, a view, a clamp), so these operations form a function of their own.

If terms average over different items, no single weight of a micro-batch is right for their sum. ``return_parts`` then
makes the model return the terms one by one, so that each has a weight of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from raypipe.capture.analyse import Traced, is_open, reachable
from raypipe.engine.stage.generated_source import names_of
from raypipe.engine.stage.losses import LossCounts, count_labels
from raypipe.engine.stage.randomness import bind_arguments
from raypipe.engine.stage.stage import GraphFunction

aten = torch.ops.aten

_LABELS = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss2d", "aten::nll_loss_nd")
_SAME_VALUE = (
    "aten::to", "aten::_to_copy", "aten::alias", "aten::clone", "aten::contiguous", "aten::squeeze", "aten::unsqueeze",
    "aten::view", "aten::reshape", "aten::neg", "aten::detach",
)  # fmt: skip
_BENT = (
    "aten::abs", "aten::clamp", "aten::clamp_min", "aten::clamp_max", "aten::relu", "aten::leaky_relu",
    "aten::hardtanh", "aten::maximum", "aten::minimum", "aten::max", "aten::min", "aten::threshold",
)  # fmt: skip
_MEAN, _SUM = 1, 2
"""Values of ``reduction`` in torch's loss operations."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Averages and sums of which a loss consists, as far as its graph shows them.

    Attributes:
        counts: divisors that follow from the data, such as numbers of labels; None if the graph shows no such divisor.
        sums: True if every term is a sum over samples instead of an average.
        parts: (summand of the loss, index of its divisor in ``counts``) if the summands average over different things;
            empty if one weight is right for the whole loss, or the loss has no such summands.
        bent: name of a piecewise linear operation on an average, such as abs in flooding, or "". Losses of
            micro-batches add up until training reaches the bend, so that a trial on a few rows does not show it.
        main: divisor of the main term: the labels of the first cross entropy, else the first divisor in the graph.
        unknown: name of an operation that makes a term, if the graph does not show that this term averages over samples
            or is a sum as all others; else "". Only a trial shows then what micro-batches weigh.
    """

    counts: LossCounts | None
    sums: bool
    parts: tuple[tuple[fx.Node, int], ...] = ()
    bent: str = ""
    main: LossCounts | None = None
    unknown: str = ""

    def summed(self) -> LossTerms:
        """Copy these terms without ``parts``, for a model that returns their sum."""
        assert self.counts is not None
        return replace(self, counts=replace(self.counts, parts=()), parts=())


@dataclass(frozen=True, slots=True)
class _Count:
    """Divisor of a term: a number in the graph, a count of labels, or a count of the True items of a mask.

    Attributes:
        node: the number, the labels, or the mask.
        ignore_index: for labels, the label that does not count, maybe a size of the data; False for a mask; None for a
            number.
        class_weights: weight of each class, for labels; None if every label counts as 1.
    """

    node: fx.Node
    ignore_index: int | fx.Node | None = None
    class_weights: fx.Node | None = None

    @property
    def picks(self) -> bool:
        """True if the divisor is the number of True items of a mask."""
        return self.ignore_index is False


_SAMPLES, _ADDED_UP = "samples", "added up"


def loss_terms(traced: Traced, data: Set[fx.Node], tensors: Mapping[str, torch.Tensor]) -> LossTerms | None:
    """Find the terms of a loss in its graph: the graph of a loss_fn, or of a model that returns its own loss.

    Args:
        traced: graph whose first output is the loss.
        data: placeholders that are data columns; other placeholders of a loss_fn's graph are outputs of the model.
        tensors: the model's parameters and buffers by name, for class weights.

    Returns:
        The terms. None if the graph is for one number of samples only and divides by a number from the data: such
        divisors may not add up over micro-batches.
    """
    output = next(node for node in traced.graph.nodes if node.op == "output")
    loss: Any = output.args[0]
    reach = _Reach(traced, data)
    terms = list(_addends(loss[0], reach))
    bent = next((_operation(term) for term in terms if _bends(term, reach)), "")
    unknown = next((_operation(term) for term in _unclear(terms, reach)), "")
    below = reachable([loss[0]])
    hidden = _averages([node for node in traced.graph.nodes if node in below], reach)
    kinds = dict.fromkeys((*(_kind(node, reach) for node in terms), *hidden))
    counts = [kind for kind in kinds if isinstance(kind, _Count)]
    apart = traced.one_size
    # Numbers of labels add up over micro-batches; of other divisors that is not known.
    if apart and any(count.ignore_index is None for count in counts):
        return None
    if not counts:
        return LossTerms(None, set(kinds) == {_ADDED_UP}, bent=bent, unknown=unknown)
    several = not apart and len(counts) + (_SAMPLES in kinds) > 1 and _ADDED_UP not in kinds
    parts = tuple(_parts(loss[0], counts, reach)) if several else ()
    samples_too = _SAMPLES in kinds or any(count == len(counts) for _, count in parts)
    words = " and ".join(dict.fromkeys((*map(_words, counts), *(["samples"] if samples_too else []))))
    program = _program(traced, counts, tensors)
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    main = min(counts, key=lambda count: (count.ignore_index is None or count.picks, order[count.node]))
    return LossTerms(
        LossCounts(program, samples_too, words, tuple(count for _, count in parts), apart),
        sums=False,
        parts=parts,
        bent=bent,
        main=LossCounts(_program(traced, [main], tensors), False, _words(main), apart=apart),
        unknown=unknown,
    )


def return_parts(traced: Traced, terms: LossTerms) -> None:
    """Change the graph in place: it returns ``terms.parts`` in place of the loss, followed by its other outputs."""
    output = next(node for node in traced.graph.nodes if node.op == "output")
    returned: Any = output.args[0]
    output.args = ((*(node for node, _ in terms.parts), *returned[1:]),)


def _parts(loss: fx.Node, counts: list[_Count], reach: _Reach) -> list[tuple[fx.Node, int]]:
    """List (summand of the loss, index of its divisor in ``counts``); empty if a summand has several divisors.

    The index ``len(counts)`` means the number of samples.
    """
    parts: list[tuple[fx.Node, int]] = []
    stack = [loss]
    while stack:
        node = stack.pop()
        summands = node.args[:2] if _name(node) == "aten::add" and not node.kwargs else ()
        if summands and all(isinstance(part, fx.Node) for part in summands):
            stack += reversed(summands)  # type: ignore[arg-type]
            continue
        kinds = {_kind(term, reach) for term in _addends(node, reach)}
        inner = {*kinds, *_averages(reachable([node]), reach)} or {_SAMPLES}
        if len(inner) > 1:
            return []
        (kind,) = inner
        parts.append((node, counts.index(kind) if isinstance(kind, _Count) else len(counts)))
    return parts


def _averages(nodes: Iterable[fx.Node], reach: _Reach) -> list[_Count]:
    """List the divisors of the averages among ``nodes``, if they follow from the data.

    These may be averages that are not terms themselves, because they are stacked or are arguments of a maximum.
    """
    numbers = [node for node in nodes if _is_number(node) and node not in reach.of_data]
    return [kind for node in numbers if isinstance(kind := _kind(node, reach), _Count)]


class _Reach:
    """Sets of nodes of a loss's graph, by what they are computed from; no node depends on a random operation.

    Attributes:
        of_data: data columns, and nodes computed from data columns, constants and buffers only.
        fixed: nodes computed from constants, buffers and parameters only, so equal for all micro-batches.
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


def _operation(node: fx.Node) -> str:
    return (_name(node) or node.name).removeprefix("aten::").rstrip("_")


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _addends(loss: fx.Node, reach: _Reach) -> Iterator[fx.Node]:
    """Yield the terms whose sum or difference is the loss, without their constant factors."""
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
    """Return True if a product or quotient only scales a value, by a factor that all micro-batches have in common."""
    first, second = node.args[:2]
    if not isinstance(second, fx.Node):
        return True
    if second in reach.fixed:
        return True
    return "mul" in _name(node) and (not isinstance(first, fx.Node) or first in reach.fixed)


def _bends(term: fx.Node, reach: _Reach) -> bool:
    """Return True if a term is a piecewise linear function, such as abs or clamp, of a scalar from the model."""
    inputs = [node for node in term.all_input_nodes if node not in reach.fixed and node not in reach.of_data]
    return _name(term).rstrip("_") in _BENT and any(_is_number(node) for node in inputs)


def _kind(node: fx.Node, reach: _Reach) -> _Count | str:
    """Classify a term of the loss.

    Returns:
        A _Count for an average whose divisor follows from the data, _ADDED_UP for a sum, _SAMPLES for any other term.
    """
    name = _name(node)
    if name in _LABELS:
        arguments = bind_arguments(node.target, node.args, node.kwargs)
        labels, reduction = arguments["target"], arguments["reduction"]
        if reduction == _SUM:
            return _ADDED_UP
        weights = arguments["weight"]
        known = labels in reach.of_data and (weights is None or weights in reach.fixed)
        if reduction != _MEAN or labels.meta["val"].is_floating_point() or not known:
            return _SAMPLES
        return _Count(labels, arguments["ignore_index"], weights)
    if name in ("aten::div", "aten::div_"):
        divisor = node.args[1]
        if isinstance(divisor, fx.Node) and divisor in reach.of_data and _is_number(divisor):
            return _Count(divisor)
        return _SAMPLES
    arguments = bind_arguments(node.target, node.args, node.kwargs) if hasattr(node.target, "_schema") else {}
    masks = _masks(node, reach) if _is_average(node, arguments) else set()
    if len(masks) == 1:
        return _Count(masks.pop(), ignore_index=False)
    if "reduction" in arguments:
        return _ADDED_UP if arguments["reduction"] == _SUM else _SAMPLES
    return _ADDED_UP if name in ("aten::sum", "aten::dot") else _SAMPLES


def _is_average(node: fx.Node, arguments: Mapping[str, Any]) -> bool:
    """Return True for a mean over all items; ``arguments``: of the operation, by name."""
    over_dimensions = node.target is aten.mean.dim and _is_number(node)
    return over_dimensions or node.target is aten.mean.default or arguments.get("reduction") == _MEAN


def _unclear(terms: Sequence[fx.Node], reach: _Reach) -> Iterator[fx.Node]:
    """Yield the terms of which the graph does not show that they average over samples, or are sums as all others."""
    kinds = [_kind(term, reach) for term in terms]
    for term, kind in zip(terms, kinds, strict=True):
        if isinstance(kind, _Count) or (kind == _ADDED_UP and set(kinds) == {_ADDED_UP}):
            continue
        arguments = bind_arguments(term.target, term.args, term.kwargs) if hasattr(term.target, "_schema") else {}
        among_samples = _name(term) in _LABELS and arguments["target"] not in reach.of_data  # as contrastive losses
        averaged = term.all_input_nodes[0].meta.get("val") if term.all_input_nodes else None  # maybe a tuple
        of_samples = isinstance(averaged, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in averaged.shape)
        if not _is_average(term, arguments) or among_samples or not of_samples:
            yield term


def _masks(node: fx.Node, reach: _Reach) -> set[fx.Node]:
    """Return the masks, computed from data, that select items of a node's inputs: ``x[labels != -1].mean()``."""
    masks, seen, stack = set(), set(), list(node.all_input_nodes)
    while stack:
        used = stack.pop()
        if used in seen or not is_open(used.meta.get("val")):
            continue
        seen.add(used)
        indices: Any = used.args[1] if _name(used) in ("aten::index", "aten::masked_select") else None
        indices = indices if isinstance(indices, list | tuple) else [indices]
        picked = {one for one in indices if isinstance(one, fx.Node) and one.meta["val"].dtype == torch.bool}
        masks |= picked & reach.of_data
        stack += [] if picked else used.all_input_nodes
    return masks


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _words(count: _Count) -> str:
    if count.ignore_index is None:
        return f"the number that it divides by ({count.node.name})"
    if count.picks:
        return f"the items that a mask picks ({count.node.name})"
    weighed = ", by their classes' weights" if count.class_weights is not None else ""
    ignored = "a size of the data" if isinstance(count.ignore_index, fx.Node) else count.ignore_index
    return f"labels other than {ignored}{weighed}"


def _program(traced: Traced, counts: list[_Count], tensors: Mapping[str, torch.Tensor]) -> GraphFunction:
    """Build a function from data columns to the value of each divisor; ``tensors``: parameters and buffers by name."""
    graph = fx.Graph()
    read = [node for count in counts for node in (count.node, count.ignore_index, count.class_weights)]
    wanted = reachable([node for node in read if isinstance(node, fx.Node)])
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
            ignored = env[count.ignore_index] if isinstance(count.ignore_index, fx.Node) else count.ignore_index
            number = graph.call_function(count_labels, (number, ignored, weights))
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
