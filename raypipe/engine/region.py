"""Parts of a traced model that are one operation of its graph, because nothing may be cut out of their middle.

    vmap      runs batched tensors between two calls that belong together
    choice    torch.cond: one of two bodies, by a value

Each is a function, made of generated source as a stage is, and travels with the stage that calls it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import math
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from raypipe.engine.foreign_operations import foreign_operations

__all__ = ["TORCH_NAMES", "Body", "Choice", "Region", "compiled", "names_of"]

TORCH_NAMES = {"inf": math.inf, "nan": math.nan, "NoneType": type(None), "torch": torch, "device": torch.device}
"""What generated source may refer to without saying so. Modules do not pickle, so these do not travel with it."""

_compiled = 0
_ONE_TREE = threading.Lock()
"""Syntax trees are made and compiled by one thread at a time: CPython 3.11 counts their depth for all threads together,
and fails with "AST constructor recursion depth mismatch" where two do it at once, as stages in threads would."""


def names_of(code: Any) -> dict[str, Any]:
    """The other names that code of fx (``Graph.python_code``) refers to, and what registers its operations."""
    used = {name: thing for name, thing in code.globals.items() if name not in TORCH_NAMES}
    things = {name: thing for name, thing in used.items() if not isinstance(thing, ModuleType)}
    return {**things, **foreign_operations(code.src)}


def compiled(
    source: str, names: dict[str, Any], title: str, place: torch.device | None = None, *, direct: bool = False
) -> Callable[..., Any]:
    """The function ``forward`` that the source defines.

    Args:
        names: globals that the source refers to, besides TORCH_NAMES.
        title: of the file that a traceback names.
        place: what the source makes in host memory, as the captured model did, is made there instead.
        direct: operations are called without what torch does in Python before, which torch.compile cannot follow.
    """
    global _compiled
    _compiled += 1
    filename = f"<{title} #{_compiled}>"
    # A traceback through the function then shows the operation that raised.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    known = {**TORCH_NAMES, **names}
    if place is not None:
        known = {name: thing.placed(place) if isinstance(thing, Region) else thing for name, thing in known.items()}
        known["device"] = functools.partial(_device, place)
    if direct:
        with _ONE_TREE:
            code = compile(_Direct(known).visit(ast.parse(source, filename)), filename, "exec")
    else:
        code = compile(source, filename, "exec")
    exec(code, known)
    function = known.pop("forward")  # else it would be known to itself, and outlive its last user
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function


class _Direct(ast.NodeTransformer):
    """Has ``torch.ops.aten.add.Tensor(x, y)`` call at once what OpOverload.__call__ hands over to.

    Four look-ups and a call in Python are 0.5 us of the 3 to 4 us that the host takes to begin an operation.

    Args:
        known: globals of the source, which each such callable joins by the text that it stands for.
    """

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        text = ast.unparse(node.func) if isinstance(node.func, ast.Attribute) else ""
        if text.startswith("torch.ops.") and text not in self._known:
            overload = functools.reduce(getattr, text.split(".")[1:], torch)
            if type(overload) is torch._ops.OpOverload:
                self._known[text] = overload._op
        if text in self._known:
            node.func = ast.copy_location(ast.Name(text, ast.Load()), node.func)
        return node


def _device(place: torch.device, *words: Any, **options: Any) -> torch.device:
    """``torch.device`` in generated source, where the CPU stands for another place."""
    found = torch.device(*words, **options)
    return place if found.type == "cpu" else found


class Body:
    """Generated source of a function without memory.

    Args:
        source: defines ``forward(self, *inputs)``.
        names: globals that it refers to.
        place: see ``compiled``.
    """

    def __init__(self, source: str, names: dict[str, Any], place: torch.device | None = None) -> None:
        self.source, self.names, self.place = source, names, place
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._function is None:
            self._function = compiled(self.source, self.names, "part", self.place)
        return self._function(None, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}


class Region:
    """A body that is called as it is."""

    kind = "region"

    def __init__(self, *bodies: Body) -> None:
        self.bodies = bodies
        content = "\n".join(body.source for body in bodies)
        # The name is all that the source of a stage says of it, and profiles are kept by that source.
        self.__name__ = f"{self.kind}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def __call__(self, *inputs: Any) -> Any:
        return self.bodies[0](*inputs)

    def placed(self, place: torch.device) -> Region:
        """The same, making its tensors in another place than host memory."""
        return type(self)(*(Body(body.source, body.names, place) for body in self.bodies))


class Choice(Region):
    """torch.cond: (predicate, *operands) -> what the first body makes of the operands if it holds, else the second.

    As there every operand gets one gradient, of zeros where the body that ran does not use it. On the meta device,
    which has no values, the first one runs.
    """

    kind = "choice"

    def __call__(self, predicate: Any, *operands: Any) -> Any:
        holds = predicate.is_meta if isinstance(predicate, torch.Tensor) and predicate.is_meta else bool(predicate)
        learning = [x for x in operands if isinstance(x, torch.Tensor) and x.requires_grad]
        if learning and torch.is_grad_enabled():
            used = iter(_Operands.apply(*learning))
            operands = tuple(next(used) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in operands)
        return self.bodies[0 if holds else 1](*operands)


class _Operands(torch.autograd.Function):
    """The same tensors; their gradients are complete when they arrive here, and there is one for each."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients
