"""Memory that an operation needs while it runs, on top of what is kept for the backward.

    bytes   forward of ops 0 1 2      backward of ops 2 1 0
      ^          ___                    _/\\_
      |      ___/      <- kept ->      /    \\_/\\_              what stands above the steps is the workspace:
      |  ___/                                     \\_/\\         gradients on their way, copies, a weight's gradient

Every storage that a run makes is counted from the operation that returns it to its end, forward and backward, through
one pass over the whole model, so that gradients which wait for a second branch count where they wait. What a kernel
takes and gives back inside itself is not seen. Works on the meta device too, where nothing is allocated.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.backward import gradients
from raypipe.engine.profiling.observe import BackwardClock, Call, KeptBytes, tensors_in
from raypipe.engine.profiling.steps import Steps

__all__ = ["LiveBytes", "Workspace", "workspaces"]


class Workspace(NamedTuple):
    """Of one operation.

    Attributes:
        total_bytes: most that it needs besides what it and the operations before it keep.
        fixed_bytes: the part that does not grow with the samples: the largest gradient of a parameter.
    """

    total_bytes: int
    fixed_bytes: int


class LiveBytes(TorchDispatchMode):
    """While it is on: bytes of storages that were made since and still live, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
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
        self.most = max(self.most, self.now)
        return outputs

    def _gone(self, which: int, nbytes: int) -> None:
        self._live.discard(which)
        self.now -= nbytes

    def most_since(self) -> float:
        """The most since the last call."""
        found, self.most = self.most, self.now
        return found


def workspaces(
    steps: Steps,
    leaves: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    columns: Mapping[Any, torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
) -> list[Workspace]:
    """By operation.

    Args:
        leaves: by site; the gradient of each is given back as soon as it is known.
        loss: of the model's outputs; it belongs to the last operation.
    """
    before = _kept_up_to(steps, leaves, buffers, columns, loss)
    found = _most(steps, leaves, buffers, columns, loss, before)
    fixed = [
        max((leaves[site].nbytes for site in sites if leaves[site].requires_grad), default=0) for sites in steps.sites
    ]
    return [Workspace(total, min(most, total)) for total, most in zip(found, fixed, strict=True)]


def _kept_up_to(
    steps: Steps,
    leaves: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    columns: Mapping[Any, torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
) -> list[int]:
    """By operation, what it and those before it keep, the data apart."""
    kept = KeptBytes((*leaves, *buffers, *columns.values()))
    outputs = steps.run(leaves, buffers, columns, kept)
    last = len(steps.sites) - 1
    kept(last, loss, (outputs,), {})
    return list(itertools.accumulate(kept.bytes_of.get(position, 0) for position in range(last + 1)))


def _most(
    steps: Steps,
    leaves: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    columns: Mapping[Any, torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
    before: Sequence[int],
) -> list[int]:
    """By operation, the most bytes above ``before``, which are kept when its backward begins."""
    found = [0] * len(before)
    live = LiveBytes()
    owners = BackwardClock(len(before), live.most_since)

    def observe(position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        live.most_since()
        outputs = call(*args, **kwargs)
        found[position] = max(found[position], int(live.most_since()) - live.now)
        owners.claim(position, outputs)
        return outputs

    trained = [leaf for leaf in leaves if leaf.requires_grad]
    handles = [leaf.register_hook(_given_back(leaf)) for leaf in trained]
    try:
        with live:
            root = observe(len(before) - 1, loss, (steps.run(leaves, buffers, columns, observe),), {})
            seed = torch.ones_like(root)
            live.most_since()
            gradients([root], [seed], trained)
    finally:
        for handle in handles:
            handle.remove()
    for position, most in owners.readings(live.most_since()):
        found[position] = max(found[position], int(most) - before[position])
    return found


def _given_back(leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What stands in for its gradient: the shape, without the memory."""
    nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return lambda _: nothing
