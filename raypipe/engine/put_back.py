"""Give things back what they held before a call."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch

__all__ = ["forget", "refill", "refill_tensor", "reset"]


def refill(container: Any, kept: Any) -> None:
    """Of a list, a deque, a set or a dict."""
    container.clear()
    if isinstance(container, list | collections.deque):
        container.extend(kept)
    else:
        container.update(kept)


def refill_tensor(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """In place, where it is another one."""
    if tensor.shape == kept.shape and not torch.equal(tensor, kept):
        with torch.no_grad():
            tensor.copy_(kept)


def forget(cache: Any, size: int) -> None:
    """Empty a cache of functools that had this many entries and has others now."""
    if cache.cache_info().currsize != size:
        cache.cache_clear()


def reset(holder: Any, name: str, value: Any) -> None:
    """Of one attribute."""
    if getattr(holder, name, None) is not value:
        with contextlib.suppress(AttributeError):  # frozen
            setattr(holder, name, value)
