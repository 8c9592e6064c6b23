"""Which tensors operations read while the user's loss, metric or optimizer is tried.

A loss may refer to the model, for a size or a function of it. What it must not read there is what trains: stages train
copies, so that it would see the weights of the beginning for ever, and no gradient would come of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.errors import CaptureError

__all__ = ["no_reads_of"]


class _Watched(TorchDispatchMode):
    """Has every operation checked before it computes."""

    def __init__(self, named: Mapping[int, str], whose: str, cure: str, given: Collection[int] | None) -> None:
        super().__init__()
        self._named, self._whose, self._cure, self._given = named, whose, cure, given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.detach.default:  # it computes nothing yet
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage in self._named:
            raise CaptureError(
                f"{self._whose} reads {self._named[storage]!r} of the model that the trainer was given. Stages train "
                f"copies of it, so that it would see the values of the beginning for ever. {self._cure}"
            )
        if self._given is None or storage in self._given or not torch.is_grad_enabled():
            return
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            raise CaptureError(
                f"{self._whose} computes with a parameter of shape {list(tensor.shape)} that is none of the model's, "
                "so no optimizer is given it and it would never learn. Make it a part of the model, which can return "
                "its own loss, or freeze it: requires_grad_(False)."
            )


@contextmanager
def no_reads_of(
    named: Mapping[str, torch.Tensor], whose: str, cure: str = "", *, given: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Inside, whatever reads one of these tensors, or a view of one, is refused before it computes.

    Args:
        named: tensors by name.
        whose: code runs inside, for the message.
        cure: what to write instead.
        given: what the code may read all the same, its arguments; parameters that learn and are neither these nor named
            are refused as well. None refuses no others.

    Raises:
        CaptureError: names the tensor.
    """
    spared = None if given is None else {_storage(x) for x in given if x.layout is torch.strided}
    held = {_storage(x): name for name, x in named.items() if not x.is_meta and x.numel()}
    for storage in spared or ():
        held.pop(storage, None)
    with _Watched(held, whose, cure, spared):
        yield


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
