"""Branches on a random number that can only go one way: ``if torch.rand([]) < 0.0``.

Models with LayerDrop draw a number for every layer and compare it with a probability that is 0 by default (Hugging
Face's OPT, BART and Whisper before 5.23). A trace knows no values and would refuse the branch, so it is decided here.
The draw stays in the graph, and with it the number of every later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CertainDraws"]


class CertainDraws(TorchFunctionMode):
    """Inside, ``if`` knows of one number of ``torch.rand`` that it is at least 0 and below 1."""

    def __init__(self) -> None:
        super().__init__()
        # By id, for tensors compare their elements; they are kept, so that no other gets the id.
        self._drawn: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and id(args[0]) in self._known:
            return self._known[id(args[0])][1]
        found = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(found, torch.Tensor) and found.numel() == 1:
            self._drawn[id(found)] = found
        elif func in _BELOW and len(args) == 2 and id(args[0]) in self._drawn:
            bound = args[1]
            if isinstance(bound, (int, float)) and not 0 < bound < 1:
                self._known[id(found)] = found, (bound >= 1) is _BELOW[func]
        return found


_BELOW = {torch.Tensor.lt: True, torch.Tensor.__lt__: True, torch.Tensor.ge: False, torch.Tensor.__ge__: False}
"""Comparisons of a number drawn, on the left, with a bound, and whether they ask if it is below."""
