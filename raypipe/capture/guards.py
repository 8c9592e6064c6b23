"""Context managers around a capture, which refuse what stages would not reproduce and restore what forward changes.

    dropped by torch.export  gradient hooks, settings of torch that forward switches, torch.autocast("cuda") on a
                             machine without CUDA
    not shared by stages     numpy's and Python's random generators, Python state that changes with every call

Whatever else a trace drops changes the loss, the gradients or the buffers, which preflight/verify.py compares.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from raypipe.capture.own_loss import own_forward
from raypipe.capture.python_state import Memory, read_memory, refuse_change
from raypipe.data.item_randomness import generator_states, own_generators, seed_generators
from raypipe.engine.stage.autograd_functions import as_operation
from raypipe.engine.stage.generated_source import CTC_LOSS
from raypipe.engine.stage.stage import same_bits
from raypipe.engine.torch_settings import torch_settings
from raypipe.errors import CaptureError
from raypipe.user_lines import line_outside_torch, users_line

_UNTRACED = "Build the model as an nn.Sequential of blocks, which raypipe runs without tracing, or {otherwise}."
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
"""Setters in ``torch._C``, which torch's functions and context managers call -> name of the setting below ``torch``."""
_CUDA_AUTOCAST = (
    "forward enters torch.autocast('cuda'){where}, which torch leaves off here, for there is no CUDA on this machine, "
    "and which may be on where workers run. Use PipelineConfig(precision='bf16-autocast') instead; if it is meant to "
    "be off, make it in forward with enabled=False."
)


class _OfThread:
    """Method with one function in the thread that created this object, and another in all other threads."""

    def __init__(self, here: Any, elsewhere: Any) -> None:
        self._thread, self._here, self._elsewhere = threading.get_ident(), here, elsewhere

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        chosen = self._here if threading.get_ident() == self._thread else self._elsewhere
        return chosen.__get__(instance, owner)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a method of a class, or a function of a Python module, within the context.

    Other threads, which may be stages of a run, keep the method; they get the function.
    """
    before = vars(owner)[name]
    setattr(owner, name, _OfThread(value, before) if isinstance(owner, type) else value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def data_detached() -> Iterator[None]:
    """Let a trace follow ``x.data``, and conversions of modules that change nothing; restored afterwards.

    torch.export fails at both. For a traced tensor ``x.data`` is ``x.detach()``. An assignment of the tensor's own
    values (``self.weight.data = self.weight.data.to(device)``) and a conversion to the dtype and device that a module
    has (``self.head = self.head.to(x.dtype)``) do nothing, as in plain PyTorch.

    Raises:
        CaptureError: forward assigns other values to ``x.data``, or converts a module to another dtype or device.
    """
    held: Any = torch.Tensor.data
    convert = torch.nn.Module._apply

    def read(x: torch.Tensor) -> torch.Tensor:
        return x.detach() if isinstance(x, FakeTensor) else held.__get__(x)

    def write(x: torch.Tensor, values: torch.Tensor) -> None:
        if not isinstance(x, FakeTensor):
            held.__set__(x, values)
        elif not _unchanged(x, values):
            of, cure = "a tensor", "Write x = x + (new - x).detach(), which has the same values and gradients"
            if isinstance(x, torch.nn.Parameter):
                of, cure = "a parameter", "Make new values in __init__ or in the optimizer's step"
            raise CaptureError(
                f"forward replaces the values of {of} by assigning to its .data{users_line(sys._getframe(1))}, which a "
                f"trace forgets. {cure}."
            )

    def converted(self: torch.nn.Module, fn: Callable[..., torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if not any(isinstance(x, FakeTensor) for x in tensors):
            return convert(self, fn, recurse)
        with _disable_current_modes():  # a call that is traced would take the place of the parameter in the graph
            kinds = {(x.dtype, x.device) for x in tensors}
            made = [(fn(torch.empty(0, dtype=dtype, device=device)), dtype, device) for dtype, device in kinds]
        if all(one.dtype == dtype and one.device == device for one, dtype, device in made):
            return self
        raise CaptureError(
            f"forward converts a {type(self).__name__} to another dtype or device{users_line(sys._getframe(1))}, which "
            "a trace forgets. Convert it before the run, or leave it out: stages convert by precision=."
        )

    torch.Tensor.data = property(read, write)  # type: ignore[assignment]  # the original is an attribute of its base
    try:
        with _patched(torch.nn.Module, "_apply", converted):
            yield
    finally:
        del torch.Tensor.data


def _unchanged(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if ``values`` is the memory of ``x`` in its dtype and shape."""
    aliases = torch._C._is_alias_of(x, values)  # type: ignore[attr-defined]
    return bool(values.dtype == x.dtype and values.shape == x.shape and aliases)


