"""What holds while torch.export traces a model: only the loss comes out, and nothing is lost in silence."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch

from raypipe.engine.capture.absent_autocast import no_absent_autocast
from raypipe.engine.capture.switched_settings import no_switched_settings
from raypipe.engine.meter import part_of
from raypipe.engine.user_lines import line_outside_torch
from raypipe.errors import CaptureError

__all__ = ["NO_INFERENCE", "loss_only", "nothing_lost", "own_forward", "own_loss", "returned", "same_parameters_train"]

NO_INFERENCE = (
    "What is computed there can take part in no backward, in plain PyTorch neither. Use torch.no_grad() for what shall "
    "not learn."
)


def own_loss(model: torch.nn.Module, output: Any) -> torch.Tensor:
    """The scalar loss in what a model returns: the tensor itself, "loss" in a dict, ``.loss``, or the first of a tuple.

    Raises:
        CaptureError: there is none; says what was returned instead.
    """
    loss = output if isinstance(output, torch.Tensor) else None
    if loss is None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Sequence) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        found = returned(loss if isinstance(loss, torch.Tensor) else output)
        cure = "Pass loss_fn=..., or let the batch carry the labels that make the model compute its loss."
        if isinstance(output, _NUMBERS):
            cure = "Leave out what makes a number of it (.item(), float()): through a number no gradient flows."
        raise CaptureError(
            f"Without a loss_fn the model must return its own scalar loss, but {type(model).__name__} returned "
            f"{found}. {cure}"
        )
    return loss


def returned(value: Any) -> str:
    """What stands where a loss should, in words."""
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
"""Those of torch stand for numbers while a model is traced."""


@contextmanager
def own_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While inside, calls of the model go to this function, which has the signature of the model's forward."""
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
    """While inside, the model returns only its loss: caches and logits would be dead weight at every cut.

    Args:
        kept: keys of outputs that stand behind it all the same, for metrics.
    """
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        output = original(*args, **kwargs)
        loss = own_loss(model, output)
        return (loss, *(part_of(output, key) for key in kept)) if kept else loss

    return own_forward(model, forward)


@contextmanager
def nothing_lost() -> Iterator[None]:
    """While inside, whatever torch.export would drop in silence is refused instead.

    It records the forward of a custom autograd function but not its backward, no gradient hook, and not the mode of
    what is computed under inference_mode: the traced model would train, with wrong gradients. Nor does it record an
    autocast of a device that this machine lacks, nor a setting that is switched for a part. torch's own log and
    standard error are silent meanwhile.
    """
    functions, hooks = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook
    enter = torch.inference_mode.__enter__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] == "torch":
            return functions.__get__(None, cls)(*args, **kwargs)  # since torch 2.14 it is no classmethod of Python's
        raise CaptureError(
            f"The model calls the custom autograd function {cls.__module__}.{cls.__qualname__}, whose backward tracing "
            "would lose. Build the model as an nn.Sequential of blocks, which raypipe runs without tracing, or write "
            "the function with differentiable operations."
        )

    def register_hook(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            "forward registers a gradient hook on a tensor, which tracing would lose. Build the model as an "
            "nn.Sequential of blocks, which raypipe runs without tracing, or drop the hook."
        )

    def enter_inference(self: torch.inference_mode) -> None:
        if self.mode:
            raise CaptureError(
                f"forward enters torch.inference_mode{line_outside_torch(sys._getframe(1))}. {NO_INFERENCE}"
            )
        enter(self)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    torch.inference_mode.__enter__ = enter_inference  # type: ignore[method-assign]
    muted = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # torch logs and prints pages about what the CaptureError says in a paragraph.
        with redirect_stderr(StringIO()), no_absent_autocast(), no_switched_settings():
            yield
    finally:
        logging.disable(muted)
        torch.autograd.Function.apply = functions  # type: ignore[method-assign]
        torch.Tensor.register_hook = hooks  # type: ignore[method-assign]
        torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def same_parameters_train(model: torch.nn.Module) -> Iterator[None]:
    """Refuse code that sets requires_grad of the model's parameters, which a trace would lose; they are put back.

    Raises:
        CaptureError: names the first of them, and what to do.
    """
    before = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
    yield
    changed = [one for one in before if one[1].requires_grad != one[2]]
    for _, parameter, flag in changed:
        parameter.requires_grad_(flag)
    if changed:
        name, _, flag = changed[0]
        raise CaptureError(
            f"{type(model).__name__}.forward sets requires_grad of its parameter {name!r} to {not flag}. What trains "
            "is decided once, before the first step. Set it on the model that the trainer is given, and leave it out "
            "of forward."
        )
