"""Losses and compressed gradients of a model in float64, to compare them without a float64 copy of the model.

    linear(x, weight)                      -->   linear(x.double(), weight.double())
    gradient of a weight, (rows, columns)  -->   sketch: random vector (rows) @ gradient, (columns)

In float64 two orders of a sum differ by 1e-15 instead of 1e-7, so that a difference of 1e-6 is not rounding. The sketch
of a gradient that is not zero is not zero either, and about as long as the gradient, but much smaller: nine sketches of
all gradients of a model take the memory of one of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from raypipe.engine.stage.quantized_linear import is_quantized

_LOWER = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = ("float", "half", "bfloat16")


@dataclass(frozen=True, slots=True)
class Loss:
    """Unweighted loss of some samples (rows of a batch), and its gradients.

    Attributes:
        value: value of the loss.
        gradients: parameter name -> float64 sketch of its gradient: a fixed random vector times the gradient as a
            matrix, so one value per column (see ``_sketch``). The gradient of a parameter that is missing is zero.
    """

    value: float
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Tolerance(NamedTuple):
    """Largest allowed difference between a sum over micro-batches and the loss or gradient of all rows.

    The allowed difference of a gradient is the sum of both of its parts.

    Attributes:
        loss: as a fraction of the largest loss.
        gradient: as a fraction of the summed lengths of the parameter's gradients, since these may cancel.
        least: as a fraction of the longest gradient of all parameters, since some gradients are zero up to rounding
            (the gradient of a key's bias in attention).
    """

    loss: float
    gradient: float
    least: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance in a dtype: above the rounding of sums, below the effect of wrong weights."""
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        if dtype == torch.float64:
            return cls(3e-6, 1e-8, 1e-11)
        return cls(max(3e-5, 2 * eps), max(1e-4, 4 * eps), max(1e-6, eps))


IN_FLOAT32 = Tolerance.of(torch.float32)
NARROWED = Tolerance(3e-6, 1e-5, 1e-8)
"""Tolerance of float64 computation in which some operation computes in float32 only, as grouped_mm does."""


class GradientsTooLargeError(Exception):
    """Exception for a forward that keeps more than ``most_bytes`` of ``LossGradients`` for its backward."""


class LossGradients:
    """Computes losses, and sketches of their gradients by given tensors, which are not changed.

    Args:
        tensors: tensors to differentiate by, by name; tensors without requires_grad are constants. If empty, only
            losses are computed.
        in_float64: True to compute in float64, whatever dtype the tensors have.
        most_bytes: limit of the bytes kept for the backward; None without a limit.

    Attributes:
        tolerance: tolerance of sums of the computed losses, for the dtype of their computation.
    """

    tolerance = IN_FLOAT32

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, in_float64: bool, most_bytes: int | None = None) -> None:
        self._tensors = {name: x for name, x in tensors.items() if x.requires_grad}
        self._leaves: dict[int, torch.Tensor] = {}
        if in_float64:
            self._leaves = {id(x): x.detach().double().requires_grad_() for x in self._tensors.values()}
        self._in_float64, self._most_bytes = in_float64, most_bytes

    def of(self, compute: Callable[[], torch.Tensor]) -> Loss:
        """Call ``compute``, which returns a scalar loss, and run the backward.

        Raises:
            GradientsTooLargeError: the forward keeps more than ``most_bytes`` for the backward.
        """
        sketches: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(self._tensors)))
            stack.enter_context(self._sketching(sketches))
            if self._most_bytes is not None and self._tensors:
                keep = _keep_within(self._most_bytes, self._tensors.values())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x))
            mode = stack.enter_context(_InFloat64(self._leaves)) if self._in_float64 else None
            loss = compute()
            if loss.requires_grad:
                loss.backward()
        if mode is not None and mode.narrowed:
            self.tolerance = NARROWED
        elif self.tolerance != NARROWED:
            self.tolerance = Tolerance.of(loss.dtype)
        return Loss(float(loss.detach()), sketches)

    def _narrow(self, _: torch.Tensor) -> None:
        """Widen the tolerance: a tensor itself got a gradient, and not its float64 copy.

        Arguments of a custom autograd function's ``apply`` pass by the function mode that would replace them.
        """
        self.tolerance = NARROWED

    @contextmanager
    def _sketching(self, sketches: dict[str, torch.Tensor]) -> Iterator[None]:
        """Add the sketch of each gradient to ``sketches`` as soon as the gradient is complete, and free the gradient.

        The gradients that the tensors had before are restored afterwards.
        """
        before = {name: x.grad for name, x in self._tensors.items()}
        handles = []
        for name, x in self._tensors.items():
            x.grad = None
            for leaf in (x, self._leaves.get(id(x))):
                if leaf is not None:
                    handles.append(leaf.register_post_accumulate_grad_hook(_into(sketches, name)))
            if id(x) in self._leaves:
                handles.append(x.register_post_accumulate_grad_hook(self._narrow))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, grad in before.items():
                self._tensors[name].grad = grad


