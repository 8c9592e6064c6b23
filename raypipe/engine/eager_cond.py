"""torch.cond in eager code where a dispatch mode is active.

torch runs it by compiling it, which it leaves out under a mode, and then its gradients fail. So it runs outside of the
mode. Draws inside it would be torch's own then; capture notices those (capture/surroundings.py).
"""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops import utils
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = ["run_conds_outside_of"]

_outside_of: type[TorchDispatchMode] | None = None
_original = utils._hop_compile_and_call


def run_conds_outside_of(mode: type[TorchDispatchMode]) -> None:
    """From now on torch.cond runs outside of modes of this type; elsewhere it is torch's as before."""
    global _outside_of
    if _outside_of is None:
        _outside_of = mode
        utils._hop_compile_and_call = _outside


def _outside(function: Any, args: Any, kwargs: Any = None) -> Any:
    assert _outside_of is not None
    if not any(isinstance(mode, _outside_of) for mode in _get_current_dispatch_mode_stack()):
        return _original(function, args, kwargs)
    with _disable_current_modes():
        return _original(function, args, kwargs)
