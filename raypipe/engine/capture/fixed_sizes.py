"""Which line of the user's code writes the number of samples as a number.

torch.export finds out at the end that the batch dimension may only have the example's size, and says so without a line.
The line is on the stack when the size is fixed, so it is written down then.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from raypipe.errors import CaptureError

__all__ = ["FixedSizes", "watched_sizes"]

_LIBRARIES = ("/torch/", "/sympy/", "/raypipe/engine/", "<string>", "<eval_with_key>")
_RECURRENT = "/torch/nn/modules/rnn.py"


@dataclass(slots=True)
class FixedSizes:
    """What was noticed last.

    Attributes:
        place: file and line, of the user's code.
        code: that line.
        recurrent: it is nn.LSTM, GRU or RNN that fixed the size, by its "input" or its initial "state".
    """

    place: str = ""
    code: str = ""
    size: int = 0
    recurrent: str = ""

    def refusal(self, model: str) -> CaptureError | None:
        """The error for a model whose batch dimension was fixed; None where that was not noticed."""
        if not self.place:
            return None
        start = f'{model} can only take {self.size} samples at a time, because of {self.place}: "{self.code}"'
        if self.recurrent == "state":
            return CaptureError(
                f"{start}. The initial state of nn.LSTM, GRU and RNN has shape (layers, samples, size), also with "
                "batch_first; take the number of samples from the data, x.shape[0], or leave the state out for zeros."
            )
        if self.recurrent == "input":
            return CaptureError(
                f"{start}. Without batch_first=True, nn.LSTM, GRU and RNN take dimension 0 of their input for time and "
                "dimension 1 for the samples, and dimension 0 of the data is the samples. Set batch_first=True, or "
                "give it x.transpose(0, 1)."
            )
        return CaptureError(
            f"{start}. Micro-batches have other numbers of samples than the example; take the number from the data, as "
            "in x.view(x.shape[0], -1) or torch.zeros(x.shape[0], ...), and loop over no samples."
        )


@contextmanager
def watched_sizes() -> Iterator[FixedSizes]:
    """While inside, note where a size of the example becomes the only one."""
    found = FixedSizes()
    # It loads sympy, half a second that a run's driver, which traces nothing, need not spend.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv._set_replacement

    def set_replacement(self: Any, symbol: Any, target: Any, message: str) -> None:
        if getattr(target, "is_Integer", False) and not found.place:
            _note(found, int(target))
        original(self, symbol, target, message)

    ShapeEnv._set_replacement = set_replacement  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]


def _note(found: FixedSizes, size: int) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_RECURRENT):
            found.recurrent = found.recurrent or ("state" if frame.f_code.co_name.startswith("check_") else "input")
        if not any(part in name for part in _LIBRARIES) and frame.f_code.co_name != "__torch_function__":
            break
        frame = frame.f_back
    if frame is not None:
        found.place, found.size = f"{name}:{frame.f_lineno}", size
        found.code = linecache.getline(name, frame.f_lineno).strip()
