"""Explain why a model or a loss fails, by module and data column instead of by graph node.

After a failure the user's model and loss run once more as plain PyTorch, with hooks that find the module that raises
and its input. If they run without an error, the cause is something that a graph cannot hold, and the error quotes the
user's line.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from raypipe.capture.guards import in_mode
from raypipe.capture.own_loss import returned
from raypipe.errors import CaptureError, DataError, RaypipeError
from raypipe.user_lines import library_function, quoted, short

_OF_DEVICES = re.compile(
    r"with CUDA enabled|NVIDIA|CUDA driver|same device|two different devices|is not available.*CUDA"
)
_ON_DEVICES = (
    "Leave .cuda(), .to(device) and device=... out of it: a stage has its part of the model and of the data where it "
    "computes, on a GPU with ScalingConfig(use_gpu=True). What is made there goes beside an input, as in "
    "x.new_zeros(3) or device=x.device."
)
_ON_TYPES = "Convert it to the type that is expected, as in {example}"
_ON_GRADIENTS = (
    "Models are also called without gradients, as in an evaluation. Differentiate under torch.enable_grad(), in a "
    "block of an nn.Sequential, which is not traced; register a hook only if the tensor has requires_grad."
)

_CONVERSIONS = {"__int__", "__float__", "__index__"}
"""Functions of torch that make a number of Python from one that a trace does not know."""
_PACKING = {"pack_padded_sequence", "pack_sequence"}
_CONVERTED = re.compile(r"Could not extract specialized|data-dependent expression z?uf\d+ ")
"""Messages on int(x) and float(x) of a tensor; uf0 is torch's symbol for an unknown float."""


class Inputs(NamedTuple):
    """Arguments of a model for one micro-batch.

    Attributes:
        args, kwargs: positional and keyword arguments.
        columns: names of the data columns in ``args``, followed by those in ``kwargs``.
        varying: (column, dimension) of every size, besides the number of samples, that differs between mini-batches.
    """

    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor]
    columns: tuple[Any, ...]
    varying: frozenset[tuple[Any, int]] = frozenset()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.args, *self.kwargs.values())

    @property
    def free_sizes(self) -> frozenset[tuple[Any, int]]:
        """(Column, dimension) of the sizes to leave open in a trace: ``varying``, and lengths of token ids."""
        tokens = {(name, 1) for name, x in zip(self.columns, self.tensors, strict=True) if is_tokens(x)}
        return self.varying | tokens


def is_tokens(value: torch.Tensor) -> bool:
    """Return True for a column of token ids: shape (b, length), length above 1, not floating-point or complex."""
    return value.dim() == 2 and not value.is_floating_point() and not value.is_complex() and value.shape[1] > 1


def untraceable(model: nn.Module, inputs: Inputs, error: Exception) -> RaypipeError:
    """Build the error to raise after torch.export has failed on a model with ``error``."""
    _, misfit = misfit_of_model(model, inputs)
    if misfit is not None:
        return misfit
    name, where, text = type(model).__name__, quoted(error), short(error)
    if _OF_DEVICES.search(str(error)):
        return CaptureError(f"{name} fails{where}: {text} {_ON_DEVICES}")
    blocks = "build the model as an nn.Sequential of blocks, which are not traced"
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if _packs(error):
        return CaptureError(
            f"{name} packs sequences{where}, and the sizes of a PackedSequence are values of the data, which a graph "
            "does not hold. Leave the sequences padded and take the output at each one's end (y, _ = self.rnn(x); "
            "y[torch.arange(len(y), device=y.device), lengths - 1]). If the RNN is bidirectional, pack and unpack "
            "within one block of an nn.Sequential, which is not traced."
        )
    if _CONVERTED.search(str(error)) or frames & _CONVERSIONS:
        return CaptureError(
            f"{name} makes a number of Python from values of its data{where}, and a graph holds tensors. Leave the "
            f"tensor as it is, or take .item() or .tolist() in place of int() and float(); or {blocks}."
        )
    if "data-dependent" in str(error) or type(error).__name__.startswith("GuardOnDataDependent"):
        setting = "switch it off if a setting does (as layerdrop=0.0 of transformers)"
        cure = f": use torch.where or torch.cond, move the branch out of forward, {setting}"
        if (function := library_function(error)) is not None:
            cure = (
                f", and this branch is in a library: {setting}, assign a function of yours that always goes the way of "
                f"your data to {function}"
            )
        return CaptureError(
            f"{name} decides by values of its data or buffers{where}. A graph of stages has one way only{cure}, or "
            f"{blocks}."
        )
    if "fake tensor in the exported program" in str(error):
        return CaptureError(
            f"{name} makes or changes a tensor in a way that a trace does not see, as x.as_subclass(kind) does. Take "
            f"an operation of torch, such as x.detach(), or {blocks}."
        )
    if isinstance(model, nn.Sequential):
        return CaptureError(f"{name} could not be captured{where}: {text} Change that line, or that module.")
    return CaptureError(f"{name} could not be traced{where}: {text} Change that line, or {blocks}.")


