"""Loss that a model returns among its outputs, and a forward that returns only this loss while it is traced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from raypipe.engine.stage.user_metrics import part_of
from raypipe.errors import CaptureError


def own_loss(model: torch.nn.Module, output: Any) -> torch.Tensor:
    """Return the scalar loss in a model's output. The first of these rules that applies finds it:

        1. the output, if it is a tensor
        2. its item or attribute "loss"
        3. the first item of a sequence, if that is a floating-point scalar
        4. at any depth, the only floating-point scalar with the key "loss", else the only one with a gradient (an
           accuracy or a detached term has none), else the only one; but not if its key contains "aux", as "aux_loss"

    A tensor of shape (1,) counts as a scalar if it is the output or has the key "loss", or if no scalar without
    dimensions has a gradient: a learned scale may have this shape.

    Raises:
        CaptureError: the output has no scalar loss, or several scalars that may be the loss.
    """
    if isinstance(output, torch.Tensor):
        loss: Any = output
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, Sequence) and output and _is_scalar(output[0]) and _is_plain(output[0]):
        loss = output[0]
    else:
        loss = _only_scalar(model, output)
    if not _is_scalar(loss):
        description = returned(loss if isinstance(loss, torch.Tensor) else output)
        cure = (
            "Pass loss_fn=..., let the batch carry the labels that make the model compute its loss, or reduce a loss "
            "of each sample to one number, as in loss.mean()."
        )
        if isinstance(output, _NUMBERS):
            cure = "Leave out what makes a number of it (.item(), float()): through a number no gradient flows."
        raise CaptureError(
            f"Without a loss_fn the model must return its own scalar loss, but {type(model).__name__} returned "
            f"{description}. {cure}"
        )
    return loss.reshape(()) if loss.dim() else loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dim() == 0 or _is_one(value))


def _is_plain(scalar: torch.Tensor) -> bool:
    return scalar.dim() == 0 and scalar.is_floating_point()


def _is_one(value: torch.Tensor) -> bool:
    """Return True for the shape (1,), such as that of loss.view(1).

    A first size that is a symbol is a number of samples while a model is traced, and does not count.
    """
    return value.dim() == 1 and isinstance(value.shape[0], int) and value.shape[0] == 1


_WITH_GRADIENT: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
"""Place in a model's output of the only scalar with a gradient: torch.export repeats a trace under no_grad."""


def _only_scalar(model: torch.nn.Module, output: Any) -> torch.Tensor | None:
    """Return the only scalar in an output, see ``own_loss``; None without scalars. Several raise a CaptureError."""
    found = dict({id(scalar): (place, scalar) for place, scalar in _scalars(output, "output")}.values())
    named = {place: scalar for place, scalar in found.items() if place.endswith(("['loss']", ".loss"))}
    trained = {place: scalar for place, scalar in found.items() if scalar.requires_grad}
    trained = {place: scalar for place, scalar in trained.items() if _is_plain(scalar)} or trained
    if isinstance(output, Sequence) and "output[0]" in trained:  # of shape (1,), as all of them
        trained = {"output[0]": trained["output[0]"]}
    if len(trained) == 1:
        _WITH_GRADIENT[model] = next(iter(trained))
    elif not trained and _WITH_GRADIENT.get(model) in found:  # under no_grad
        trained = {_WITH_GRADIENT[model]: found[_WITH_GRADIENT[model]]}
    found = next((some for some in (named, trained) if len(some) == 1), found)
    if len(found) == 1 and "aux" in next(iter(found)):  # the loss itself is left to a loss_fn
        return None
    if len(found) > 1:
        name = type(model).__name__
        raise CaptureError(
            f"{name} returns {len(found)} scalars, {' and '.join(found)}, of which each may be the loss. Let it "
            "return that one, or their sum, as output['loss'] or as the first item of a tuple; or pass loss_fn=..., "
            "which computes the loss from the output and a target."
        )
    return next(iter(found.values()), None)


def _scalars(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, scalar) of floating-point scalars in nested containers; ``place`` is the path of ``value``."""
    if _is_scalar(value) and value.is_floating_point():
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _scalars(item, f"{place}[{key!r}]")
    elif isinstance(value, tuple | list):
        for at, item in enumerate(value):
            yield from _scalars(item, f"{place}[{at}]")
    elif is_dataclass(value) or isinstance(value, SimpleNamespace):
        for name, item in vars(value).items():
            yield from _scalars(item, f"{place}.{name}")


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
    """Replace ``model.forward`` by a function, with the signature of the original, within the context."""
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
