"""Operations that are alike are measured once, each by itself, for as long as a budget lasts.

    op 0  linear (8, 768) -> 3072     measured        forward, backward for inputs, backward for parameters
    op 1  gelu   (8, 3072)            measured
    op 2  linear (8, 768) -> 3072     like op 0       it is not run: op 0's output stands in for its own
    op 3  gelu   (8, 3072)            like op 1
    op 4  linear (8, 768) -> 50257    the budget is spent: run once, its backward is estimated

Two operations are alike if they are the same function of tensors of the same shapes, strides and dtypes, with the
same other arguments, and the same of their tensors need gradients. A stack of equal blocks costs what one costs. Values
do not count, so a stand-in is as good as what it stands for. No graph is kept from one operation to the next: the
pass needs the memory of its outputs only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.engine.backward import gradients
from raypipe.engine.profiling.observe import Call, engine_seconds, tensors_in
from raypipe.engine.profiling.rounds import Moment, seconds_between
from raypipe.engine.profiling.steps import child_of
from raypipe.engine.randomness import RandomKey, dropout, keyed_call

__all__ = ["Alike", "Budget", "Parts"]

LONG_S, SHARE = 0.02, 0.15
"""An operation is measured again until it has taken this long, or all together this share of the budget, at least
twice and at most ``repeats`` times."""
LARGE = 0.03
"""Share of the budget; an operation that takes more is measured without a pass to warm up."""


class Budget:
    """Processor time of this thread that measuring may take.

    Args:
        total_s: seconds from now on.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._begin_s = time.thread_time()

    @property
    def spent_s(self) -> float:
        return time.thread_time() - self._begin_s

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one operation: forward, backward for its inputs and for its parameters, sums of gradients.

    Attributes:
        measured: False where only the forward was, so that the backward is to be estimated.
    """

    forward_s: float
    input_s: float = 0.0
    weight_s: float = 0.0
    sums_s: float = 0.0
    measured: bool = True

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s + self.sums_s


@dataclass(slots=True)
class Alike:
    """Observer of a pass in which each kind of operation is measured once.

    Args:
        leaves: by position, the parameters that the operation reads.
        weight_like: positions whose outputs count as parameters.
        budget: when it is spent, forwards are run once and nothing else.
        repeats: the most measurements of one operation.
        advance: called after every operation.
    """

    leaves: Sequence[Sequence[torch.Tensor]]
    weight_like: frozenset[int]
    budget: Budget
    repeats: int
    advance: Callable[[], None] = lambda: None
    kinds: list[Hashable] = field(default_factory=list)
    found: dict[Hashable, Parts] = field(default_factory=dict)
    _outputs: dict[Hashable, Any] = field(default_factory=dict)
    _weights: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weights.update({id(leaf): leaf for leaves in self.leaves for leaf in leaves})

    def __call__(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self._kind(call, args, kwargs, self.leaves[position])
        self.kinds.append(kind)
        if kind not in self.found:
            parameters = [leaf for leaf in self.leaves[position] if leaf.requires_grad]
            parts, outputs = self._measured(call, args, kwargs, parameters, position in self.weight_like)
            self.found[kind], self._outputs[kind] = parts, outputs
            if position in self.weight_like:
                self._weights.update({id(t): t for t in tensors_in(outputs)})
        self.advance()
        return self._outputs[kind]

    def seconds(self) -> list[Parts]:
        """By position; backwards that were not measured are estimated from those of the same function."""
        ratios = _ratios(self.found)
        filled = {
            kind: parts if parts.measured else _estimated(parts, _name(kind), ratios)
            for kind, parts in self.found.items()
        }
        return [filled[kind] for kind in self.kinds]

    def _kind(self, call: Call, args: Any, kwargs: Any, leaves: Sequence[torch.Tensor]) -> Hashable:
        def described(value: Any) -> Hashable:
            if isinstance(value, torch.Tensor):
                return (
                    tuple(value.shape),
                    value.stride(),
                    value.dtype,
                    value.requires_grad,
                    id(value) in self._weights,
                )
            return "key" if isinstance(value, RandomKey) else (type(value), repr(value))

        if call is dropout or call is keyed_call:  # the number of the draw is no matter of time
            at = 3 if call is dropout else 2
            args = (*args[:at], *args[at + 1 :])
        values, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple(map(described, (*values, *leaves)))
        child = child_of(call)
        return (call if child is None else child, str(spec), shapes)

    def loss_parts(self, loss: Call, outputs: Any, columns: Any) -> Parts:
        """Of the loss, measured as an operation is."""
        parts, _ = self._measured(loss, (outputs, columns), {}, (), False)
        return parts if parts.measured else _estimated(parts, "", _ratios(self.found))

    def _measured(
        self, call: Call, args: Any, kwargs: Any, parameters: Sequence[torch.Tensor], weight_like: bool
    ) -> tuple[Parts, Any]:
        forwards, inputs, weights = [], [], []
        in_place = False
        long_s = min(LONG_S, SHARE * self.budget.total_s / len(self.leaves))
        begun_s = self.budget.spent_s
        while True:
            copies: dict[bool, list[torch.Tensor]] = {True: [], False: []}
            own = pytree.tree_map(lambda x, c=copies, cloned=in_place: self._alone(x, c, cloned), (args, kwargs))
            begin = Moment.now()
            try:
                outputs = call(*own[0], **own[1])
            except RuntimeError:
                if in_place:
                    raise
                in_place = True  # it works in place on what it is given, which a leaf does not allow
                continue
            forwards.append(seconds_between(begin, Moment.now()))
            if self.budget.left_s <= 0:
                break
            roots = [t for t in tensors_in(outputs) if t.requires_grad]
            seeds = [torch.ones_like(t) for t in roots]
            wanted = [*parameters, *copies[True]]
            if weight_like:
                wanted, copies[False] = [*wanted, *copies[False]], []
            weights.append(_backward(roots, seeds, wanted, keep=bool(copies[False])))
            inputs.append(_backward(roots, seeds, copies[False], keep=False))
            spent_s = self.budget.spent_s - begun_s
            enough = spent_s > long_s and len(forwards) > 1
            if enough or len(forwards) > self.repeats or spent_s > LARGE * self.budget.total_s:
                break
        result = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), outputs)
        if not inputs:
            return Parts(min(forwards), measured=not any(t.requires_grad for t in tensors_in(outputs))), result
        return Parts(_usual(forwards), _usual(inputs), _usual(weights), _sums(parameters, self.repeats)), result

    def _alone(self, value: Any, copies: Mapping[bool, list[torch.Tensor]], in_place: bool) -> Any:
        """An input as a leaf of its own, noted as a weight (True) or not."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.requires_grad:
            return value.clone() if in_place else value
        derived = id(value) in self._weights
        if derived and value.is_leaf and any(value is leaf for leaves in self.leaves for leaf in leaves):
            return value  # a parameter, which the site lists
        copy = value.detach().requires_grad_()
        copies[derived].append(copy)
        return copy.clone() if in_place else copy


