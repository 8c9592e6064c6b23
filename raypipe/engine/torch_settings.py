"""Process-wide settings of torch that change results: workers take those of the planning process.

    torch.set_float32_matmul_precision("high")   set by the user's script, and unknown to every worker
    trainer.fit(...)                             carries it to them

Not carried are the default device, which placement decides, the number of threads, which is one, and the flushing of
denormal numbers to 0, which is a setting of each thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.errors import StageError

_BY_FUNCTIONS = {
    "get_default_dtype": "set_default_dtype",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "backends.mha.get_fastpath_enabled": "backends.mha.set_fastpath_enabled",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "_C._get_sdp_priority_order": "_C._set_sdp_priority_order",
}
_BY_ATTRIBUTES = (
    "backends.mkldnn.enabled",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    # Torch 2.9 has these in addition to those above, some of which fail once one of these was set. They come last, and
    # equal values are not set again: so the older ones keep working if the user set them.
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
_USUAL = {"get_default_dtype": torch.float32, "get_float32_matmul_precision": "highest"}


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Process-wide settings of torch, as read in one process.

    Attributes:
        values: (name below ``torch``, value) of every setting that this version of torch can read.
    """

    values: tuple[tuple[str, Any], ...] = ()

    def take(self) -> None:
        """Apply these settings to this process.

        Raises:
            StageError: names the setting that this process cannot take.
        """
        for name, value in self.values:
            if _read(name) == value:
                continue
            try:
                _write(name, value)
            except Exception as error:
                raise StageError(
                    f"This worker cannot set torch.{name} to {value!r}, as it is where the run was started: "
                    f"{type(error).__name__}: {error}. Leave that setting as torch has it, or let both have one torch."
                ) from error

    def changed(self) -> list[str]:
        """List the names of the settings that now have another value in this process."""
        return [name for name, value in self.values if _read(name) != value]

    def unusual(self) -> dict[str, str]:
        """Return {name: value} of default dtype and matmul precision, without those that have torch's default value."""
        return {f"torch.{name}()": str(value) for name, value in self.values if _USUAL.get(name, value) != value}


def torch_settings() -> TorchSettings:
    """Read the current settings of this process."""
    names = (*_BY_FUNCTIONS, *_BY_ATTRIBUTES)
    values = ((name, _read(name)) for name in names)
    return TorchSettings(tuple((name, value) for name, value in values if value is not None))


def _read(name: str) -> Any:
    """Read a setting by its name below ``torch``; None if this torch cannot read it.

    torch lacks some settings in some versions, and refuses to read a setting once a newer name for it was used.
    """
    try:
        value = _below_torch(name)
        return value() if name in _BY_FUNCTIONS else value
    except (AttributeError, RuntimeError):
        return None


def _write(name: str, value: Any) -> None:
    if (write := _BY_FUNCTIONS.get(name)) is not None:
        function: Callable[[Any], None] = _below_torch(write)
        function(value)
        return
    holder, _, attribute = name.rpartition(".")
    setattr(_below_torch(holder), attribute, value)


def _below_torch(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one intra-op thread inside the context, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
