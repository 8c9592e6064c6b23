"""What happens in each operation: its seconds forward, its part of the backward, and what it keeps.

    forward    op 0 | op 1 | op 2          the clock around every call; new grad_fns belong to the call
    backward     fn f   fn e   fn d ...    a clock at the start of every grad_fn: one lasts until the next begins

The backward runs as one, through torch's own engine, so that every operation is measured where it stands: with its
real gradients, and with memory as warm or cold as it is in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.engine.backward import gradients

__all__ = ["BackwardClock", "ForwardClock", "KeptBytes", "Shares", "engine_seconds", "tensors_in"]

Call = Callable[..., Any]

REPEATS = 3
"""Of each measurement of a share."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class BackwardClock:
    """Splits one backward among the operations that made its grad_fns.

    Args:
        count: of operations.
        read: what is noted at the start of every grad_fn.
    """

    def __init__(self, count: int, read: Callable[[], float] = time.perf_counter) -> None:
        self.count = count
        self._read = read
        self._owned: set[Any] = set()
        self._log: list[tuple[float, int]] = []

    def claim(self, position: int, outputs: Any) -> None:
        """Grad_fns that are new behind these outputs belong to the operation at ``position``."""
        stack = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
        log, read = self._log.append, self._read
        while stack:
            fn = stack.pop()
            if fn in self._owned:
                continue
            self._owned.add(fn)
            if fn.name() == "torch::autograd::AccumulateGrad":
                continue  # a leaf's; nothing is accumulated here
            fn.register_prehook(lambda _: log((read(), position)))
            stack += [following for following, _ in fn.next_functions if following is not None]

    def readings(self, end: float) -> list[tuple[int, float]]:
        """(position, what was read when it ended) of every grad_fn that ran. The log is emptied."""
        ends = [*(at for at, _ in self._log[1:]), end]
        found = [(position, at) for (_, position), at in zip(self._log, ends, strict=True)]
        self._log.clear()
        return found

    def seconds(self, begin_s: float, end_s: float) -> list[float]:
        """By position, for a backward between these times. The log is emptied."""
        found = [0.0] * self.count
        hook_s = _hook_seconds()
        ends = [*(at for at, _ in self._log[1:]), end_s]
        for (start, position), end in zip(self._log, ends, strict=True):
            found[position] += max(0.0, end - start - hook_s)
        if self._log:
            found[self._log[0][1]] += self._log[0][0] - begin_s
        self._log.clear()
        return found


@dataclass(slots=True)
class ForwardClock:
    """Observer: seconds of every call, and whose every grad_fn is."""

    seconds: list[float]
    backward: BackwardClock

    def __call__(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin_s = time.perf_counter()
        outputs = call(*args, **kwargs)
        self.seconds[position] = time.perf_counter() - begin_s
        self.backward.claim(position, outputs)
        return outputs


@dataclass(slots=True)
class KeptBytes:
    """Observer: bytes that autograd keeps for the backward, each storage once, at the first operation to keep it.

    Args:
        held: tensors that are there anyway: parameters, buffers.
    """

    held: Sequence[torch.Tensor]
    bytes_of: dict[int, int] = field(default_factory=dict)
    _keepers: dict[int, int] = field(default_factory=dict)  # by storage, the operation that keeps it
    _seen: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen.update({t.untyped_storage()._cdata: t for t in self.held})

    def __call__(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage  # kept alive, so that no address comes twice
                self._keepers[storage._cdata] = position
                self.bytes_of[position] = self.bytes_of.get(position, 0) + storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return call(*args, **kwargs)

    def besides(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """``bytes_of`` as if these had been held too."""
        found = dict(self.bytes_of)
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values():
            if (keeper := self._keepers.get(storage._cdata)) is not None:
                found[keeper] -= storage.nbytes()
        return found


class Shares:
    """Observer: which part of each operation's backward is for parameters, measured on the operation alone.

    Args:
        leaves: by position, the parameters that the operation reads.
        weight_like: positions whose outputs count as parameters.
    """

    def __init__(self, leaves: Sequence[Sequence[torch.Tensor]], weight_like: frozenset[int]) -> None:
        self.weight_share = [0.0] * len(leaves)
        self._leaves = leaves
        self._weight_like = weight_like
        self._derived: dict[int, torch.Tensor] = {}

    def __call__(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrived = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]
        derived = [t for t in arrived if id(t) in self._derived]
        weights = [leaf for leaf in self._leaves[position] if leaf.requires_grad]
        if position in self._weight_like or ((weights or derived) and len(derived) == len(arrived)):
            self.weight_share[position] = 1.0
        elif weights or derived:
            self.weight_share[position] = self._measured(call, args, kwargs, weights, {id(t) for t in derived})
        outputs = call(*args, **kwargs)
        if position in self._weight_like:
            self._derived.update({id(t): t for t in tensors_in(outputs)})
        return outputs

    def _measured(
        self, call: Call, args: Any, kwargs: Any, weights: Sequence[torch.Tensor], derived: set[int]
    ) -> float:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        try:
            for wanted in (True, False) * REPEATS:  # the least counts
                copies: dict[bool, list[torch.Tensor]] = {True: list(weights), False: []}
                own_args, own_kwargs = pytree.tree_map(lambda x, c=copies: _alone(x, derived, c), (args, kwargs))
                roots = [t for t in tensors_in(call(*own_args, **own_kwargs)) if t.requires_grad]
                seeds = [torch.ones_like(t) for t in roots]
                begin_s = time.perf_counter()
                gradients(roots, seeds, copies[wanted])
                seconds[wanted].append(time.perf_counter() - begin_s)
        except RuntimeError:  # it works in place on what it is given, which a leaf does not allow
            return 0.5
        engine_s = engine_seconds()
        for_weights, for_inputs = (max(min(seconds[which]) - engine_s, 1e-7) for which in (True, False))
        return for_weights / (for_weights + for_inputs)


def _alone(value: Any, derived: set[int], copies: dict[bool, list[torch.Tensor]]) -> Any:
    """An input as a leaf, noted as a weight (True) or not."""
    if not isinstance(value, torch.Tensor) or value.is_leaf or not value.requires_grad:
        return value
    copy = value.detach().requires_grad_()
    copies[id(value) in derived].append(copy)
    return copy


def _chain(length: int) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """A leaf, what follows from it after so many trivial operations, and their grad_fns."""
    leaf = y = torch.zeros(1, requires_grad=True)
    fns = []
    for _ in range(length):
        y = y.view(1)
        fns.append(y.grad_fn)
    return leaf, y, fns


def _times(length: int, hooked: bool) -> Iterator[float]:
    log: list[tuple[float, int]] = []
    clock = time.perf_counter
    for _ in range(7):
        leaf, y, fns = _chain(length)
        for fn in fns if hooked else ():
            fn.register_prehook(lambda _: log.append((clock(), 0)))
        begin_s = clock()
        gradients([y], [torch.ones_like(y)], [leaf])
        yield clock() - begin_s


@cache
def _hook_seconds() -> float:
    """What one clock in a backward costs."""
    return max(0.0, min(_times(500, True)) - min(_times(500, False))) / 500


@cache
def engine_seconds() -> float:
    """What a backward costs in which nothing happens."""
    return min(_times(1, False))
