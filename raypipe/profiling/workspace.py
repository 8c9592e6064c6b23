"""Bytes of operations: what autograd keeps for the backward, and the workspace that they need while they run.

    bytes   forward of ops 0 1 2      backward of ops 2 1 0
      ^          ___                    _/\\_
      |      ___/      <- kept ->      /    \\_/\\_              above the steps is the workspace: gradients of
      |  ___/                                     \\_/\\         activations, copies, a weight's gradient

One forward and backward runs over the whole model. Every storage that it allocates is counted from the operation that
returns it until it is freed, so that a gradient that waits for that of a second branch counts too. The backward is
attributed to operations by their grad_fns. Runs with two numbers of samples show which part grows with the samples.
Memory that a kernel allocates and frees inside is not counted. Counting works on the meta device too, where nothing is
allocated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.stage.backward import gradients
from raypipe.ir.graph import Lines, pruned
from raypipe.profiling.steps import Columns, Steps, samples_of

Call = Callable[..., Any]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """List the tensors in a pytree."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class BackwardSplit:
    """Attributes the parts of one backward to the operations that made its grad_fns.

    Args:
        read: function that returns an increasing counter, such as of memory events; called before every grad_fn.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._owned: set[Any] = set()
        self._log: list[tuple[int, int]] = []

    def claim(self, position: int, outputs: Any) -> None:
        """Assign the new grad_fns of these outputs to the operation at ``position``."""
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

    def readings(self, end: int) -> list[tuple[int, int]]:
        """List (operation's position, counter after the grad_fn) for every grad_fn that ran, in order.

        Args:
            end: counter at the end of the backward.
        """
        ends = [*(at for at, _ in self._log[1:]), end]
        return [(position, at) for (_, position), at in zip(self._log, ends, strict=True)]


@dataclass(slots=True)
class KeptBytes:
    """Observer of Steps that counts the bytes that autograd keeps for the backward.

    Each storage counts once, at the operation that returned it. A stage holds what it sends until its own backward, and
    what it receives counts as messages. Other storages, such as data, count at the first operation that keeps them.

    Args:
        held: tensors that do not count, because they exist anyway: parameters, buffers.

    Attributes:
        bytes_of: position of an operation -> bytes of its outputs that are kept, and of what it keeps besides outputs.
    """

    held: Sequence[torch.Tensor]
    bytes_of: dict[int, int] = field(default_factory=dict)
    _keepers: dict[int, int] = field(default_factory=dict)  # by storage, the operation whose bytes it is among
    _makers: dict[int, int] = field(default_factory=dict)  # by live storage, the operation that returned it first
    _seen: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen.update({t.untyped_storage()._cdata: t for t in self.held})

    def __call__(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage  # kept alive, so that no address comes twice
                maker = self._keepers[storage._cdata] = self._makers.get(storage._cdata, position)
                self.bytes_of[maker] = self.bytes_of.get(maker, 0) + storage.nbytes()
            return tensor.detach()

        taken = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = call(*args, **kwargs)
        for storage in (t.untyped_storage() for t in tensors_in(outputs)):
            if storage._cdata not in taken and storage._cdata not in self._makers:
                self._makers[storage._cdata] = position
                weakref.finalize(storage, self._makers.pop, storage._cdata)
        return outputs

    def besides(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Copy ``bytes_of`` without the storages of these tensors."""
        kept = dict(self.bytes_of)
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values():
            if (keeper := self._keepers.get(storage._cdata)) is not None:
                kept[keeper] -= storage.nbytes()
        return kept


@cache
def engine_seconds() -> float:
    """Measure the constant seconds of autograd's engine, which any backward takes, by a trivial backward."""
    seconds = []
    for _ in range(7):
        leaf = torch.zeros(1, requires_grad=True)
        y = leaf.view(1)
        begin_s = time.perf_counter()
        gradients([y], [torch.ones_like(y)], [leaf])
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


Loss = Callable[[Any, Columns], torch.Tensor]


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the live bytes of the storages that operations inside it allocate.

    Attributes:
        now: live bytes now.
        log: live bytes after every aten operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.log: list[int] = []
        self._live: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._live:
                self._live.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.log.append(self.now)
        return outputs

    def _gone(self, which: int, nbytes: int) -> None:
        self._live.discard(which)
        self.now -= nbytes


@dataclass(frozen=True, slots=True)
class Passes:
    """A model with its loss and tensors, to run one operation at a time; ``leaves`` has a parameter for each use."""

    steps: Steps
    leaves: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    loss: Loss


def workspaces(
    passes: Passes, columns: Columns, other: Columns | None = None, kept: Mapping[int, Sequence[int]] | None = None
) -> list[Lines]:
    """Compute each operation's workspace, the largest of several lines: (bytes at 0 samples, bytes per sample).

    The lines are fitted to runs with two numbers of samples. With one number only, all bytes of an operation on
    parameters alone count as fixed. Of another operation, the bytes of its largest parameter gradient count as fixed,
    and the rest as proportional to the samples.

    Args:
        columns: data columns.
        other: data columns with another number of samples; not used if None, or if the model fails on them.
        kept: number of samples -> result of ``kept_bytes`` with leaves, buffers and data as ``held``; counted here for
            numbers that are missing.
    """
    known = kept or {}
    readings = {samples_of(columns): _readings(passes, columns, known.get(samples_of(columns)))}
    if other is not None:
        # The user's code may fail at a size that was not configured, as batch statistics of a single value do.
        with contextlib.suppress(Exception):
            readings[samples_of(other)] = _readings(passes, other, known.get(samples_of(other)))
    (few, low), (many, high) = min(readings.items()), max(readings.items())
    lines: list[list[tuple[int, int]]] = [[] for _ in passes.steps.sites]
    if few == many or [at for at, _ in low] != [at for at, _ in high]:
        for at, nbytes in readings[samples_of(columns)]:
            lines[at].append(_alone(passes, at, nbytes, samples_of(columns)))
    else:
        for (at, low_bytes), (_, high_bytes) in zip(low, high, strict=True):
            lines[at].append(_line(few, low_bytes, many, high_bytes))
    return [pruned(line) for line in lines]


def _line(few: int, low_bytes: int, many: int, high_bytes: int) -> tuple[int, int]:
    """Fit a line (bytes at 0 samples, bytes per sample), neither negative, to (few, low_bytes), (many, high_bytes)."""
    slope = (high_bytes - low_bytes) / (many - few)
    fixed = low_bytes - slope * few
    if slope < 0:
        return max(low_bytes, high_bytes), 0
    return (0, math.ceil(high_bytes / many)) if fixed < 0 else (math.ceil(fixed), math.ceil(slope))


def _alone(passes: Passes, position: int, nbytes: int, samples: int) -> tuple[int, int]:
    """Choose such a line for one point, ``nbytes`` at ``samples``; ``position``: of the operation; see workspaces."""
    if position in passes.steps.weight_like:
        return max(0, nbytes), 0
    leaves = (passes.leaves[site] for site in passes.steps.sites[position])
    fixed = min(max(0, nbytes), max((leaf.nbytes for leaf in leaves if leaf.requires_grad), default=0))
    return fixed, math.ceil((nbytes - fixed) / samples)


def _readings(passes: Passes, columns: Columns, own: Sequence[int] | None) -> list[tuple[int, int]]:
    """List (operation's position, workspace in bytes) after every aten operation of a forward and backward.

    The workspace is all live bytes, less the bytes that this operation and earlier ones keep for the backward.

    Args:
        own: bytes that each operation keeps; None to count them here.
    """
    steps, leaves, buffers = passes.steps, passes.leaves, passes.buffers
    own = kept_bytes(passes, columns, (*leaves, *buffers, *columns.values())) if own is None else own
    kept = list(itertools.accumulate(own))
    readings: list[tuple[int, int]] = []
    live = LiveBytes()
    owners = BackwardSplit(lambda: len(live.log))

    def read(position: int, begin: int, end: int) -> None:
        readings.extend((position, nbytes - kept[position]) for nbytes in live.log[begin:end])

    def observe(position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = len(live.log)
        outputs = call(*args, **kwargs)
        read(position, begin, len(live.log))
        owners.claim(position, outputs)
        return outputs

    trained = [leaf for leaf in leaves if leaf.requires_grad]
    handles = [leaf.register_hook(_given_back(leaf)) for leaf in trained]
    try:
        with live:
            root = observe(len(kept) - 1, passes.loss, (steps.run(leaves, buffers, columns, observe), columns), {})
            seed = torch.ones_like(root)
            begin = len(live.log)
            gradients([root], [seed], trained)
    finally:
        for handle in handles:
            handle.remove()
    for position, end in owners.readings(len(live.log)):
        read(position, begin, end)
        begin = end
    return readings


def kept_bytes(passes: Passes, columns: Columns, held: Sequence[torch.Tensor]) -> list[int]:
    """Count the kept bytes of each operation (``KeptBytes``); what only the loss keeps is added to the last one.

    Args:
        held: tensors that do not count, because they exist anyway.
    """
    observer = KeptBytes(held)
    outputs = passes.steps.run(passes.leaves, passes.buffers, columns, observer)
    last = len(passes.steps.sites) - 1
    observer(last, passes.loss, (outputs, columns), {})
    return [observer.bytes_of.get(position, 0) for position in range(last + 1)]


def _given_back(leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a gradient hook that frees the gradient: it returns a tensor of the same shape that has one element only."""
    nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return lambda _: nothing
