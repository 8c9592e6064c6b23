"""What type an nn.LSTM returns under autocast, where torch.export believes something else.

    x fp32 -> nn.LSTM under autocast    eager: bf16, as one fused operation is cast      torch.export: fp32

The operation itself computes the same either way. What a model makes of the type is fixed when it is traced: the zero
state of a GRU that follows, torch.finfo(h.dtype). So outputs are cast to the type that they have already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["lstm_types_kept"]


@contextmanager
def lstm_types_kept(model: nn.Module) -> Iterator[None]:
    """Inside, where autocast is on, what LSTMs of a model return has the type that it has when nothing is traced."""
    computing = torch.is_autocast_enabled("cpu")  # the precision's, which a capture is made in
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)] if computing else []
    # Known ahead, for in the middle of a trace torch does not run the operation that it runs elsewhere.
    hooks = [lstm.register_forward_hook(_AsUntraced(lstm), with_kwargs=True) for lstm in lstms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _AsUntraced:
    """Casts what an LSTM returns."""

    def __init__(self, lstm: nn.LSTM) -> None:
        own = next(lstm.parameters()).dtype
        self._types = {dtype: _types_of(lstm, dtype) for dtype in (own, torch.get_autocast_dtype("cpu"))}

    def __call__(self, lstm: nn.LSTM, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else kwargs["input"]
        if not torch.is_autocast_enabled("cpu") or not isinstance(given, torch.Tensor):  # off here; a packed sequence
            return output
        types = self._types.get(given.dtype)
        return output if types is None else pytree.tree_map(lambda value, dtype: value.to(dtype), output, types)


def _types_of(lstm: nn.LSTM, dtype: torch.dtype) -> Any:
    """By output, of a small LSTM of the same kind on an input of this type."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = nn.LSTM(
            4, 4, bias=lstm.bias, batch_first=lstm.batch_first, bidirectional=lstm.bidirectional,
            proj_size=min(lstm.proj_size, 2), dtype=next(lstm.parameters()).dtype,
        )  # fmt: skip
        return pytree.tree_map(lambda value: value.dtype, made.train(lstm.training)(torch.zeros(1, 1, 4, dtype=dtype)))
