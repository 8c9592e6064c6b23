"""Random numbers keyed by (seed, step, micro-batch, number of the draw). A draw creates one random tensor.

Each draw uses a generator that is seeded by its key, so neither the partition nor the schedule nor the thread that runs
a stage can change a single bit. Draws are numbered within one forward of the whole model, in execution order. Capture
writes the numbers into the stages, and eager code gets the same numbers from `KeyedRandomness`.

torch's default CPU generator is not used: it is global, so that two stage threads corrupt each other's draws, and
seeding it costs 86 us against 1 us for a generator of one's own. Fused operations of a GPU (its dropout, its attention
with dropout) take no generator: for them the GPU's default one gets the state of another, and then its own again.

A graph of a device repeats its draws with the seeds that their generators have when it is replayed. So each draw of a
recorded forward has a generator of its own (`GraphKey`), which is seeded anew for each micro-batch.

torch.cond in eager code compiles its bodies. Under a dispatch mode torch does not compile them, and its gradients fail,
so it runs outside of `KeyedRandomness`. Draws inside it would use torch's own generator; capture refuses them. torch's
compiler does not support several threads at once. Private parts of torch are looked up by name, not by torch's version:
builds are patched, and later releases are unknown.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops import utils
from torch._higher_order_ops.cond import CondAutogradOp
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from raypipe.engine.device.device import ONE_GRAPH
from raypipe.errors import CaptureError, StageError
from raypipe.splitmix import mixed

_installed = False
_backward = CondAutogradOp.backward
_OURS = Path(__file__).parents[2]
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(_OURS / "engine"), str(_OURS / "capture"), contextlib.__file__)
_one_at_a_time = threading.RLock()
_without_gradients = ContextVar("_without_gradients", default=False)


def key_conds() -> None:
    """Patch torch.cond to leave `KeyedRandomness` while it runs, and to run in one thread at a time."""
    global _installed
    if not _installed:
        _installed = True
        _enter_around_operators(_outside)
        CondAutogradOp.backward = staticmethod(_locked_backward)  # type: ignore[method-assign]


@contextmanager
def evaluating() -> Iterator[None]:
    """Disable gradients inside the context, to run or capture a model for evaluation.

    A capture refuses torch.cond inside a torch.no_grad of the model itself, but not inside this context.
    """
    token = _without_gradients.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _without_gradients.reset(token)


@contextmanager
def _outside() -> Iterator[None]:
    if torch.compiler.is_exporting() and not (torch.is_grad_enabled() or _without_gradients.get()):
        raise CaptureError(
            f"forward calls torch.cond under torch.no_grad{_users_line()}; torch.export would lose the no_grad. Pass "
            "detached operands to torch.cond outside of the region instead."
        )
    keyed = any(isinstance(mode, KeyedRandomness) for mode in _get_current_dispatch_mode_stack())
    with _one_at_a_time, _disable_current_modes() if keyed else nullcontext():
        yield


def _locked_backward(ctx: Any, *gradients: Any) -> Any:
    with _one_at_a_time:
        return _backward(ctx, *gradients)


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _enter_around_operators(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Patch torch so that torch.cond, while_loop and the like run inside ``around()`` when eager code calls them.

    torch 2.11 has no _hop_compile_and_call; there setup_compilation_env is entered instead.
    """
    if hasattr(utils, "_hop_compile_and_call"):
        run = utils._hop_compile_and_call

        def inside(function: Any, args: Any, kwargs: Any = None) -> Any:
            with around():
                return run(function, args, kwargs)

        utils._hop_compile_and_call = inside
        return
    environment: Any = utils.setup_compilation_env

    @contextmanager
    def both() -> Iterator[Any]:
        with around(), environment() as backend:
            yield backend

    def environment_inside() -> AbstractContextManager[Any]:
        # flex_attention enters it by a name bound at import, perhaps the original: so it gets the original in any case.
        caller = sys._getframe(1).f_globals.get("__name__")
        return environment() if caller == "torch.nn.attention.flex_attention" else both()

    utils.setup_compilation_env = environment_inside  # type: ignore[assignment]


