"""Why a model cannot be captured or run, in the words of its own modules instead of those of a graph.

When something fails, the user's model and loss are run once more as plain PyTorch, with an eye on every module: the one
that raises, what went into it and who gave that say whether the data or the model is meant. Where plain PyTorch runs,
the cause is in what a graph can hold, and the line is quoted that asks for more.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from raypipe.engine.capture.guards import NO_INFERENCE, returned
from raypipe.engine.shipping import unshippable
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import CaptureError, ConfigError, DataError, RaypipeError

__all__ = ["draws_from", "misfit_of_loss", "misfit_of_model", "not_as_captured", "untraceable"]

_NARROW = (torch.bfloat16, torch.float16)
_OF_DEVICES = re.compile(
    r"with CUDA enabled|NVIDIA|CUDA driver|same device|two different devices|is not available.*CUDA"
)
_ON_DEVICES = (
    "Leave .cuda(), .to(device) and device=... out of it: a stage has its part of the model and of the data where it "
    "computes, on a GPU with ScalingConfig(use_gpu=True). What is made there goes beside an input, as in "
    "x.new_zeros(3) or device=x.device."
)


def untraceable(
    model: nn.Module, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor], columns: Sequence[Any],
    error: Exception,
) -> RaypipeError:  # fmt: skip
    """The error to raise where torch.export gave up on a model.

    Args:
        args, kwargs: one micro-batch.
        columns: names of the data columns behind args, then kwargs.
        error: what it gave up with.
    """
    _, found = misfit_of_model(model, args, kwargs, columns)
    if found is not None:
        return found
    if type(model) is nn.Sequential and (what := unshippable("model", model)):
        return ConfigError(f"{what} Make it in forward, or keep it out of the model.")
    name, where, said = type(model).__name__, quoted(error), short(error)
    if _OF_DEVICES.search(str(error)):
        return CaptureError(f"{name} asks for a device{where}: {said} {_ON_DEVICES}")
    if "nference tensors" in str(error):
        return CaptureError(f"{name} enters torch.inference_mode{where}: {said} {NO_INFERENCE}")
    if (generator := _generator_in(error)) is not None:
        return draws_from(model, generator)
    blocks = "build the model as an nn.Sequential of blocks, which are not traced"
    if any("torch/distributions" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return CaptureError(
            f"{name} makes a distribution of torch.distributions{where}, which looks at the values of its arguments. "
            f"Switch that off: torch.distributions.Normal(mean, scale, validate_args=False). Or {blocks}."
        )
    if "data-dependent" in str(error) or type(error).__name__.startswith("GuardOnDataDependent"):
        return CaptureError(
            f"{name} decides by values of its data{where}. A graph of stages has one way only: use torch.where or "
            f"torch.cond, move the branch out of forward, or {blocks}."
        )
    return CaptureError(f"{name} could not be traced{where}: {said} Change that line, or {blocks}.")


def draws_from(model: nn.Module, generator: torch.Generator) -> CaptureError:
    """The error for a forward that draws from a generator other than torch's own."""
    held = (
        f"the torch.Generator {'.'.join(part for part in ('model', path, name) if part)}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # What a traced program holds may be a copy.
        if isinstance(value, torch.Generator) and torch.equal(value.get_state(), generator.get_state())
    )
    return CaptureError(
        f"forward draws from {next(held, 'a torch.Generator of its own')}, whose state no stage shares and no "
        "checkpoint holds. Draw without generator=, as every draw is keyed by seed, step and micro-batch, or keep "
        "numbers that shall not change in a buffer."
    )


