"""What a model's constructor does to its parameters, recorded where they have no memory and done where they have.

    client   w = empty(4096, 4096)    #0 w.uniform_(-b, b)    #1 w.normal_(0, 0.02)      on meta: nothing is computed
    worker   w = memory               ........................ #1, drawn from the key (seed, -1, 0, 1)

Every operation on a tensor of the meta device is an entry, numbered in the order of the constructor. A parameter is
made by the entries that it depends on, backwards from the last that wrote to it; an entry that overwrites all of a
tensor ends the search there. A random operation is keyed by its number, so that the same parameter gets the same
numbers wherever it is made, and whatever else is made there. (The idea is that of torchdistx.deferred_init.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import init
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raypipe.engine.checkpoint import Kept, TensorInfo
from raypipe.engine.initial.aliases import Aliases
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.errors import ConfigError

__all__ = ["InitTape", "KeyedInit"]

LEAST_ELEMENTS = 1 << 16
"""A floating-point tensor of so many elements is made on the meta device at once; smaller ones are values to compute
with in Python, and are only recorded where they become parameters."""
MOST_VALUE_BYTES = 1 << 26
"""Of a parameter whose values were computed from others; a tape carries no more, for the client would hold it."""
OF_CONSTRUCTION = -1
"""The step that the draws of a constructor are keyed by; training counts from 0."""

DRAWS_BITS = 16
"""Draws of one operation that have keys of their own."""

_TRUNCATED = "torch.nn.init.trunc_normal_"
_FACTORIES = {
    f"aten::{name}"
    for name in ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "normal.float_float")
}
_OVERWRITING = {
    f"aten::{name}_" for name in ("zero", "fill", "normal", "uniform", "exponential", "copy", "log_normal", "cauchy")
}
_WRITES_UNSAID = {"aten::native_batch_norm": ("running_mean", "running_var")}
"""What an operation writes to though its schema does not say so."""


class _Ref(NamedTuple):
    """A tensor as a view of numbered memory."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Entry(NamedTuple):
    """One operation.

    Attributes:
        op: its name, as in "aten::normal_" or "aten::add.Tensor"; "" writes the one tensor in ``args`` to ``made``.
        args, kwargs: with a _Ref for every tensor of the tape; other tensors are values.
        made: tensors in memory that did not exist before, by position among all that it returns.
        reads, writes: numbers of memories.
        overwrites: memories of which nothing from before is left.
    """

    op: str
    args: Any
    kwargs: Any
    made: tuple[tuple[int, _Ref], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]