aten = torch.ops.aten

_local = threading.local()
_ONE_CUDNN = threading.Lock()


class RandomKey(NamedTuple):
    """Key of the random numbers of one forward; ``microbatch`` is numbered within the run."""

    seed: int
    step: int
    microbatch: int


class GraphKey(RandomKey):
    """Key of a forward that a graph of the device repeats.

    Attributes:
        generators: generator of each draw, by its number. A forward that runs eagerly creates and seeds those that are
            missing. None can be created or seeded in a recording; ``seed_generators`` does the latter before a replay.
    """

    generators: dict[int, torch.Generator]

    def __new__(cls, key: RandomKey, generators: dict[int, torch.Generator]) -> GraphKey:
        made = super().__new__(cls, *key)
        made.generators = generators
        return made

    def seed_generators(self) -> None:
        """Seed all generators for the draws of this key."""
        for index, generator in self.generators.items():
            generator.manual_seed(_seed(self, index))


def _generator(key: RandomKey, index: int, device: torch.device) -> torch.Generator:
    """Return this thread's generator for the device, seeded for draw ``index``; for meta tensors, that of the CPU.

    With a ``GraphKey`` it is that of the draw, as it is.
    """
    if isinstance(key, GraphKey):
        if index not in key.generators:
            key.generators[index] = torch.Generator(device).manual_seed(_seed(key, index))
        return key.generators[index]
    device = torch.device("cpu") if device.type == "meta" else device
    pool = _local.__dict__.setdefault("generators", {})
    generator = pool.get(device)
    if generator is None:
        generator = pool[device] = torch.Generator(device)
    generator.manual_seed(_seed(key, index))
    return generator


def _seed(key: RandomKey, index: int) -> int:
    """Compute the seed of draw ``index``. Its low 32 bits, which CPU generators use alone, depend on the whole key."""
    return mixed(*key, index) & 0x7FFFFFFFFFFFFFFF


@contextmanager
def _default_seeded(device: torch.device, key: RandomKey, index: int) -> Iterator[None]:
    """Give a GPU's default generator the state for draw ``index`` inside the context, for operations without generator.

    These operations read seed and offset, or in a recording their address, when they are queued. The generator's own
    state is restored at the end. Other threads wait before they enter such a context.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    default = torch.cuda.default_generators[number]
    with ONE_GRAPH:
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(_generator(key, index, device))
        try:
            yield
        finally:
            default.graphsafe_set_state(before)


def dropout(x: torch.Tensor, p: float, key: RandomKey, index: int) -> torch.Tensor:
    """Compute ``aten::dropout`` in training mode, 0 < p < 1, with the random numbers of draw ``index``.

    The result is bitwise equal to torch's own dropout in `KeyedRandomness`.
    """
    if x.is_cuda and x.numel():
        with _default_seeded(x.device, key, index):
            return torch.native_dropout(x, p, True)[0]
    noise = torch.empty_like(x).bernoulli_(1 - p, generator=_generator(key, index, x.device)).div_(1 - p)
    return x * noise


def draws_randomness(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of an aten operation with these arguments draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    bound = bind_arguments(op, args, kwargs)
    if "dropout_p" in bound:  # attention
        return bool(bound["dropout_p"] > 0.0)
    for probability in ("p", "dropout"):  # the dropout family, and recurrent networks of cuDNN
        if "train" in bound and probability in bound:
            return bool(bound["train"]) and 0.0 < bound[probability] < 1.0
    return True


def num_draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of draws in a call of an aten operation; a recurrent network has several, between layers."""
    if not draws_randomness(op, args, kwargs):
        return 0
    bound = bind_arguments(op, args, kwargs)
    if "num_layers" not in bound:
        return 1
    return bound["num_layers"] - 1 if bound["train"] and 0.0 < bound["dropout"] < 1.0 else 0


