"""Memory that an operation needs while it runs, on top of what is kept for the backward.

    bytes   forward of ops 0 1 2      backward of ops 2 1 0
      ^          ___                    _/\\_
      |      ___/      <- kept ->      /    \\_/\\_              what stands above the steps is the workspace:
      |  ___/                                     \\_/\\         gradients on their way, copies, a weight's gradient

Every storage that a run makes is counted from the operation that returns it to its end, forward and backward, through
one pass over the whole model, so that gradients which wait for a second branch count where they wait. Two passes at two
sizes tell what grows with the samples. What a kernel takes and gives back inside itself is not seen. Works on the meta
device too, where nothing is allocated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.backward import gradients
from raypipe.engine.profiling.observe import BackwardClock, Call, KeptBytes, tensors_in
from raypipe.engine.profiling.steps import Columns, Steps, samples_of
from raypipe.ir.lines import Lines, pruned

__all__ = ["LiveBytes", "Loss", "Passes", "kept_bytes", "workspaces"]

Loss = Callable[[Any, Columns], torch.Tensor]


class LiveBytes(TorchDispatchMode):
    """While it is on: bytes of storages that were made since and still live.

    Attributes:
        now: their sum.
        log: the same after every operation, the smallest that torch has.
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
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._live:
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
    """What runs a model step by step, with any number of samples.

    Attributes:
        leaves: by site; the gradient of each is given back as soon as it is known.
        loss: of the model's outputs and the columns; it belongs to the last operation.
    """

    steps: Steps
    leaves: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    loss: Loss


def workspaces(
    passes: Passes, columns: Columns, other: Columns | None = None, kept: Mapping[int, Sequence[int]] | None = None
) -> list[Lines]:
    """By operation, from one number of samples, and from another one if the model takes that too.

    With one number only, what depends on parameters alone and the largest gradient of a parameter count as fixed.

    Args:
        kept: by number of samples, ``kept_bytes`` with leaves, buffers and data held, where they are known.
    """
    known = kept or {}
    found = {samples_of(columns): _readings(passes, columns, known.get(samples_of(columns)))}
    if other is not None:
        # The user's code, at a size that nobody asked for: batch statistics of a single value, for one.
        with contextlib.suppress(Exception):
            found[samples_of(other)] = _readings(passes, other, known.get(samples_of(other)))
    (few, low), (many, high) = min(found.items()), max(found.items())
    lines: list[list[tuple[int, int]]] = [[] for _ in passes.steps.sites]
    if few == many or [at for at, _ in low] != [at for at, _ in high]:
        for at, nbytes in found[samples_of(columns)]:
            lines[at].append(_alone(passes, at, nbytes, samples_of(columns)))
    else:
        for (at, low_bytes), (_, high_bytes) in zip(low, high, strict=True):
            lines[at].append(_line(few, low_bytes, many, high_bytes))
    return [pruned(found) for found in lines]


def _line(few: int, low_bytes: int, many: int, high_bytes: int) -> tuple[int, int]:
    """Through two points, never falling, and never below zero at none."""
    slope = (high_bytes - low_bytes) / (many - few)
    fixed = low_bytes - slope * few
    if slope < 0:
        return max(low_bytes, high_bytes), 0
    return (0, math.ceil(high_bytes / many)) if fixed < 0 else (math.ceil(fixed), math.ceil(slope))


def _alone(passes: Passes, position: int, nbytes: int, samples: int) -> tuple[int, int]:
    """From one point."""
    if position in passes.steps.weight_like:
        return max(0, nbytes), 0
    leaves = (passes.leaves[site] for site in passes.steps.sites[position])
    fixed = min(max(0, nbytes), max((leaf.nbytes for leaf in leaves if leaf.requires_grad), default=0))
    return fixed, math.ceil((nbytes - fixed) / samples)


def _readings(passes: Passes, columns: Columns, own: Sequence[int] | None) -> list[tuple[int, int]]:
    """(position, bytes above those that it and the operations before it keep), after everything that torch did.

    Args:
        own: bytes that each operation keeps; None counts them here.
    """
    steps, leaves, buffers = passes.steps, passes.leaves, passes.buffers
    own = kept_bytes(passes, columns, (*leaves, *buffers, *columns.values())) if own is None else own
    kept = list(itertools.accumulate(own))
    found: list[tuple[int, int]] = []
    live = LiveBytes()
    owners = BackwardClock(len(kept), lambda: len(live.log))

    def read(position: int, begin: int, end: int) -> None:
        found.extend((position, nbytes - kept[position]) for nbytes in live.log[begin:end])

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
        read(position, begin, int(end))
        begin = int(end)
    return found


def kept_bytes(passes: Passes, columns: Columns, held: Sequence[torch.Tensor]) -> list[int]:
    """By operation, bytes that its backward keeps; the loss belongs to the last one.

    Args:
        held: tensors that are there anyway.
    """
    observer = KeptBytes(held)
    outputs = passes.steps.run(passes.leaves, passes.buffers, columns, observer)
    last = len(passes.steps.sites) - 1
    observer(last, passes.loss, (outputs, columns), {})
    return [observer.bytes_of.get(position, 0) for position in range(last + 1)]


def _given_back(leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What stands in for its gradient: the shape, without the memory."""
    nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return lambda _: nothing