class InitTape(TorchDispatchMode):
    """Records while it is entered; one thread's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.entries: list[_Entry] = []
        self.sizes: list[int] = []  # bytes of every memory
        self.unknown: set[int] = set()  # memories whose content nobody recorded
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._alive: list[torch.Tensor] = []  # addresses stay unique while these live; they take no memory
        self._aliases = Aliases()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # which tells others that these tensors are on the CPU
            return self._seen(func, args, kwargs or {})

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        bare = any(t.is_meta for t in given) or _is_bare(kwargs.get("device"))
        real = [t for t in given if not t.is_meta]
        written = [t for t in _written(func, args, kwargs) if not t.is_meta]
        self._aliases.check(real, self.entries)
        if bare and written:
            result = self._done(func, args, kwargs)
        elif bare or _makes_much(func, args, kwargs):
            result = self._recorded(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._note(self._aliases.values(written))
        return result

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes to a tensor with values: it is done now, on what the recorded ones hold."""
        written = [t for t in _written(func, args, kwargs) if t.is_meta]
        unknown = [t for t in _tensors((args, kwargs)) if t.is_meta and not self.knows(t)]
        if written or unknown:
            raise ConfigError(
                f"weights_on='workers': the model cannot be built without weights, because its constructor writes what "
                f"follows from parameters to a tensor that has values ({func.name()}), and those of the parameters are "
                "not known here. Set weights_on='client', which builds the model as it is."
            )
        held: dict[int, torch.Tensor] = {}
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: self.made(t, self.seed, held) if t.is_meta else t, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _note(self, values: Iterable[tuple[_Ref, torch.Tensor]]) -> None:
        """All of a memory has these values now."""
        for ref, value in values:
            memory = frozenset({ref.memory})
            self.entries.append(_Entry("", value.detach().clone(), {}, ((0, ref),), frozenset(), memory, memory))

    def fill(self, tensor: torch.Tensor, *numbers: float) -> None:
        """Note that a truncated normal distribution fills this tensor, which torch draws until all of it lies inside.

        Args:
            numbers: mean, standard deviation, least, most.
        """
        with _alone():
            ref = self._ref(tensor)
            written = frozenset({ref.memory})
            gone = written if _whole(tensor) else frozenset()
            self.entries.append(_Entry(_TRUNCATED, (ref, *numbers), {}, (), written - gone, written, gone))

    def defer(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device that begins with the values of this one."""
        with _alone():
            bare = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            ref = self._ref(bare)
            if real.nbytes > MOST_VALUE_BYTES:
                self.unknown.add(ref.memory)
            else:
                self._note([(ref, real)])
                self._aliases.add(real, ref, len(self.entries))
        return bare

    def made(self, tensor: torch.Tensor, seed: int, held: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor of the tape as it is now, with values.

        Args:
            held: memories that were made before, by number, which this one shares or is added to.
        """
        with _alone():
            ref = self._ref(tensor)
            if ref.memory not in held:
                whole = _Ref(ref.memory, torch.uint8, (self.sizes[ref.memory],), (1,), 0)
                held[ref.memory] = _played(whole, self.entries, self.sizes, seed)
            return _view(held[ref.memory], ref)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the meta device, and what was done to it is recorded."""
        with _alone():
            number = self._numbers.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        return number is not None and number not in self.unknown

    def source(self, named: Iterable[tuple[str, torch.Tensor]], seed: int) -> KeyedInit:
        """Of these tensors."""
        with _alone():
            refs = {name: self._ref(tensor) for name, tensor in named}
        needed: set[int] = set()
        for ref in refs.values():
            needed.update(_needed(ref.memory, self.entries)[0])
        kept = {number: self.entries[number] for number in sorted(needed)}
        return KeyedInit(refs, kept, tuple(self.sizes), frozenset(self.unknown), seed)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
        given = [t for t in _tensors((args, kwargs)) if t.is_meta]
        # Made where no operation was seen: its values are lost.
        strange = [t for t in given if t.untyped_storage()._cdata not in self._numbers]
        inputs = {self._ref(t).memory for t in given}
        self.unknown.update(self._ref(t).memory for t in strange)
        bare_args, bare_kwargs = pytree.tree_map_only(torch.Tensor, _bare, (args, kwargs))
        if "device" in {argument.name for argument in func._schema.arguments}:
            bare_kwargs = {**bare_kwargs, "device": torch.device("meta")}
        # A generator of the caller's does not travel; its draws are keyed like all others.
        bare_kwargs = {name: None if name == "generator" else value for name, value in bare_kwargs.items()}
        result = func(*bare_args, **bare_kwargs)
        outputs = _tensors(result)
        made = tuple(
            (position, self._ref(t))
            for position, t in enumerate(outputs)
            if t.untyped_storage()._cdata not in self._numbers
        )
        written = _written(func, args, kwargs)
        writes = {self._ref(t).memory for t in written if t.is_meta} | {ref.memory for _, ref in made}
        if not writes:  # a view, or a question about one
            return result
        overwrites = {ref.memory for _, ref in made} | _overwritten(func, args, self._ref)
        value_args, value_kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), values)
        value_kwargs = {name: None if name == "generator" else value for name, value in value_kwargs.items()}
        if func.name() in ("aten::empty.memory_format", "aten::empty_strided"):
            return result  # memory without content
        self.entries.append(
            _Entry(
                func.name(), value_args, value_kwargs, made, frozenset(inputs), frozenset(writes), frozenset(overwrites)
            )
        )
        return result

    def _value(self, tensor: torch.Tensor) -> Any:
        return self._ref(tensor) if tensor.is_meta else tensor.detach().clone()

    def _ref(self, tensor: torch.Tensor) -> _Ref:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(tensor)
        return _Ref(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@contextmanager
def _alone() -> Iterator[None]:
    """Nothing that happens inside is recorded, and tensors say where they are."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@dataclass(frozen=True)
class KeyedInit:
    """Parameters as the model's constructor makes them, from a tape, as a StateSource; this travels.

    Attributes:
        refs: the parameters by name.
        entries: by number, those that they need.
        sizes: bytes of all memories.
        unknown: memories whose content is not on the tape.
        seed: of the run.
    """

    refs: dict[str, _Ref]
    entries: dict[int, _Entry]
    sizes: tuple[int, ...]
    unknown: frozenset[int]
    seed: int
    title: str = "What the model's constructor makes"
    updates: int = 0
    groups: None = None

    @property
    def names(self) -> Collection[str]:
        return self.refs.keys()

    def info(self, name: str) -> TensorInfo:
        ref = self.refs[name]
        return TensorInfo(ref.dtype, ref.shape, 0, math.prod(ref.shape) * ref.dtype.itemsize)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See StateSource. One parameter after the other is made, and no other but what it was made from."""
        for name in names:
            made = _played(self.refs[name], self.entries, self.sizes, self.seed)
            alone = made.storage_offset() == 0 and made.untyped_storage().nbytes() == made.nbytes
            yield name, made if alone else made.clone()

    def kept(self, trained: Collection[str]) -> Kept:
        return {}

    def check(self) -> None:
        """Refuse parameters that a worker could not make.

        Raises:
            ConfigError: names the first one.
        """
        for name, ref in self.refs.items():
            if _needed(ref.memory, self.entries)[1] & self.unknown:
                raise ConfigError(
                    f"weights_on='workers': the model begins with values in {name!r} that its constructor computed or "
                    f"read, more than {MOST_VALUE_BYTES >> 20} MiB of them, and workers cannot make them again. Give "
                    "the weights as files (init_from=...), or set weights_on='client'."
                )


def _played(ref: _Ref, entries: Any, sizes: Any, seed: int) -> torch.Tensor:
    """This tensor with its values."""
    memories: dict[int, torch.Tensor] = {}

    def value(item: Any) -> Any:
        if not isinstance(item, _Ref):
            return item
        if item.memory not in memories:
            memories[item.memory] = torch.empty(sizes[item.memory], dtype=torch.uint8)
        return _view(memories[item.memory], item)

    with torch.no_grad():
        for number in _needed(ref.memory, entries)[0]:
            entry = entries[number]
            if not entry.op:
                value(entry.made[0][1]).copy_(entry.args)
                continue
            args, kwargs = pytree.tree_map_only(_Ref, value, (entry.args, entry.kwargs), is_leaf=_is_ref)
            with KeyedRandomness(RandomKey(seed, OF_CONSTRUCTION, 0), number << DRAWS_BITS):
                outputs = _tensors(_operation(entry.op)(*args, **kwargs))
            for position, made in entry.made:
                value(made).copy_(outputs[position])
        return value(ref)


def _needed(memory: int, entries: Any) -> tuple[list[int], set[int]]:
    """(numbers of the entries that this memory's content depends on, in order; memories that it depends on besides)."""
    numbers = range(len(entries)) if isinstance(entries, list) else sorted(entries)
    wanted, found = {memory}, []
    for number in reversed(numbers):
        entry = entries[number]
        if wanted & entry.writes:
            found.append(number)
            wanted -= entry.overwrites
            wanted |= entry.reads - entry.overwrites
    return found[::-1], wanted


def _is_ref(item: Any) -> bool:
    return isinstance(item, _Ref)


def _view(memory: torch.Tensor, ref: _Ref) -> torch.Tensor:
    return torch.empty(0, dtype=ref.dtype).set_(memory.untyped_storage(), ref.offset, ref.shape, ref.strides)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Those of the arguments that the operation changes, by its schema."""
    found = []
    unsaid = _WRITES_UNSAID.get(func.name(), ())
    for position, argument in enumerate(func._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in unsaid:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _overwritten(func: Any, args: Any, ref: Any) -> set[int]:
    """The memory of its first argument, where the operation leaves nothing of it."""
    if func.name().partition(".")[0] not in _OVERWRITING or not args[0].is_meta:
        return set()
    memory = ref(args[0]).memory
    itself = any(t.is_meta and ref(t).memory == memory for t in _tensors(args[1:]))
    return {memory} if _whole(args[0]) and not itself else set()


def _whole(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_bare(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _makes_much(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this makes a large floating-point tensor on the CPU, from nothing but numbers."""
    if func.name().removesuffix(".memory_format") not in _FACTORIES or _tensors((args, kwargs)):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    size = next((a for a in args if isinstance(a, list | tuple)), kwargs.get("size", ()))
    on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return dtype.is_floating_point and on_host and math.prod(size) >= LEAST_ELEMENTS


def _operation(name: str) -> Any:
    """What an entry calls: aten::add.Tensor is torch.ops.aten.add.Tensor."""
    if name == _TRUNCATED:
        return init._no_grad_trunc_normal_
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
