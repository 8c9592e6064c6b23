"""torch.cond in eager code: where a dispatch mode is active, and in several stages of one process.

torch runs it by compiling it, which it leaves out under a mode, and then its gradients fail; so it runs outside of the
mode. Draws inside it would be torch's own then; capture notices those (capture/surroundings.py). And its compiler is
not made for several threads at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.cond import CondAutogradOp
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from raypipe.engine.torch_parts import enter_around_operators
from raypipe.errors import CaptureError

__all__ = ["evaluating", "run_conds_outside_of"]

_outside_of: type[TorchDispatchMode] | None = None
_backward = CondAutogradOp.backward
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)
_one_at_a_time = threading.RLock()
_without_gradients = ContextVar("_without_gradients", default=False)


def run_conds_outside_of(mode: type[TorchDispatchMode]) -> None:
    """From now on torch.cond runs outside of modes of this type; elsewhere it is torch's as before."""
    global _outside_of
    if _outside_of is None:
        _outside_of = mode
        enter_around_operators(_outside)
        CondAutogradOp.backward = staticmethod(_locked_backward)  # type: ignore[method-assign]


@contextmanager
def evaluating() -> Iterator[None]:
    """Nothing has gradients inside, as in an evaluation, so that no no_grad of a forward can be lost."""
    token = _without_gradients.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _without_gradients.reset(token)


@contextmanager
def _outside() -> Iterator[None]:
    assert _outside_of is not None
    if torch.compiler.is_exporting() and not (torch.is_grad_enabled() or _without_gradients.get()):
        raise CaptureError(
            f"forward calls torch.cond under torch.no_grad{_users_line()}; torch.export would lose the no_grad. Give "
            "torch.cond detached operands outside of the region instead."
        )
    keyed = any(isinstance(mode, _outside_of) for mode in _get_current_dispatch_mode_stack())
    with _one_at_a_time, _disable_current_modes() if keyed else nullcontext():
        yield


def _locked_backward(ctx: Any, *gradients: Any) -> Any:
    with _one_at_a_time:
        return _backward(ctx, *gradients)


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
