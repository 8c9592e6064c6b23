"""Autocast of CUDA on a machine without it: torch leaves it off, and on a machine with CUDA it would be on.

with torch.autocast("cuda"): ...     made in forward, which says what it is to be
@torch.autocast("cuda")              made with the class: torch has forgotten that it was to be on, its source has not
with self.autocast: ...              made in __init__: nobody knows any more
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from raypipe.engine.user_lines import line_outside_torch
from raypipe.errors import CaptureError

__all__ = ["no_absent_autocast"]


@contextmanager
def no_absent_autocast() -> Iterator[None]:
    """While inside, whoever enters an autocast that may be on elsewhere is refused; not where there is CUDA.

    Raises:
        CaptureError: names the line.
    """
    if torch.cuda.is_available():
        yield
        return
    made, enter = torch.autocast.__init__, torch.autocast.__enter__
    off = weakref.WeakSet[Any]()  # made in here, with enabled=False

    @functools.wraps(made)  # TorchDynamo binds arguments to its signature
    def init(
        self: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        if enabled and device_type == "cuda":
            raise _refusal(line_outside_torch(sys._getframe(1)))
        made(self, device_type, dtype, enabled, *rest, **more)
        off.add(self)

    def entering(self: torch.autocast) -> Any:
        if self.device == "cuda" and self not in off:
            _refuse_unless_off(sys._getframe(1))
        return enter(self)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    torch.autocast.__enter__ = entering  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = made  # type: ignore[method-assign]
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def _refuse_unless_off(frame: FrameType) -> None:
    """An autocast that was made before, in a frame that enters it."""
    while frame.f_code.co_name == "__enter__" and frame.f_back is not None:  # of torch.cuda.amp.autocast
        frame = frame.f_back
    decorated = frame.f_locals.get("func") if frame.f_code.co_name == "decorate_autocast" else None
    if decorated is None:
        raise _refusal(line_outside_torch(frame), known=False)
    switched = _switched(decorated)
    if switched is not False:
        code = inspect.unwrap(decorated).__code__
        raise _refusal(f" at {code.co_filename}:{code.co_firstlineno}", known=switched is True)


def _switched(function: Callable[..., Any]) -> bool | None:
    """What the source of a decorated function says of its autocast; None where that cannot be told."""
    try:
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    for decorator in getattr(parsed, "decorator_list", ()):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("autocast"):
            place = 0 if "cuda.amp" in ast.unparse(decorator.func) else 2
            given = [word.value for word in decorator.keywords if word.arg == "enabled"] + decorator.args[place:][:1]
            if not given:
                return True
            return bool(given[0].value) if isinstance(given[0], ast.Constant) else None
    return None


def _refusal(where: str, *, known: bool = True) -> CaptureError:
    on = "would be on where there is" if known else "may be on where there is, for all that torch remembers of it"
    cure = (
        "" if known else " Where it is meant to be off, make it in forward, or write enabled=False where it decorates."
    )
    return CaptureError(
        f"forward enters torch.autocast('cuda'){where}, which torch leaves off here, for there is no CUDA on this "
        f"machine, and which {on}. Use PipelineConfig(precision='bf16-autocast') instead, so that every stage computes "
        f"in one known precision.{cure}"
    )
