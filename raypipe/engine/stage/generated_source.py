"""Generated source of a stage: its regions, and the custom operations that it calls.

    vmap      runs batched tensors between two calls that belong together
    choice    torch.cond: one of two bodies, by a value

A region is a subgraph that is one operation of the model's graph, because it must not be partitioned. A region is a
function with generated source, like a stage, and is sent with the stage that calls it.

A custom operation is registered by the user's module, which a worker has to import:

    ops.py      @torch.library.custom_op("mine::gate", ...)         the script imports it, no worker would
    stage       torch.ops.mine.gate.default(x)                      sent with "ops", which is imported on arrival

An operation that the script itself registers cannot be imported by workers. raypipe registers two operations for what a
graph cannot hold, because it is read from tensors; they read it when they run:

    BatchNorm with momentum=None    weight of a new batch, 1 / num_batches_tracked, which is a Python number
    ctc_loss                        shape of what its backward needs, which follows from the lengths of the targets
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import linecache
import math
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from raypipe.errors import StageError

TORCH_NAMES = {"inf": math.inf, "nan": math.nan, "NoneType": type(None), "torch": torch, "device": torch.device}
"""Globals that every generated source has. Modules cannot be pickled, so these are not sent with the source."""

_compiled = 0
_ONE_TREE = threading.Lock()
"""Lock of ast and compile. CPython 3.11 counts the depth of syntax trees for all threads together. If two threads build
one at once, as stages in threads would, it raises "AST constructor recursion depth mismatch".
"""


def names_of(code: Any) -> dict[str, Any]:
    """Return the globals to send with fx code (``Graph.python_code``): all except modules and TORCH_NAMES.

    For each custom operation that the code calls, a record (Registered) is added under the text of the call.
    """
    used = {name: thing for name, thing in code.globals.items() if name not in TORCH_NAMES}
    things = {name: thing for name, thing in used.items() if not isinstance(thing, ModuleType)}
    return {**things, **foreign_operations(code.src)}


def compiled(
    source: str, names: dict[str, Any], title: str, place: torch.device | None = None, *, direct: bool = False
) -> Callable[..., Any]:
    """Compile the function ``forward`` that the source defines.

    Args:
        names: globals of the source, besides TORCH_NAMES.
        title: file name in tracebacks.
        place: device of the tensors that the source creates, instead of host memory as in the captured model.
        direct: call operations without torch's Python wrapper; torch.compile cannot trace such calls.
    """
    global _compiled
    _compiled += 1
    filename = f"<{title} #{_compiled}>"
    # Tracebacks then show the source line of the operation that raised.
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
    function = known.pop("forward")  # a reference cycle otherwise, which would outlive its last user
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function


class _Direct(ast.NodeTransformer):
    """Rewrite ``torch.ops.aten.add.Tensor(x, y)`` to call the target of OpOverload.__call__ directly.

    Four look-ups and a Python call are 0.5 us of the 3 to 4 us that the host takes to launch an operation.

    Args:
        known: globals of the source; each such callable is added under its source text.
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
    """Create a ``torch.device`` in generated source, with the CPU replaced by ``place``."""
    device = torch.device(*words, **options)
    return place if device.type == "cpu" else device


class Body:
    """Pure function with generated source, which defines ``forward(self, *inputs)``; arguments as in ``compiled``."""

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
    """Subgraph of a model that is not partitioned. A call runs the first of its bodies on the inputs."""

    kind = "region"

    def __init__(self, *bodies: Body) -> None:
        self.bodies = bodies
        content = "\n".join(body.source for body in bodies)
        # The stage's source has only this name, and profiles are cached by that source, so it hashes the bodies.
        self.__name__ = f"{self.kind}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def __call__(self, *inputs: Any) -> Any:
        return self.bodies[0](*inputs)

    def placed(self, place: torch.device) -> Region:
        """Return a copy that creates its tensors on ``place`` instead of in host memory."""
        return type(self)(*(Body(body.source, body.names, place) for body in self.bodies))


class Conditional(Region):
    """Region of torch.cond: (predicate, *operands) -> outputs of the first body if predicate is true, else the second.

    As in torch.cond every operand gets a gradient, which is zero if the body that ran does not use the operand. On the
    meta device, which has no values, the first body runs.
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
    """Identity function of tensors, whose backward runs once all their gradients are complete; none of them is None."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
_TORCHS = ("aten", "prims", "higher_order")
"""Namespaces of torch's own operations, which need no import; operations in its other namespaces exist everywhere too.
"""
_SCRIPT = "__main__"


