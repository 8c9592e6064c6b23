"""Settings of torch that forward switches for a part of it, which a trace forgets.

    with sdpa_kernel(SDPBackend.MATH): ...             another kernel, other last digits
    with torch.backends.mkldnn.flags(enabled=False): ...

For the whole of a model they are no matter: workers take those of the process that plans, see engine/torch_settings.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raypipe.engine.torch_settings import torch_settings
from raypipe.engine.user_lines import users_line
from raypipe.errors import CaptureError

__all__ = ["no_switched_settings"]

_SETTERS = {
    "_set_sdp_use_flash": "backends.cuda.flash_sdp_enabled",
    "_set_sdp_use_mem_efficient": "backends.cuda.mem_efficient_sdp_enabled",
    "_set_sdp_use_math": "backends.cuda.math_sdp_enabled",
    "_set_sdp_use_cudnn": "backends.cuda.cudnn_sdp_enabled",
    "_set_sdp_priority_order": "_C._get_sdp_priority_order",
    "_set_mkldnn_enabled": "backends.mkldnn.enabled",
    "_set_cudnn_enabled": "backends.cudnn.enabled",
    "_set_float32_matmul_precision": "get_float32_matmul_precision",
}
"""Of ``torch._C``, that the functions and context managers of torch call, and what each of them sets."""


@contextmanager
def no_switched_settings() -> Iterator[None]:
    """While inside, whoever changes one of these is refused, and it is put back.

    Raises:
        CaptureError: names the setting and the line.
    """
    begun = torch_settings()

    def watched(setter: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            where, before = users_line(sys._getframe(1)), torch_settings()
            done = setter(*args)
            if where and name in begun.changed():  # torch.export switches some itself
                before.take()
                raise CaptureError(
                    f"forward switches torch.{name} for a part of it{where}, which a trace forgets. Set it "
                    "before the run, for all of the model: workers take it over. Or build the model as an "
                    "nn.Sequential of blocks, which raypipe runs without tracing."
                )
            return done

        return call

    plain = {name: getattr(torch._C, name) for name in _SETTERS if hasattr(torch._C, name)}
    for name, setter in plain.items():
        setattr(torch._C, name, watched(setter, _SETTERS[name]))
    try:
        yield
    finally:
        for name, setter in plain.items():
            setattr(torch._C, name, setter)
