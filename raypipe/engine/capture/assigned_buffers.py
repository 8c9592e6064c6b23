"""Buffers that forward assigns to, self.m = 0.9 * self.m + x, where others write self.m.mul_(0.9).add_(x).

torch.export writes what was assigned to a buffer of the model itself, and forgets what was assigned to one of a module
inside: there the buffer would keep its first value.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from raypipe.errors import CaptureError

__all__ = ["assigned_buffers"]


def assigned_buffers(model: nn.Module) -> Callable[[], None]:
    """To call before a forward that is traced; what is returned, after it.

    Raises:
        CaptureError: the second call; names a buffer of a module inside that is another tensor now.
    """
    held = [
        (module, path, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if module is not model and buffer is not None
    ]

    def check() -> None:
        for module, path, name, buffer in held:
            if module._buffers.get(name) is not buffer:
                raise CaptureError(
                    f"forward puts another tensor in place of the buffer {f'{path}.{name}'!r}, which a trace forgets. "
                    f"Change what the buffer holds: self.{name}.copy_(...)."
                )

    return check
