"""State that a graph cannot carry: what forward and the loss remember other than in parameters and buffers.

A stage is a function of parameters, buffers and inputs. A counter, a list or an average that forward or the loss keeps
in an attribute, a closure or a global would be frozen when the model is traced, be copied into every stage and be
missing from checkpoints; see engine/remembered.py for how it is found. What only shows in numbers is left to
engine/trial/verify.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from raypipe.engine.capture.assigned_buffers import assigned_buffers
from raypipe.engine.capture.guards import own_forward, same_parameters_train
from raypipe.engine.remembered import Memory, first_change, read_memory
from raypipe.errors import CaptureError

__all__ = ["refuse_change", "watched_forward"]


def refuse_change(once: Memory, twice: Memory, whose: str) -> None:
    """Refuse what a second call changed again.

    Args:
        once, twice: read after one call and after the next.
        whose: was called, for the message.

    Raises:
        CaptureError: names what changed and from what to what.
    """
    change = first_change(once, twice)
    if change:
        raise CaptureError(
            f"{whose} changes {change}. Stages of a pipeline are traced or copied and would not share it, and no "
            "checkpoint holds it. Make it a buffer (register_buffer) that tensor operations update in place, or keep "
            "it out of forward and loss."
        )


@contextmanager
def watched_forward(model: nn.Module, *, twice: bool = False) -> Iterator[list[str]]:
    """While inside, whatever forward changes is put back after the call; for tracing, where tensors are stand-ins.

    Args:
        twice: forward runs twice in every call, and what the second run changes again is refused.

    Yields:
        a list that collects the paths of what calls changed.
    """
    original, changed = model.forward, list[str]()

    def read() -> Memory:
        with _disable_current_modes():
            return read_memory(model)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, check_assigned = read(), assigned_buffers(model)
        try:
            with same_parameters_train(model):
                output = original(*args, **kwargs)
            check_assigned()
            after = read()
            changed.extend(path for path, _, _ in before.changes(after))
            if twice:
                output = original(*args, **kwargs)
                refuse_change(after, read(), f"{type(model).__name__}.forward")
            return output
        finally:
            with _disable_current_modes():
                before.restore()

    with own_forward(model, forward):
        yield changed