def _keep_within(most_bytes: int, tensors: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a pack hook (saved_tensors_hooks) that counts the bytes of saved tensors, apart from those of ``tensors``.

    The hook raises GradientsTooLargeError beyond ``most_bytes``.
    """
    kept, seen = 0, {x.untyped_storage().data_ptr() for x in tensors}

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            kept += x.untyped_storage().nbytes()
            if kept > most_bytes:
                raise GradientsTooLargeError
        return x

    return keep


def _into(sketches: dict[str, torch.Tensor], name: str) -> Callable[[torch.Tensor], None]:
    def sketch(leaf: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            assert leaf.grad is not None
            part = _sketch(leaf.grad)
            leaf.grad = None
            sketches[name] = sketches[name] + part if name in sketches else part

    return sketch


def _sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Return the product of a random vector (rows) and a gradient (rows, ...): shape (numel / rows,), float64.

    The vector is the same in every call. A gradient with fewer than two dimensions is returned whole.
    """
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    gradient = gradient if gradient.dtype == torch.float64 else gradient.float()
    if gradient.dim() < 2 or not gradient.numel():
        return gradient.detach().double().flatten().clone()
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(gradient.shape[0], generator=generator, dtype=torch.float64)
    return (along.to(gradient.dtype) @ gradient.reshape(gradient.shape[0], -1)).double()


class _InFloat64(TorchFunctionMode):
    """Function mode that makes torch's operations compute in float64.

    Floating-point arguments are converted to float64, and so are dtypes among the arguments. An operation without a
    float64 kernel computes in float32. Tensors that are written in place keep their dtype.

    Args:
        leaves: ``id`` of a tensor -> its float64 copy, with which operations compute and which gets the gradient.

    Attributes:
        narrowed: True if an operation has computed in float32.
    """

    def __init__(self, leaves: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._leaves = leaves
        self.narrowed = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").split(".")[0]
        written = tuple(args[: _in_place(name)])
        wide = pytree.tree_map(self._wider, (tuple(args[len(written) :]), dict(kwargs or {})))
        if name in _CASTS and isinstance(args[0], torch.Tensor):
            func = torch.Tensor.double
        try:
            if is_quantized(func):  # in float64 its kernels leave their outputs unset, without an error
                raise NotImplementedError
            result = func(*written, *wide[0], **wide[1])
        except (RuntimeError, NotImplementedError):  # grouped_mm has no float64
            if written:
                raise
            self.narrowed = True
            narrow = pytree.tree_map(_narrower, wide)
            result = func(*narrow[0], **narrow[1])
        return result if written else pytree.tree_map(_widened, result)

    def _wider(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _LOWER else value
        return self._leaves[id(value)] if id(value) in self._leaves else _widened(value)


def _in_place(name: str) -> int:
    """Return the number of leading arguments that the operation of this name writes to: 0 or 1."""
    if name in ("__setitem__", "__set__", "__delete__", "requires_grad_", "retain_grad", "register_hook"):
        return 1
    return int((name.endswith("_") and not name.endswith("__")) or name in _OPERATORS)


_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor",
                 "lshift", "rshift")
)  # fmt: skip


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in _LOWER else value


def _narrower(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value == torch.float64 else value
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value