@contextmanager
def one_time_step() -> Iterator[None]:
    """Let a trace run one time step of nn.RNN, GRU and LSTM, and repeat its output; restored afterwards.

    Each of them is one operation of the trace. To find the shapes of its outputs, torch runs all steps, which fixes
    their number.
    """

    def repeated(layer: Callable[..., Any]) -> Callable[..., Any]:
        def of_one(steps: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            output, last = layer(steps[:1], *args, **kwargs)
            return output.repeat(steps.shape[0], 1, 1), last

        return of_one

    with (
        _patched(decompositions, "one_layer_rnn", repeated(decompositions.one_layer_rnn)),
        _patched(decompositions, "one_layer_lstm", repeated(decompositions.one_layer_lstm)),
    ):
        yield


@contextmanager
def symbolic_len(model: torch.nn.Module) -> Iterator[None]:
    """Let ``len(x)`` of a traced tensor be its symbolic first size, as ``x.shape[0]`` is; restored afterwards.

    Python's own ``len`` returns a number, so that the trace would hold for the example's number of samples only. The
    name is bound in the files of the model's classes; another ``builtins.len`` would confuse torch.compile.
    """

    def len_(of: Any, /) -> Any:
        symbolic = isinstance(of, torch.Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt)
        return of.shape[0] if symbolic else len(of)

    bound = [file for file in _files_of(model) if file is not globals() and "len" not in file]
    for file in bound:
        file["len"] = len_
    try:
        yield
    finally:
        for file in bound:
            del file["len"]


def _files_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the global names of each file that defines a class of the model, except for torch's."""
    classes = {one for module in model.modules() for one in type(module).__mro__}
    names = {one.__module__ for one in classes if one.__module__.partition(".")[0] not in ("torch", "builtins")}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


@contextmanager
def eager_branches(model: torch.nn.Module) -> Iterator[None]:
    """Make a model of transformers take its eager branch where its code branches on whether torch.export traces it.

    Qwen3-Next solves a triangular system in eager mode, and unrolls a loop of 63 steps for torch.export, whose results
    differ in the last digits. Files that do not use ``is_torchdynamo_exporting`` are left as they are, because their
    ``is_torchdynamo_compiling`` keeps branches on values out of a trace.
    """
    functions = ("is_torchdynamo_exporting", "is_torchdynamo_compiling")
    with ExitStack() as stack:
        for file in (one for one in _files_of(model) if functions[0] in one):
            for name in functions:
                if name in file:
                    stack.callback(file.__setitem__, name, file[name])
                    file[name] = bool  # bool() is False
        yield


@contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Set every module to training or evaluation mode.

    Modes, contents of buffers and dtypes of parameters (``self.weight.data = self.weight.data.to(x.dtype)``) are
    restored afterwards.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.train(training)
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        for parameter, data in parameters:
            if parameter.dtype != data.dtype:
                parameter.data = data
        with torch.no_grad():
            for buffer, content in buffers:
                if not buffer.is_meta and not same_bits(buffer, content):
                    buffer.copy_(content)


@contextmanager
def nothing_lost() -> Iterator[None]:
    """Refuse calls that torch.export would drop without an error; torch's log and stderr are muted meanwhile.

    Calls in other threads are not refused.

    Raises:
        CaptureError: the code inside registers a gradient hook, enters CUDA autocast, switches a setting of torch, or
            calls a custom autograd function that cannot be one operation of the graph; names the call.
    """
    functions = torch.autograd.Function.__dict__["apply"]
    inside = False

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or cls.__module__.split(".")[0] == "torch":
            return functions.__get__(None, cls)(*args, **kwargs)  # since torch 2.14 it is no classmethod of Python's
        inside = True
        try:
            return as_operation(cls, args)
        finally:
            inside = False

    def register_hook(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            "forward registers a gradient hook on a tensor, which tracing would lose. "
            + _UNTRACED.format(otherwise="drop the hook")
        )

    muted = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            _patched(torch.autograd.Function, "apply", classmethod(apply)),
            _patched(torch.Tensor, "register_hook", register_hook),
            redirect_stderr(StringIO()),  # torch prints pages about failures that a CaptureError explains briefly
            cuda_autocast_refused(),
            _switches_refused(),
        ):
            yield
    finally:
        logging.disable(muted)


@contextmanager
def cuda_autocast_refused() -> Iterator[None]:
    """Refuse torch.autocast("cuda") on a machine without CUDA, unless it is known to be switched off.

    Without CUDA torch disables every such autocast, so a trace would lose an enabled one. An autocast that is created
    inside the context is refused if its argument ``enabled`` is True. An autocast that decorates a function (as in
    rotary embeddings of x-transformers) is refused unless the decorator's source contains False. An autocast that was
    created earlier and kept in an attribute is always refused.
    """
    if torch.cuda.is_available():
        yield
        return
    create, enter = torch.autocast.__init__, torch.autocast.__enter__
    off = weakref.WeakSet[Any]()

    @functools.wraps(create)  # TorchDynamo binds arguments to its signature
    def init(
        self: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        if enabled and device_type == "cuda":
            raise CaptureError(_CUDA_AUTOCAST.format(where=line_outside_torch(sys._getframe(1))))
        create(self, device_type, dtype, enabled, *rest, **more)
        off.add(self)

    def entering(self: torch.autocast) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name == "__enter__" and frame.f_back is not None:  # of torch.cuda.amp.autocast
            frame = frame.f_back
        decorated = frame.f_locals.get("func") if frame.f_code.co_name == "decorate_autocast" else None
        if self.device == "cuda" and self not in off and not (decorated and _decorated_off(decorated)):
            code = inspect.unwrap(decorated).__code__ if decorated else None
            where = f" at {code.co_filename}:{code.co_firstlineno}" if code else line_outside_torch(frame)
            raise CaptureError(_CUDA_AUTOCAST.format(where=where))
        return enter(self)

    with _patched(torch.autocast, "__init__", init), _patched(torch.autocast, "__enter__", entering):
        yield


def _decorated_off(function: Callable[..., Any]) -> bool:
    try:
        return bool(re.search(r"autocast\([^)]*\bFalse\b", inspect.getsource(function).split("def ")[0]))
    except (OSError, TypeError):
        return False


class _OnlyCtcLoss(TorchFunctionMode):
    """Function mode that computes CTC losses, without cuDNN, and raises ``refusal`` at any other operation."""

    def __init__(self, refusal: CaptureError) -> None:
        super().__init__()
        self._refusal = refusal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (CTC_LOSS, CTC_LOSS.default):
            raise self._refusal
        return func(*args[:-1], False)


@contextmanager
def _switches_refused() -> Iterator[None]:
    """Refuse user code that switches a setting of torch inside forward, as sdpa_kernel(...) does.

    A trace loses the setting, and stages would select other kernels, whose results differ in the last digits. cuDNN may
    be switched off around ctc_loss alone, as in transformers: the traced loss keeps that.
    """
    begun, switched, tracing = torch_settings(), list[_OnlyCtcLoss](), threading.get_ident()

    def watched(setter: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if threading.get_ident() != tracing:
                return setter(*args)
            where, before = users_line(sys._getframe(1)), torch_settings()
            done = setter(*args)
            refusal = CaptureError(
                f"forward switches torch.{name} for a part of it{where}, which a trace forgets. Set it before the run, "
                "for all of the model: workers take it over. Or build the model as an nn.Sequential of blocks, which "
                "raypipe runs without tracing."
            )
            if where and name == "backends.cudnn.enabled" and switched:
                switched.pop().__exit__(None, None, None)
            elif where and name in begun.changed():  # torch.export switches some itself
                if name != "backends.cudnn.enabled":
                    before.take()
                    raise refusal
                switched.append(_OnlyCtcLoss(refusal))
                switched[0].__enter__()
            return done

        return call

    with ExitStack() as stack:
        for setter, name in _SETTERS.items():
            if hasattr(torch._C, setter):
                stack.enter_context(_patched(torch._C, setter, watched(getattr(torch._C, setter), name)))
        try:
            yield
        finally:
            for mode in switched:
                mode.__exit__(None, None, None)


@contextmanager
def generators_kept(whose: str) -> Iterator[None]:
    """Refuse code inside that uses a global random generator or changes torch's default dtype; both are restored.

    Random operations of torch under a RandomKey are allowed, because they leave torch's generator unchanged.

    Args:
        whose: name of the code inside, for the message.

    Raises:
        CaptureError: after the code has run; names the generator or the dtype.
    """
    dtype = torch.get_default_dtype()
    with own_generators():
        seed_generators(0x7A79, 0, 0)
        before = generator_states()
        try:
            yield
        finally:
            after, left = generator_states(), torch.get_default_dtype()
            torch.set_default_dtype(dtype)
    moved = {
        "torch's generator": not torch.equal(before.torch, after.torch),
        "numpy's generator": not before._replace(torch=after.torch, python=after.python).same_as(after),
        "Python's generator": before.python != after.python,
    }
    for generator in (name for name, has_moved in moved.items() if has_moved):
        cure = (
            "Draw with torch (torch.rand, dropout), whose draws are keyed and equal on every stage, or switch it off "
            "if a setting does (as apply_spec_augment=False of transformers)"
        )
        if generator.startswith("torch"):
            cure = "Leave seeding out of forward: PipelineConfig(seed=...) keys every draw of every step"
        raise CaptureError(
            f"{whose} draws from {generator} or seeds it. A traced model would repeat one draw for ever, and stages "
            f"would not agree on it. {cure}."
        )
    if left != dtype:
        raise CaptureError(
            f"{whose} changes torch's default dtype from {dtype} to {left} and leaves it so. Stages are processes of "
            "their own and would not follow. Change it before training, or restore it before forward returns."
        )


@contextmanager
def watched_forward(model: torch.nn.Module, *, twice: bool = False) -> Iterator[list[str]]:
    """Replace ``model.forward`` within the context, and restore the Python state that each call of it changes.

    Otherwise a trace would leave fake tensors in this state.

    Args:
        twice: True to run forward twice in every call and refuse state that the second run changes again.

    Yields:
        A list, to which every call appends the paths of the state that it changed.
    """
    original, changed = model.forward, list[str]()

    def read() -> Memory:
        with _disable_current_modes():
            return read_memory(model)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = read()
        trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            output = original(*args, **kwargs)
            after = read()
            changed.extend(path for path, _, _ in before.changes(after))
            if twice:
                output = original(*args, **kwargs)
                refuse_change(after, read(), f"{type(model).__name__}.forward")
            return output
        finally:
            with _disable_current_modes():
                before.restore()
            for parameter, flag in trains:
                parameter.requires_grad_(flag)

    with own_forward(model, forward):
        yield changed
