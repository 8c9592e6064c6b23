"""torch.cond in eager code: where a dispatch mode is active, and in several stages of one process.

torch runs it by compiling it, which it leaves out under a mode, and then its gradients fail; so it runs outside of the
mode. Draws inside it would be torch's own then; capture notices those (capture/surroundings.py). And its compiler is
not made for several threads at once.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch._higher_order_ops import utils
from torch._higher_order_ops.cond import CondAutogradOp
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from raypipe.errors import CaptureError

__all__ = ["run_conds_outside_of"]

_outside_of: type[TorchDispatchMode] | None = None
_original = utils._hop_compile_and_call
_backward = CondAutogradOp.backward
_one_at_a_time = threading.RLock()


def run_conds_outside_of(mode: type[TorchDispatchMode]) -> None:
    """From now on torch.cond runs outside of modes of this type; elsewhere it is torch's as before."""
    global _outside_of
    if _outside_of is None:
        _outside_of = mode
        utils._hop_compile_and_call = _outside
        CondAutogradOp.backward = staticmethod(_locked_backward)  # type: ignore[method-assign]


def _outside(function: Any, args: Any, kwargs: Any = None) -> Any:
    assert _outside_of is not None
    if torch.compiler.is_exporting() and not torch.is_grad_enabled():
        raise CaptureError(
            f"forward calls torch.cond under torch.no_grad{_users_line()}; torch.export would lose the no_grad. Give "
            "torch.cond detached operands outside of the region instead."
        )
    keyed = any(isinstance(mode, _outside_of) for mode in _get_current_dispatch_mode_stack())
    with _one_at_a_time, _disable_current_modes() if keyed else nullcontext():
        return _original(function, args, kwargs)


def _locked_backward(ctx: Any, *gradients: Any) -> Any:
    with _one_at_a_time:
        return _backward(ctx, *gradients)


def _users_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