def _packs(error: Exception) -> bool:
    """Return True if a function that was running when ``error`` was raised had a PackedSequence, or made one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held = any(isinstance(x, PackedSequence) for frame in frames for x in frame.f_locals.values())
    return held or any(frame.f_code.co_name in _PACKING for frame in frames)


def not_as_captured(kind: str, error: Exception, title: str) -> CaptureError:
    """Build the error for a captured "graph" or "loss" (``kind``) that fails although the model ``title`` does not."""
    return CaptureError(
        f"The {kind} of {title}, as it was captured, does not run although the model itself does{quoted(error)}: "
        f"{short(error)} Build the model as an nn.Sequential of blocks, which are not traced, or leave out of forward "
        "what this names."
    )


def misfit_of_model(model: nn.Module, inputs: Inputs, *, training: bool = True) -> tuple[Any, RaypipeError | None]:
    """Run the model as plain PyTorch, without gradients, in training or evaluation mode.

    Returns:
        (output, None), or (None, error that names the module that failed and its input).
    """
    try:
        with _left_alone(model, training):
            return model(*inputs.args, **inputs.kwargs), None
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        first = error
    # A second run: torch.cond does not run as usual under hooks.
    module, args, again = _failing(model, inputs, training, nullcontext())
    return None, _misfit(model, module, args, inputs, again or first, training)


def _failing(
    model: nn.Module, inputs: Inputs, training: bool, beside: AbstractContextManager[Any]
) -> tuple[nn.Module, tuple[Any, ...], Exception | None]:
    """Run a model that fails again; return the innermost module that fails, its positional arguments, and the error.

    Args:
        beside: context of the run.
    """
    running: list[tuple[nn.Module, tuple[Any, ...]]] = []

    def leave(*_: Any) -> None:
        running.pop()

    enter = register_module_forward_pre_hook(lambda module, args: running.append((module, args)))
    hooks = enter, register_module_forward_hook(leave)
    failed = None
    try:
        with _left_alone(model, training), beside:
            model(*inputs.args, **inputs.kwargs)
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        failed = error
    finally:
        for hook in hooks:
            hook.remove()
    return (*(running[-1] if running else (model, ())), failed)


class _Origins(TorchFunctionMode):
    """Record, for each tensor that torch's functions return inside, what its values are computed from.

    Attributes:
        of: tensor -> names of data columns, and None if a parameter has a part in it. Buffers and new tensors have no
            origin, such as positions, which depend on sizes only.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.of = WeakTensorKeyDictionary()
        for parameter in model.parameters():
            self.of[parameter] = frozenset([None])
        for buffer in model.buffers():
            self.of[buffer] = frozenset()
        for name, tensor in zip(inputs.columns, inputs.tensors, strict=True):
            self.of[tensor] = frozenset([name])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        origin = frozenset().union(*(self.of.get(x, ()) for x in _tensors_in((args, kwargs))))
        made = function(*args, **kwargs)
        # A function that returns nothing, such as __setitem__, or its first argument wrote into that one.
        written = args[:1] if made is None or (args and made is args[0]) else ()
        bases = [x._base for x in _tensors_in(written) if x._base is not None]
        for x in (*_tensors_in((made, written)), *bases):
            self.of[x] = origin | self.of.get(x, frozenset())
        return made


def _tensors_in(thing: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(thing) if isinstance(x, torch.Tensor)]


def _origin(model: nn.Module, inputs: Inputs, training: bool) -> frozenset[Any]:
    """Return what the first tensor argument of the failing module is computed from; see ``_Origins.of``.

    If that is unknown, the result is as for a tensor that depends on parameters.
    """
    origins = _Origins(model, inputs)
    _, args, failed = _failing(model, inputs, training, origins)
    shown = next(iter(_tensors_in(args)), None)
    unknown = frozenset([None])
    return unknown if failed is None or shown is None else origins.of.get(shown, unknown)