def bind_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an aten operation by name, with defaults filled in."""
    bound = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def _like(fill: str) -> Any:
    def draw(args: Sequence[Any], kwargs: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
        return getattr(torch.empty_like(args[0], **kwargs), fill)(*args[1:], generator=generator)

    return draw


# Replacements for overloads that have no variant with a generator argument.
_WITHOUT_GENERATOR = {
    aten.rand_like.default: _like("uniform_"),
    aten.randn_like.default: _like("normal_"),
    aten.randint_like.default: lambda a, k, g: torch.empty_like(a[0], **k).random_(0, a[1], generator=g),
    aten.randint_like.low_dtype: lambda a, k, g: torch.empty_like(a[0], **k).random_(a[1], a[2], generator=g),
}


_FUSED = frozenset(
    getattr(aten, name).default
    for name in (
        "native_dropout",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Operations of a GPU that draw from its default generator, once, when they are queued. Their backward draws nothing.
"""

_OF_CUDNN = (aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default)
_RECURRENT = frozenset((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu))


class KeyedRandomness(TorchDispatchMode):
    """Dispatch mode that keys every random draw of this thread; the first draw has number ``first_index``.

    Attributes:
        index: number of the next draw.
    """

    def __init__(self, key: RandomKey, first_index: int = 0) -> None:
        super().__init__()
        key_conds()
        self.key = key
        self.index = first_index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_randomness(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        index, self.index = self.index, self.index + 1
        if func in _FUSED and device.type == "cuda":
            with _default_seeded(device, self.key, index):
                return func(*args, **kwargs)
        generator = _generator(self.key, index, device)
        if func in _WITHOUT_GENERATOR:
            return _WITHOUT_GENERATOR[func](args, kwargs, generator)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": generator})
        # rand.default has the twin rand.generator, randint.low has randint.low_generator.
        twin = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
        overload = getattr(func.overloadpacket, twin, None)
        if overload is None:
            if func in _OF_CUDNN:
                raise CaptureError(
                    "cuDNN draws the dropout between layers of a recurrent network from a state of its own, which "
                    "raypipe cannot make the same in every partition. A pipeline computes such a network without "
                    "cuDNN; for the same bits elsewhere set torch.backends.cudnn.enabled = False."
                )
            raise CaptureError(
                f"The random operation {func} takes no generator, so raypipe cannot make its draws the same in every "
                "partition. Replace it by torch.rand, torch.randn, bernoulli or dropout."
            )
        return overload(*args, **{**kwargs, "generator": generator})


def keyed_call(op: Any, key: RandomKey, index: int, *args: Any, draws: int = 1, **kwargs: Any) -> Any:
    """Call a random operation with keyed draws; for dropout, the function ``dropout`` is faster.

    Args:
        index: number of the first draw.
        draws: number of draws that the call must make.

    Raises:
        StageError: the operation made another number of draws, so that the numbers of later draws would shift.
    """
    if op is _ATTENTION and _has_torchs_bits(_AttentionKind.of(*args, **kwargs)):
        return _attention(key, index, *args, **kwargs)
    return _under_mode(op, key, index, *args, draws=draws, **kwargs)


def _under_mode(op: Any, key: RandomKey, index: int, *args: Any, draws: int = 1, **kwargs: Any) -> Any:
    """Call a random operation under `KeyedRandomness`; arguments as of ``keyed_call``."""
    with _without_cudnn(op, args), KeyedRandomness(key, index) as mode:
        result = op(*args, **kwargs)
    if mode.index != index + draws:
        raise StageError(
            f"{op} drew {mode.index - index} times where {draws} were planned; use torch's dropout instead."
        )
    return result


_ATTENTION = aten.scaled_dot_product_attention.default


class _AttentionKind(NamedTuple):
    """Properties of an attention that decide, besides its lengths, which operations torch runs.

    Attributes:
        device: type of the device; "" for calls that may run other operations.
        cast: dtype of autocast; None without it.
        mask: dtype of the mask; None without one.
        grouped: True if keys and values may have fewer heads (``enable_gqa``).
    """

    device: str
    cast: torch.dtype | None
    dtype: torch.dtype
    mask: torch.dtype | None
    causal: bool
    scale: float | None
    grouped: bool

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> _AttentionKind:  # fmt: skip
        """Read the kind from the arguments of a call."""
        usual = type(q) is torch.Tensor and dropout_p < 1.0 and not torch.is_inference_mode_enabled()
        device = q.device.type if usual else ""
        cast = torch.get_autocast_dtype(device) if device and torch.is_autocast_enabled(device) else None
        mask = None if attn_mask is None else attn_mask.dtype
        return cls(device, cast, q.dtype, mask, is_causal, scale, enable_gqa)


@cache
def _has_torchs_bits(kind: _AttentionKind) -> bool:
    """Return True if ``_attention`` has the bits of torch's attention, forward and backward, with small tensors.

    `_attention` is used for such kinds only, so that another release of torch may cost speed, but never bits.
    """
    if kind.device != "cpu":
        return False
    drawn = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2 if kind.grouped else 4, 5, 8), (2, 2 if kind.grouped else 4, 5, 8)
    given = [torch.randn(shape, generator=drawn).to(kind.dtype) for shape in shapes]
    mask = None if kind.mask is None else torch.randn(3, 5, generator=drawn).clamp(min=0.0).to(kind.mask)
    named: dict[str, Any] = {"scale": kind.scale, "enable_gqa": kind.grouped}
    found: list[tuple[torch.Tensor, ...]] = []
    ways: tuple[Callable[..., torch.Tensor], ...] = (_attention, partial(_under_mode, _ATTENTION))
    uncounted = saved_tensors_hooks(lambda x: x, lambda x: x)  # hooks around the first forward must not count these
    for attend in ways:
        cast = torch.autocast("cpu", kind.cast, enabled=kind.cast is not None)
        with _disable_current_modes(), uncounted, torch.enable_grad(), cast:
            leaves = [x.clone().requires_grad_() for x in given]
            y = attend(RandomKey(0, 0, 0), 0, *leaves, mask, 0.5, kind.causal, **named)
            found.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