def _backward(roots: Sequence[Any], seeds: Sequence[Any], wanted: Sequence[Any], *, keep: bool) -> float:
    """Seconds of one backward; 0 where nothing is wanted."""
    if not roots or not wanted:
        return 0.0
    begin = Moment.now()
    if keep:
        torch.autograd.grad(list(roots), list(wanted), list(seeds), allow_unused=True, retain_graph=True)
    else:
        gradients(roots, seeds, wanted)
    return max(0.0, seconds_between(begin, Moment.now()) - engine_seconds())


def _usual(seconds: Sequence[float]) -> float:
    """The median without the first, which warms up, where there are others."""
    return statistics.median(seconds[1:] or seconds)


def _sums(parameters: Sequence[torch.Tensor], repeats: int) -> float:
    """Seconds to add the gradients of these parameters to their sums."""
    if not parameters:
        return 0.0
    totals = [torch.zeros_like(p).add_(0.0) for p in parameters]  # memory that nobody has touched takes longer
    found = [torch.zeros_like(p) for p in parameters]
    seconds = []
    for _ in range(min(repeats, 3)):
        begin = Moment.now()
        torch._foreach_add_(totals, found)
        seconds.append(seconds_between(begin, Moment.now()))
    return min(seconds)


def _name(kind: Any) -> str:
    """Of the function, whatever its arguments."""
    return str(kind[0])


def _ratios(found: Mapping[Hashable, Parts]) -> dict[str, tuple[float, float, float]]:
    """Backward over forward seconds by function; that of all of them as ""."""
    by_name: dict[str, list[Parts]] = {"": []}
    for kind, parts in found.items():
        if parts.measured:
            for name in ("", _name(kind)):
                by_name.setdefault(name, []).append(parts)
    result = {}
    for name, several in by_name.items():
        forward_s = sum(p.forward_s for p in several)
        sums = (sum(getattr(p, part) for p in several) for part in ("input_s", "weight_s", "sums_s"))
        result[name] = tuple(s / forward_s if forward_s else 1.0 for s in sums) if several else (1.0, 1.0, 0.0)
    return result  # type: ignore[return-value]


def _estimated(parts: Parts, name: str, ratios: Mapping[str, tuple[float, float, float]]) -> Parts:
    inward, weight, sums = ratios.get(name, ratios[""])
    f = parts.forward_s
    return Parts(f, f * inward, f * weight, f * sums, measured=False)