def misfit_of_loss(loss_fn: Callable[[Any, Any], Any], output: Any, target: torch.Tensor, column: Any) -> RaypipeError:
    """Call a failing loss_fn again, and build an error that describes its arguments and the fix.

    Args:
        output: output of the model.
        column: name of the data column that is the target.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_fn(output, target)
    except Exception as error:  # noqa: BLE001  (as above)
        text, described = short(error), returned(output)
        cure = "Make them fit in the data, or in a function of your own."
        if isinstance(output, torch.Tensor):
            described = f"an output of {_shown(output)}"
        else:
            part = "output['logits']" if isinstance(output, Mapping) else "output[0]"
            cure = f"Let it take the part that it compares, as in lambda output, target: cross_entropy({part}, target)."
        if (remedy := _remedy(error)) is not None:
            cure = remedy
        elif "out of bounds" in text:
            cure = "Number the classes of the target from 0, and give the model an output for each."
        return DataError(
            f"loss_fn cannot take {described} and column {column!r} of the data as target, {_shown(target)}"
            f"{quoted(error)}: {text} {cure}"
        )
    return CaptureError("loss_fn fails on what the stages give it, although it runs in plain PyTorch.")


def _remedy(error: Exception) -> str | None:
    """Return the advice for an error about devices, element types or gradients; None for other errors."""
    text = str(error)
    if _OF_DEVICES.search(text):
        return _ON_DEVICES
    if any(word in text for word in ("dtype", "scalar type", "BFloat16", "Half")):
        cure = _ON_TYPES.format(example="y.long()" if "Long" in text else "x.float()")
        in_16_bits = any(word in text for word in ("BFloat16", "Half"))
        return f"{cure}, or set precision='bf16-autocast'." if in_16_bits else f"{cure}."
    return _ON_GRADIENTS if "does not require grad" in text or "doesn't require gradient" in text else None


def _misfit(
    model: nn.Module, module: nn.Module, args: tuple[Any, ...], inputs: Inputs, error: Exception, training: bool
) -> RaypipeError:
    """Build the error for a module that failed; ``module`` may be the whole model.

    Args:
        args: positional arguments of the module.
        inputs: arguments of the model, to find out whether the module reads a data column.
        error: exception that the module raised.
        training: mode of the model.
    """
    where, text, remedy = quoted(error), short(error), _remedy(error)
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if module is model or not tensors:
        batch = " and ".join(_shown(x) for x in inputs.tensors) or "the data"
        cure = "Mend it there. A micro-batch is a part of the mini-batch: the model must take any number of samples."
        return CaptureError(
            f"{type(model).__name__} fails in plain PyTorch too, on a micro-batch of {batch}{where}: {text} "
            f"{remedy or cure}"
        )
    path = next((repr(name) for name, other in model.named_modules() if other is module), "made in forward")
    kind = repr(module)
    kind = kind if len(kind) <= 72 and "\n" not in kind else type(module).__name__
    held = tuple(zip(inputs.columns, inputs.tensors, strict=True))
    shown, column = next(((x, name) for x in tensors for name, of in held if _part_of(x, of)), (tensors[0], None))
    what, cure, of_data = "its input", "Make it fit what comes before it.", True
    if column is not None:
        what, cure = f"column {column!r} of the data", "Change the data, or the sizes of the module."
    elif remedy is not None or None in (origin := _origin(model, inputs, training)):
        of_data = False
    elif origin:
        columns = f"column{'s' * (len(origin) > 1)} {' and '.join(sorted(map(repr, origin)))} of the data"
        what = f"what forward computes from {columns}"
        cure = "Change the data, what forward computes from it, or the sizes of the module."
    else:
        what, cure = "its input, which depends on sizes only", "Change the sizes of the data, or those of the module."
    return (DataError if of_data else CaptureError)(
        f"The module {path}, {kind}, cannot take {what}, {_shown(shown)}{where}: {text} {remedy or cure}"
    )


def _part_of(x: torch.Tensor, held: torch.Tensor) -> bool:
    """Return True if ``x`` is the data column ``held`` or a view of it, such as bbox[:, :, 0]."""
    plain = all(one.layout is torch.strided and not one.is_nested for one in (x, held))
    return plain and x.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


@contextmanager
def _left_alone(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the model to training or evaluation mode for the code inside, and switch gradients and warnings off.

    Modes, buffers and torch's random generator are restored afterwards.
    """
    with (
        in_mode(model, training=training),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _shown(value: Any) -> str:
    """Describe a value: shape and dtype of a tensor, and its range if it has integers; the type of anything else."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        values = ""
        if value.numel() and not value.is_floating_point() and value.dtype is not torch.bool and not value.is_complex():
            values = f" from {int(value.min())} to {int(value.max())}"
        return f"shape {tuple(value.shape)} and type {kind}{values}"
    return f"type {type(value).__name__}"
