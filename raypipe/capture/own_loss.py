"""Loss that a model returns among its outputs, and a forward that returns only this loss while it is traced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from raypipe.engine.stage.eval_metrics import part_of
from raypipe.errors import CaptureError


def own_loss(model: torch.nn.Module, output: Any) -> torch.Tensor:
    """Return the scalar loss in a model's output.

    It is the output itself, the item "loss" of a dict, the attribute ``.loss``, or the first item of a tuple.

    Raises:
        CaptureError: the output has no scalar loss.
    """
    loss = output if isinstance(output, torch.Tensor) else None
    if loss is None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Sequence) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        description = returned(loss if isinstance(loss, torch.Tensor) else output)
        cure = "Pass loss_fn=..., or let the batch carry the labels that make the model compute its loss."
        if isinstance(output, _NUMBERS):
            cure = "Leave out what makes a number of it (.item(), float()): through a number no gradient flows."
        raise CaptureError(
            f"Without a loss_fn the model must return its own scalar loss, but {type(model).__name__} returned "
            f"{description}. {cure}"
        )
    return loss


def returned(value: Any) -> str:
    """Describe an output that is not a scalar loss, for error messages."""
    if value is None:
        return "None"
    if isinstance(value, _NUMBERS):
        return "a number"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value))}" if value else "an empty dict"
    if isinstance(value, tuple | list):
        kind = type(value).__name__
        return f"a {kind} of {' and '.join(map(returned, value))}" if value else f"an empty {kind}"
    return f"a value of type {type(value).__name__}"


_NUMBERS = int, float, torch.SymInt, torch.SymFloat
"""Types of numbers; torch's symbols replace them while a model is traced."""


@contextmanager
def own_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``model.forward`` by a function and give it the signature of the original; restored afterwards."""
    before = vars(model).get("forward")
    # torch.export reads the signature to pair dynamic shapes with arguments.
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def loss_only(model: torch.nn.Module, kept: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """Make the model return only its loss within the context: other outputs would be sent to the last stage unused.

    Args:
        kept: keys of outputs that the model still returns, after the loss, because metrics read them.
    """
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        output = original(*args, **kwargs)
        loss = own_loss(model, output)
        return (loss, *(part_of(output, key) for key in kept)) if kept else loss

    return own_forward(model, forward)