def _attention(
    key: RandomKey, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with dropout on the CPU by the operations that torch runs there, in its order.

    A dispatch mode would be called for each of 24 operations, which takes longer than a short attention.

    Args:
        q, k, v: (..., heads, length, features); k and v may have fewer heads if ``enable_gqa``.
        attn_mask: broadcast to (..., heads, length of q, length of k): bool, True to attend; or added to the logits.
    """
    if torch.is_autocast_enabled("cpu"):
        q, k, v, attn_mask = (_lowered(x) for x in (q, k, v, attn_mask))  # type: ignore[assignment]
        with torch.autocast("cpu", enabled=False):  # torch runs the operations without it
            named: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return _attention(key, index, q, k, v, attn_mask, dropout_p, is_causal, **named)
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        q, k, v = q.float(), k.float(), v.float()
    size = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    root = math.sqrt(size)
    q = q * (-root if scale is not None and scale < 0 else root)
    if is_causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = torch.matmul(q, k.transpose(-2, -1) * root)
    if attn_mask is not None:
        logits.add_(attn_mask)
    return torch.matmul(dropout(aten._safe_softmax(logits, -1), dropout_p, key, index), v).to(dtype)


def _lowered(x: torch.Tensor | None) -> torch.Tensor | None:
    """Cast an argument as autocast does, which leaves float64 and integers."""
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


@contextmanager
def _without_cudnn(op: Any, args: Sequence[Any]) -> Iterator[None]:
    """Disable cuDNN inside the context for a recurrent network on a GPU: cuDNN's random state cannot be keyed.

    The switch is global to the process. A worker computes in one thread; with stages in threads of one process, other
    stages may run without cuDNN meanwhile.
    """
    if getattr(op, "overloadpacket", op) not in _RECURRENT or not any(
        isinstance(x, torch.Tensor) and x.is_cuda for x in args
    ):
        yield
        return
    with _ONE_CUDNN:
        before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = before
