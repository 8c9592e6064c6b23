"""Late: tensors of a message that are being copied to host memory, so that whoever computes need not wait for them.

compute    F0 | send(late) | F1 ...                   the next forward is launched at once
device        F0 ........| copy | F1 ...
who sends                  waits | header, payload --> link
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from raypipe.engine.codec.coded import CodedTensor

__all__ = ["Late", "arrived"]


class Late(tuple[torch.Tensor | CodedTensor | None, ...]):
    """Tensors in host memory; their values are there once ``arrive`` has returned, which any thread may call."""

    arrive: Callable[[], None]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor | CodedTensor | None], arrive: Callable[[], None]) -> Late:
        made = cls(tensors)
        made.arrive = arrive
        return made


def arrived(tensors: object) -> None:
    """Return when these tensors may be read, as all but Late ones may at once."""
    if isinstance(tensors, Late):
        tensors.arrive()
