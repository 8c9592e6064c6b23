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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raypipe.engine.initial.aliases import Aliases
from raypipe.engine.initial.keyed import (
    MOST_TOTAL_BYTES,
    MOST_VALUE_BYTES,
    TRUNCATED,
    Entry,
    KeyedInit,
    Ref,
    needed,
    played,
    tensors_in,
    view_of,
)
from raypipe.errors import ConfigError

__all__ = ["InitTape"]

LEAST_ELEMENTS = 1 << 16
"""A floating-point tensor of so many elements is made on the meta device at once; smaller ones are values to compute
with in Python, and are only recorded where they become parameters."""
_FACTORIES = {
    f"aten::{name}"
    for name in ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "normal.float_float")
}
_OVERWRITING = {
    f"aten::{name}_" for name in ("zero", "fill", "normal", "uniform", "exponential", "copy", "log_normal", "cauchy")
}
_WRITES_UNSAID = {"aten::native_batch_norm": ("running_mean", "running_var")}
"""What an operation writes to though its schema does not say so."""


class InitTape(TorchDispatchMode):
    """Records while it is entered; one thread's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.entries: list[Entry] = []
        self.sizes: list[int] = []  # bytes of every memory
        self.unknown: set[int] = set()  # memories whose content nobody recorded
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._alive: list[torch.Tensor] = []  # addresses stay unique while these live; they take no memory
        self._aliases = Aliases()
        self._value_bytes = 0  # of parameters that were given with values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # which tells others that these tensors are on the CPU
            return self._seen(func, args, kwargs or {})

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
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
        unknown = [t for t in tensors_in((args, kwargs)) if t.is_meta and not self.knows(t)]
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

    def _note(self, values: Iterable[tuple[Ref, torch.Tensor]]) -> None:
        """All of a memory has these values now."""
        for ref, value in values:
            memory = frozenset({ref.memory})
            self.entries.append(Entry("", value.detach().clone(), {}, ((0, ref),), frozenset(), memory, memory))

    def fill(self, tensor: torch.Tensor, *numbers: float) -> None:
        """Note that a truncated normal distribution fills this tensor, which torch draws until all of it lies inside.

        Args:
            numbers: mean, standard deviation, least, most.
        """
        with _alone():
            ref = self._ref(tensor)
            written = frozenset({ref.memory})
            gone = written if _whole(tensor) else frozenset()
            self.entries.append(Entry(TRUNCATED, (ref, *numbers), {}, (), written - gone, written, gone))

    def defer(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device that begins with the values of this one."""
        with _alone():
            bare = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            ref = self._ref(bare)
            self._value_bytes += real.nbytes
            if real.nbytes > MOST_VALUE_BYTES or self._value_bytes > MOST_TOTAL_BYTES:
                self.unknown.add(ref.memory)
                self._value_bytes -= real.nbytes
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
                whole = Ref(ref.memory, torch.uint8, (self.sizes[ref.memory],), (1,), 0)
                held[ref.memory] = played(whole, self.entries, self.sizes, seed)
            return view_of(held[ref.memory], ref)

    def gave_away(self, tensor: torch.Tensor) -> bool:
        """Whether it has values, and a parameter was made of it that would share its memory in plain PyTorch."""
        return not tensor.is_meta and self._aliases.has(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the meta device, and what was done to it is recorded."""
        with _alone():
            number = self._numbers.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        return number is not None and number not in self.unknown

    def source(self, named: Iterable[tuple[str, torch.Tensor]], seed: int) -> KeyedInit:
        """Of these tensors."""
        with _alone():
            refs = {name: self._ref(tensor) for name, tensor in named}
        wanted: set[int] = set()
        for ref in refs.values():
            wanted.update(needed(ref.memory, self.entries)[0])
        kept = {number: self.entries[number] for number in sorted(wanted)}
        return KeyedInit(refs, kept, tuple(self.sizes), frozenset(self.unknown), seed)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
        given = [t for t in tensors_in((args, kwargs)) if t.is_meta]
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
        outputs = tensors_in(result)
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
            Entry(
                func.name(), value_args, value_kwargs, made, frozenset(inputs), frozenset(writes), frozenset(overwrites)
            )
        )
        return result

    def _value(self, tensor: torch.Tensor) -> Any:
        return self._ref(tensor) if tensor.is_meta else tensor.detach().clone()

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(tensor)
        return Ref(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@contextmanager
def _alone() -> Iterator[None]:
    """Nothing that happens inside is recorded, and tensors say where they are."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Those of the arguments that the operation changes, by its schema."""
    found = []
    unsaid = _WRITES_UNSAID.get(func.name(), ())
    for position, argument in enumerate(func._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in unsaid:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _overwritten(func: Any, args: Any, ref: Any) -> set[int]:
    """The memory of its first argument, where the operation leaves nothing of it."""
    if func.name().partition(".")[0] not in _OVERWRITING or not args[0].is_meta:
        return set()
    memory = ref(args[0]).memory
    itself = any(t.is_meta and ref(t).memory == memory for t in tensors_in(args[1:]))
    return {memory} if _whole(args[0]) and not itself else set()


def _whole(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_bare(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _makes_much(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this makes a large floating-point tensor on the CPU, from nothing but numbers."""
    if func.name().removesuffix(".memory_format") not in _FACTORIES or tensors_in((args, kwargs)):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    size = next((a for a in args if isinstance(a, list | tuple)), kwargs.get("size", ()))
    on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return dtype.is_floating_point and on_host and math.prod(size) >= LEAST_ELEMENTS