class Registered:
    """Record of a custom operation. Unpickling it imports the module that registers the operation, if necessary.

    Attributes:
        operation: qualified name of the operation, as "mine::gate".
        module: name of the module; "" if unknown, and then the operation's namespace is imported.
    """

    def __init__(self, operation: str, module: str) -> None:
        self.operation, self.module = operation, module

    def __reduce__(self) -> Any:
        return _arrived, (self.operation, self.module)

    @property
    def by_script(self) -> bool:
        """True if the process's own script (``__main__``) registers the operation."""
        return self.module == _SCRIPT


def foreign_operations(source: str) -> dict[str, Registered]:
    """Return a record of each custom operation in a stage's source, by the text that calls the operation."""
    operations = {}
    for namespace, name in sorted({call for call in _CALL.findall(source) if call[0] not in _TORCHS}):
        defined = OPDEFS.get(f"{namespace}::{name}")
        module = getattr(getattr(defined, "_init_fn", None), "__module__", "")
        if not module and namespace in sys.modules:  # as of torchvision
            module = namespace
        operations[f"torch.ops.{namespace}.{name}"] = Registered(f"{namespace}::{name}", module)
    return operations


def with_structure(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Unflatten leaves into the structure ``spec``; dataclasses unknown to pytree in this process are registered."""
    try:
        return pytree.tree_unflatten(leaves, spec)
    except KeyError as error:
        kind = error.args[0] if error.args else None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise
        torch.export.register_dataclass(kind)
        return with_structure(leaves, spec)


def _arrived(operation: str, module: str) -> Registered:
    namespace, name = operation.split("::")
    if hasattr(getattr(torch.ops, namespace), name):
        return Registered(operation, module)
    try:
        importlib.import_module(module or namespace)
    except ImportError as error:
        raise StageError(
            f"The model calls torch.ops.{namespace}.{name}, which this worker cannot call: "
            f"the module {module or namespace!r} that registers it cannot be imported here ({error}). Send it to all "
            "nodes, as with ray.init(runtime_env={'working_dir': '.'})."
        ) from None
    return Registered(operation, module)


_library = torch.library.Library("raypipe", "DEF")
_library.define(
    "cumulative_batch_norm(Tensor input, Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) count, "
    "Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def _cumulative_batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    count: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    count.add_(1)
    has_value = not (count.is_meta or is_fake(count))
    factor = 1.0 / float(count) if has_value else 1.0
    return functional.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)


_library.impl("cumulative_batch_norm", _cumulative_batch_norm, "CompositeImplicitAutograd")


_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, int reduction, "
    "bool zero_infinity, bool cudnn) -> Tensor"
)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
    cudnn: bool,
) -> torch.Tensor:
    if log_probs.is_meta or is_fake(log_probs):
        return log_probs.sum((0, 2)) if log_probs.dim() == 3 and not reduction else log_probs.sum()
    with torch.backends.cudnn.flags(enabled=cudnn):
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


_library.impl("ctc_loss", _ctc_loss, "CompositeImplicitAutograd")
CTC_LOSS = torch.ops.raypipe.ctc_loss


@contextmanager
def ctc_losses() -> Iterator[None]:
    """Patch ``ctc_loss`` to call ``raypipe::ctc_loss`` inside the context, if the lengths are tensors.

    It computes with cuDNN only if that is enabled where the context begins.
    """
    original, with_cudnn = functional.ctc_loss, torch.backends.cudnn.enabled  # torch.export switches it off

    def ctc_loss(
        log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: str = "mean", zero_infinity: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if not (isinstance(input_lengths, torch.Tensor) and isinstance(target_lengths, torch.Tensor)):
            return original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        kind = ("none", "mean", "sum").index(reduction)
        return CTC_LOSS(log_probs, targets, input_lengths, target_lengths, blank, kind, zero_infinity, with_cudnn)

    functional.ctc_loss = ctc_loss
    try:
        yield
    finally:
        functional.ctc_loss = original


@contextmanager
def cumulative_norms() -> Iterator[None]:
    """Patch BatchNorm with momentum=None to call ``raypipe::cumulative_batch_norm`` inside the context."""
    original = _BatchNorm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return original(self, x)
        self._check_input_dim(x)
        return torch.ops.raypipe.cumulative_batch_norm(
            x, self.running_mean, self.running_var, self.num_batches_tracked, self.weight, self.bias, self.eps
        )

    _BatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
