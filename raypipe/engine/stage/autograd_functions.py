"""Custom autograd functions (torch.autograd.Function) of a model as operations of its graph.

    forward      y = Gelu.apply(x, 0.5)
    trace        y = torch.ops.raypipe.autograd_function([x], "function_3f81")[0]
    stage        y = function_3f81([x])[0]                                          calls Gelu.apply(x, 0.5)

torch.export would trace what such a function computes, and lose its backward. Instead a call is one operation, which is
not partitioned. It is sent to workers with the function's class.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.stage.generated_source import Region
from raypipe.engine.stage.randomness import draws_randomness
from raypipe.errors import CaptureError
from raypipe.user_lines import users_line

_PLAIN = (int, float, str, torch.dtype, type(None))
_traced: dict[str, AutogradFunction] = {}
"""Calls by name, for the time between the trace of an operation and its copy into the graph of a stage."""


class AutogradFunction(Region):
    """Call of a custom autograd function with arguments that are fixed, apart from the tensors.

    Args:
        function: the user's subclass of torch.autograd.Function.
        arguments: arguments of the call, with None for tensors.
        places: positions of the tensors among the arguments.
    """

    kind = "function"

    def __init__(self, function: Any, arguments: Sequence[Any], places: Sequence[int]) -> None:
        self.function, self.arguments, self.places, self.bodies = function, tuple(arguments), tuple(places), ()
        self.single = True  # known after the first call
        code = [getattr(method, "__code__", None) for method in (function.forward, function.backward)]
        bodies = [(one.co_code, [*filter(_is_plain, one.co_consts)]) for one in code if one is not None]
        content = repr((function.__module__, function.__qualname__, arguments, places, bodies))
        self.__name__ = f"{self.kind}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arguments = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        outputs = self.function.apply(*arguments)
        self.single = not isinstance(outputs, tuple)
        return [outputs] if self.single else list(outputs)

    def placed(self, place: torch.device) -> AutogradFunction:
        return self


def as_operation(function: Any, arguments: Sequence[Any]) -> Any:
    """Call a custom autograd function as one operation of the graph that is being traced.

    Returns:
        output of the function: a tensor, or a tuple of tensors.

    Raises:
        CaptureError: the function cannot be one operation; names it, the line of the call and the reason.
    """
    places = [at for at, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    fixed = [None if at in places else value for at, value in enumerate(arguments)]
    for value in fixed:
        if not _is_plain(value):
            raise _refusal(function, f"takes an argument of type {type(value).__name__}, which a graph cannot hold")
    call = AutogradFunction(function, fixed, places)
    _traced[call.__name__] = call
    outputs = torch.ops.raypipe.autograd_function([arguments[at] for at in places], call.__name__)
    return outputs[0] if call.single else tuple(outputs)


def traced_call(name: str) -> AutogradFunction:
    """Return the custom autograd function that was recorded under ``name`` when this process traced a model.

    The operator ``raypipe::autograd_function`` gets only this name, and calls what is returned here.
    """
    return _traced[name]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


def _refusal(function: Any, reason: str) -> CaptureError:
    frame: Any = sys._getframe(1)
    while frame is not None and not users_line(frame):
        frame = frame.f_back
    return CaptureError(
        f"The model calls the custom autograd function {function.__module__}.{function.__qualname__}"
        f"{users_line(frame)}, which {reason}, so that tracing would lose its backward. Build the model as "
        "an nn.Sequential of blocks, which raypipe runs without tracing, or write the function with differentiable "
        "operations."
    )


class _Refusing(TorchDispatchMode):
    """Refuses random operations inside a custom autograd function, which cannot be numbered."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_randomness(func, args, kwargs or {}):
            raise _refusal(self._function, "draws random numbers")
        return func(*args, **(kwargs or {}))


def _autograd_function(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    call, versions = _traced[name], [x._version for x in tensors]
    with _Refusing(call.function):
        outputs = call(tensors)
    if versions != [x._version for x in tensors]:
        raise _refusal(call.function, "changes its input in place")
    if not all(isinstance(x, torch.Tensor) for x in outputs):
        raise _refusal(call.function, "returns what is no tensor")
    return outputs


_library = torch.library.Library("raypipe", "FRAGMENT")
_library.define("autograd_function(Tensor[] tensors, str name) -> Tensor[]")
_library.impl("autograd_function", _autograd_function, "CompositeImplicitAutograd")
OPERATION = torch.ops.raypipe.autograd_function.default
