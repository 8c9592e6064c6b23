"""Randomness keyed by (seed, step, micro-batch, number of the random operation in the model).

Every draw uses a generator of its own, seeded by that key, so neither the partition nor the schedule nor
the thread that happens to run a stage can change a single bit. The number counts the draws of one
forward of the whole model in execution order; capture writes it into the stages, and eager code gets the
same numbers from `KeyedRandomness`.

torch's default CPU generator is not used: it is global, so that two stage threads corrupt each other's
draws, and seeding it costs 86 us against 1 us for a generator of one's own. Fused operations of a GPU (its dropout, its
attention with dropout) take no generator: for them the GPU's default one is seeded, and put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.eager_cond import run_conds_outside_of
from raypipe.errors import CaptureError, StageError

__all__ = [
    "KeyedRandomness", "RandomKey", "bind_arguments", "draws_randomness", "dropout", "keyed_call", "mixed", "num_draws",
]  # fmt: skip

aten = torch.ops.aten

_MASK64 = (1 << 64) - 1
_local = threading.local()
_ONE_DEFAULT = threading.Lock()
_ONE_CUDNN = threading.Lock()


class RandomKey(NamedTuple):
    """What decides the randomness of one forward; ``microbatch`` is global to the run."""

    seed: int
    step: int
    microbatch: int


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mixed(*parts: int) -> int:
    """64 bits in which every bit of every part counts."""
    state = 0
    for part in parts:
        state = _mix(state ^ (part & _MASK64))
    return state


def _generator(key: RandomKey, index: int, device: torch.device) -> torch.Generator:
    """This thread's generator for the device, seeded for one draw; tensors without memory take any."""
    device = torch.device("cpu") if device.type == "meta" else device
    pool = _local.__dict__.setdefault("generators", {})
    generator = pool.get(device)
    if generator is None:
        generator = pool[device] = torch.Generator(device)
    generator.manual_seed(_seed(key, index))
    return generator


def _seed(key: RandomKey, index: int) -> int:
    """Of one draw. The CPU generator uses the low 32 bits only; mixed() has brought all of the key there."""
    return mixed(*key, index) & 0x7FFFFFFFFFFFFFFF


@contextmanager
def _default_seeded(device: torch.device, key: RandomKey, index: int) -> Iterator[None]:
    """Inside, operations of this GPU that take no generator draw by the key: they read seed and offset when they are
    queued. Other threads wait."""
    number = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[number]
    with _ONE_DEFAULT:
        before = generator.get_state()
        generator.manual_seed(_seed(key, index))
        try:
            yield
        finally:
            generator.set_state(before)


def dropout(x: torch.Tensor, p: float, key: RandomKey, index: int) -> torch.Tensor:
    """``aten::dropout`` in training with 0 < p < 1: the same operations, so the same bits, from a keyed draw."""
    if x.is_cuda and x.numel():
        with _default_seeded(x.device, key, index):
            return torch.native_dropout(x, p, True)[0]
    noise = torch.empty_like(x).bernoulli_(1 - p, generator=_generator(key, index, x.device)).div_(1 - p)
    return x * noise


def draws_randomness(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an aten operation draws random numbers (dropout with p = 0 does not)."""
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
    """How often this call of an aten operation draws: recurrent networks once behind every layer but the last."""
    if not draws_randomness(op, args, kwargs):
        return 0
    bound = bind_arguments(op, args, kwargs)
    if "num_layers" not in bound:
        return 1
    return bound["num_layers"] - 1 if bound["train"] and 0.0 < bound["dropout"] < 1.0 else 0


def bind_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
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


# The overloads without a generator argument, by what they are made of.
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
"""Operations of a GPU that draw from its default generator, once, as they are queued. Their backward draws nothing."""

_OF_CUDNN = (aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default)
_RECURRENT = frozenset((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu))


class KeyedRandomness(TorchDispatchMode):
    """Inside this context every random draw of this thread is keyed, the first under ``first_index``.

    Attributes:
        index: number of the next draw.
    """

    def __init__(self, key: RandomKey, first_index: int = 0) -> None:
        super().__init__()
        run_conds_outside_of(KeyedRandomness)
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
    """Any random operation with its draws keyed; dropout has the faster function above.

    Args:
        index: number of its first draw.
        draws: how many it makes.

    Raises:
        StageError: the operation drew more or less often, so that later numbers would shift.
    """
    with _without_cudnn(op, args), KeyedRandomness(key, index) as mode:
        result = op(*args, **kwargs)
    if mode.index != index + draws:
        raise StageError(
            f"{op} drew {mode.index - index} times where {draws} were planned; use torch's dropout instead."
        )
    return result


@contextmanager
def _without_cudnn(op: Any, args: Sequence[Any]) -> Iterator[None]:
    """For a recurrent network on a GPU that draws: cuDNN does so from a state that no key reaches.

    The switch is the process's. A worker computes in one thread; of stages in threads of one process others may find
    it off meanwhile.
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
