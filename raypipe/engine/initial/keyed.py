"""Parameters made from a tape of what a model's constructor did to them: see tape.py, which records it.

entries   #0 zeros -> m0    #1 normal_(m1)    #2 add(m0, m1) -> m2    #3 m1.mul_(2)
m2        needs 2, 1, 0 and not 3; an entry that overwrites all of a memory ends the search there
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import init
from torch.utils import _pytree as pytree

from raypipe.engine.checkpoint import Kept, TensorInfo
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.errors import ConfigError

__all__ = [
    "MOST_TOTAL_BYTES",
    "MOST_VALUE_BYTES",
    "TRUNCATED",
    "Entry",
    "KeyedInit",
    "Ref",
    "needed",
    "played",
    "tensors_in",
    "view_of",
]

MOST_VALUE_BYTES = 1 << 26
"""Of a parameter whose values were computed from others; a tape carries no more, for the client would hold it."""
MOST_TOTAL_BYTES = 1 << 28
"""Of all of them: a tape travels to every worker."""
OF_CONSTRUCTION = -1
"""The step that the draws of a constructor are keyed by; training counts from 0."""

DRAWS_BITS = 16
"""Draws of one operation that have keys of their own."""

TRUNCATED = "torch.nn.init.trunc_normal_"


class Ref(NamedTuple):
    """A tensor as a view of numbered memory."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Entry(NamedTuple):
    """One operation.

    Attributes:
        op: its name, as in "aten::normal_" or "aten::add.Tensor"; "" writes the one tensor in ``args`` to ``made``.
        args, kwargs: with a Ref for every tensor of the tape; other tensors are values.
        made: tensors in memory that did not exist before, by position among all that it returns.
        reads, writes: numbers of memories.
        overwrites: memories of which nothing from before is left.
    """

    op: str
    args: Any
    kwargs: Any
    made: tuple[tuple[int, Ref], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]


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

    refs: dict[str, Ref]
    entries: dict[int, Entry]
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
            made = played(self.refs[name], self.entries, self.sizes, self.seed)
            alone = made.storage_offset() == 0 and made.untyped_storage().nbytes() == made.nbytes
            yield name, made if alone else made.clone()

    def kept(self, trained: Collection[str]) -> Kept:
        return {}

    def check(self) -> None:
        """Refuse parameters that a worker could not make, and those that nothing made.

        Raises:
            ConfigError: names the first one.
        """
        for name, ref in self.refs.items():
            rest = needed(ref.memory, self.entries)[1]
            if rest & self.unknown:
                raise ConfigError(
                    f"weights_on='workers': the model begins with values in {name!r} that its constructor computed or "
                    f"read, more than {MOST_VALUE_BYTES >> 20} MiB of them, or more than {MOST_TOTAL_BYTES >> 20} MiB "
                    "in all such parameters, and workers cannot make them again. Give the weights as files "
                    "(init_from=...), or set weights_on='client'."
                )
            if rest and bool(played(ref, self.entries, self.sizes, self.seed, unmade=0xFF).isnan().any()):
                raise ConfigError(
                    f"weights_on='workers': the model's constructor leaves {name!r}, or a part of it, as torch.empty "
                    "made it, which is whatever was in memory. Initialise it, as torch.nn.init does, or give the "
                    "weights as files (init_from=...)."
                )


def played(ref: Ref, entries: Any, sizes: Any, seed: int, unmade: int | None = None) -> torch.Tensor:
    """This tensor with its values.

    Args:
        unmade: byte that memory begins with, 0xFF for floats that are NaN; None leaves what was there.
    """
    memories: dict[int, torch.Tensor] = {}

    def value(item: Any) -> Any:
        if not isinstance(item, Ref):
            return item
        if item.memory not in memories:
            memories[item.memory] = torch.empty(sizes[item.memory], dtype=torch.uint8)
            if unmade is not None:
                memories[item.memory].fill_(unmade)
        return view_of(memories[item.memory], item)

    with torch.no_grad():
        for number in needed(ref.memory, entries)[0]:
            entry = entries[number]
            if not entry.op:
                value(entry.made[0][1]).copy_(entry.args)
                continue
            args, kwargs = pytree.tree_map_only(Ref, value, (entry.args, entry.kwargs), is_leaf=_is_ref)
            with KeyedRandomness(RandomKey(seed, OF_CONSTRUCTION, 0), number << DRAWS_BITS):
                outputs = tensors_in(_operation(entry.op)(*args, **kwargs))
            for position, made in entry.made:
                value(made).copy_(outputs[position])
        return value(ref)


def needed(memory: int, entries: Any) -> tuple[list[int], set[int]]:
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
    return isinstance(item, Ref)


def view_of(memory: torch.Tensor, ref: Ref) -> torch.Tensor:
    return torch.empty(0, dtype=ref.dtype).set_(memory.untyped_storage(), ref.offset, ref.shape, ref.strides)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors of a tree of arguments."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _operation(name: str) -> Any:
    """What an entry calls: aten::add.Tensor is torch.ops.aten.add.Tensor."""
    if name == TRUNCATED:
        return init._no_grad_trunc_normal_
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