def _generator_in(error: Exception) -> torch.Generator | None:
    """The generator that torch.export stopped at: since torch 2.13 it is in the graph instead."""
    if not (isinstance(error, NotImplementedError) and "Generator" in str(error)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((value for value in held if isinstance(value, torch.Generator)), None)


def not_as_captured(kind: str, error: Exception, title: str) -> CaptureError:
    """The error for a captured graph that does not run although the model itself does."""
    return CaptureError(
        f"The {kind} of {title}, as it was captured, does not run although the model itself does{quoted(error)}: "
        f"{short(error)} Build the model as an nn.Sequential of blocks, which are not traced, or leave out of forward "
        "what this names."
    )


def misfit_of_model(
    model: nn.Module,
    args: Sequence[torch.Tensor],
    kwargs: Mapping[str, torch.Tensor],
    columns: Sequence[Any],
    *,
    training: bool = True,
) -> tuple[Any, RaypipeError | None]:
    """The output of the model as plain PyTorch, or why there is none: names module, input, and what is meant."""
    data = {id(value): name for name, value in zip(columns, (*args, *kwargs.values()), strict=True)}
    try:
        with _left_alone(model, training):
            return model(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        first = error
    eye = _Eye(model)  # only now: under hooks torch.cond is none
    try:
        with _left_alone(model, training), eye.watching():
            model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (as above)
        return None, _misfit(model, eye, data, error)
    return None, _misfit(model, eye, data, first)


def misfit_of_loss(loss_fn: Callable[[Any, Any], Any], output: Any, target: torch.Tensor, column: Any) -> RaypipeError:
    """Why a loss_fn does not take the model's output and the target; call it only after it has failed."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            loss_fn(output, target)
    except Exception as error:  # noqa: BLE001  (as above)
        where, said = quoted(error), short(error)
        if _OF_DEVICES.search(str(error)):
            return CaptureError(f"loss_fn asks for a device{where}: {said} {_ON_DEVICES}")
        got = f"an output of {_shown(output)} and column {column!r} of the data as target, {_shown(target)}"
        if not target.is_floating_point() and "out of bounds" in said:
            return DataError(
                f"loss_fn cannot take {got}{where}: {said} Number the classes of the target from 0, and give the model "
                "an output for each."
            )
        if isinstance(error, Warning):
            return DataError(
                f"loss_fn gets {got}{where}: it would compare every output with the targets of all samples. Reshape "
                "one of them, as in output.squeeze(1) or target[:, None]."
            )
        if _takes(loss_fn, target, output):
            return ConfigError(
                f"loss_fn cannot take {got}{where}: {said} It takes them the other way round, but it is called as "
                "loss_fn(output, target). Swap its parameters."
            )
        if (part := _part_of(output)) is not None:
            return ConfigError(
                f"loss_fn cannot take what the model returns, {returned(output)}{where}: {said} Let it take the part "
                f"that it compares, as in loss_fn=lambda output, target: cross_entropy({part}, target)."
            )
        cure = "Convert the target in the data" if _is_of_types(said) else "Make the target and the output fit"
        if _is_of_types(said) and isinstance(output, torch.Tensor) and output.dtype in _NARROW:
            cure = "Let it take output.float(), or set precision='bf16-autocast'"
        return DataError(f"loss_fn cannot take {got}{where}: {said} {cure}, or reshape them in a function of your own.")
    return CaptureError("loss_fn fails on what the stages give it, although it runs in plain PyTorch.")


def _is_of_types(said: str) -> bool:
    """Whether an operation complains of an element type."""
    return any(word in said for word in ("dtype", "scalar type", "BFloat16", "Half"))


def _part_of(output: Any) -> str | None:
    """How a loss would get at a tensor of an output that is none itself; None of a tensor."""
    if isinstance(output, torch.Tensor):
        return None
    if isinstance(output, tuple | list):
        return "output[0]"
    names = list(output if isinstance(output, Mapping) else getattr(output, "__dict__", {}))
    name = "logits" if "logits" in names else next(iter(names), "")
    return f"output[{name!r}]" if isinstance(output, Mapping) else f"output.{name}"


def _takes(loss_fn: Callable[[Any, Any], Any], output: Any, target: Any) -> bool:
    """Whether it makes a loss of them."""
    try:
        with torch.no_grad():
            loss = loss_fn(output, target)
    except Exception:  # noqa: BLE001  (whatever the user's code raises)
        return False
    return isinstance(loss, torch.Tensor) and loss.dim() == 0


class _Eye:
    """Which module is running, what went in, and which one came to an end last."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.running: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.last: tuple[nn.Module, Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.running.append((module, args))

        def leave(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self.running.pop()
            if not list(module.children()):
                self.last = module, output

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _misfit(model: nn.Module, eye: _Eye, data: Mapping[int, Any], error: Exception) -> RaypipeError:
    module, args = eye.running[-1] if eye.running else (model, ())
    where, said = quoted(error), short(error)
    if "does not require grad" in said:
        return CaptureError(
            f"{type(model).__name__} asks autograd for a derivative{where}: {said} Models are also called without "
            "gradients, as in an evaluation: put what is differentiated under torch.enable_grad(), in a block of an "
            "nn.Sequential, which is not traced."
        )
    if "doesn't require gradient" in said:
        return CaptureError(
            f"{type(model).__name__} registers a gradient hook on what it computes{where}: {said} Models are also "
            "called without gradients, as in an evaluation. Register it only if the tensor has requires_grad."
        )
    if _OF_DEVICES.search(str(error)):
        asks = type(model).__name__
        if module is not model:
            asks = f"The module {eye.names.get(id(module), '?')!r}, {_described(module)},"
        return CaptureError(f"{asks} asks for a device{where}: {said} {_ON_DEVICES}")
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if module is model or not tensors:
        cure = "Mend it there. A micro-batch is a part of the mini-batch: the model must take any number of samples."
        within = ""
        if _is_of_types(said) and torch.is_autocast_enabled("cpu"):
            within = f" under torch.autocast in {str(torch.get_autocast_dtype('cpu')).removeprefix('torch.')}"
            off = "with torch.autocast(x.device.type, enabled=False)"
            cure = f"Convert what comes in 16 bits there, or switch it off: {off}."
        elif _is_of_types(said) and any(x.dtype in _NARROW for x in (*tensors, *model.parameters())):
            cure = "Compute there in fp32, as in x.float(), or set precision='bf16-autocast'."
        return CaptureError(
            f"{type(model).__name__} fails in plain PyTorch too{within}, on a micro-batch of {_batch(tensors)}{where}: "
            f"{said} {cure}"
        )
    who = f"The module {eye.names.get(id(module), '?')!r}, {_described(module)},"
    types = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()}
    odd = next((x for x in tensors if types and x.dtype not in types), None)
    cure = "Change the shape of the samples, or the sizes of the module."
    if odd is not None:
        cure = f"Convert the data, as in x.to({next(iter(types))})."
    column = next((data[id(x)] for x in tensors if id(x) in data), None)
    if eye.last is None and odd is not None and column is None:
        weight = f"{eye.names.get(id(module), '?')}.{next(name for name, _ in module.named_parameters(recurse=False))}"
        return CaptureError(
            f"{who} cannot take what forward has made of the data, {_shown(odd)}{where}: {said} Let forward convert it "
            f"to the type of the weights, as in x.to(self.{weight}.dtype), or take precision='bf16-autocast'."
        )
    if eye.last is None:
        what = f"column {column!r} of the data" if column is not None else "what it gets of the data"
        return DataError(f"{who} cannot take {what}, {_shown(tensors[0])}{where}: {said} The data is meant. {cure}")
    before, output = eye.last
    gave = f"{eye.names.get(id(before), '?')!r}, {_described(before)}, gave {_shown(output)}"
    return CaptureError(
        f"{who} cannot take its input, {_shown(tensors[0])}{where}: {said} The model is meant, not the data: before it "
        f"{gave}. Make the two fit."
    )


@contextmanager
def _left_alone(model: nn.Module, training: bool) -> Iterator[None]:
    """In one mode, without gradients; modes, buffers and the generator are put back."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train(training)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _described(module: nn.Module) -> str:
    text = repr(module)
    return text if len(text) <= 72 and "\n" not in text else type(module).__name__


def _batch(tensors: Sequence[torch.Tensor]) -> str:
    return " and ".join(_shown(x) for x in tensors) or "the data"


def _shown(value: Any) -> str:
    """Shape and type of a tensor; the kind of anything else."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        values = ""
        if value.numel() and not value.is_floating_point() and value.dtype is not torch.bool and not value.is_complex():
            values = f" from {int(value.min())} to {int(value.max())}"
        return f"shape {tuple(value.shape)} and type {kind}{values}"
    return f"type {type(value).__name__}"
