"""Graphs of the fake device: operations that are repeated on the same memory, without the Python that made them.

    recorded      operation, arguments by address; nothing is computed, so what it returns is NaN
    replayed      the same operations on the memory at these addresses, whatever is in it now
    given away    memory of the graph that nobody kept, or memory from outside that was freed: NaN before every replay

As on a GPU, a value in host memory is the one of the recording, and what the host has to read is refused. So are draws
from generators that are not registered; the others have the state of the generator at the replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from raypipe.engine.stage.randomness import draws_randomness

__all__ = ["NOT_RECORDED", "Tape", "with_states"]

NOT_RECORDED = "operation not permitted when stream is capturing"
"""As CUDA says it."""
_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default}


class Address(NamedTuple):
    """Part of a numbered piece of memory, as a tensor shows it."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """An operation, and where its fresh results go, by their place among all that it returns."""

    func: Any
    args: Any
    kwargs: Any
    fresh: Sequence[Address]


def with_states(
    tree: Any, of: Callable[[torch.Generator], torch.Generator] = torch.Generator.clone_state
) -> Any:  # fmt: skip
    """Arguments of an operation with other generators: by default with copies, which keep the state of now."""
    return pytree.tree_map(lambda x: of(x) if isinstance(x, torch.Generator) else x, tree)


class Tape:
    """The operations of one graph, which may draw from these generators."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = {_impl_of(x): x for x in generators}
        self._before = [x.get_state() for x in self._generators.values()]
        self._steps: list[Step] = []
        self._memory: list[tuple[weakref.ref[Any], int]] = []
        self._number: dict[int, int] = {}

    def refuse_unrecordable(self, func: Any, args: Any, kwargs: Any) -> None:
        """What a GPU cannot record: it makes the host wait, or draws from a generator that is not of this graph."""
        shapes = torch.Tag.dynamic_output_shape in func.tags
        if func is _aten.index.Tensor:  # only a mask makes the size depend on values
            shapes = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if func in _READS or shapes:
            raise RuntimeError(f"{NOT_RECORDED}: {func} is read by the host")
        given = [_impl_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
        if draws_randomness(func, args, kwargs) and not (given and self._generators.keys() >= set(given)):
            raise RuntimeError(f"{NOT_RECORDED}: {func} draws from a generator that is not registered")

    def refuse_seeding(self) -> None:
        """Called when the recording ends."""
        now = (x.get_state() for x in self._generators.values())
        if not all(map(torch.equal, now, self._before)):
            raise RuntimeError(f"{NOT_RECORDED}: a generator is seeded")

    def states(self) -> dict[int, torch.Generator]:
        """Generators for a replay: copies of those of the graph, as they are now."""
        return {number: x.clone_state() for number, x in self._generators.items()}

    def add(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], fresh: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor], holds: Callable[[torch.Tensor], bool],
    ) -> None:  # fmt: skip
        """Note an operation that is not carried out now."""

        def noted(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            # What a stage makes outside of its thread counts as host memory; a GPU takes scalars from there.
            return self._address(x) if holds(x) or x.dim() or any(x is y for y in changed) else x.clone()

        into = [self._address(x) for x in fresh]
        self._steps.append(Step(func, pytree.tree_map(noted, args), pytree.tree_map(noted, dict(kwargs)), into))

    def used(self) -> dict[int, torch.Tensor]:
        """Memory for a replay, by its number: what is still there, and NaN for the rest."""
        with _disable_current_modes():
            return {number: _bytes(ref(), nbytes) for number, (ref, nbytes) in enumerate(self._memory)}

    def play(self, memory: Mapping[int, torch.Tensor], states: Mapping[int, torch.Generator]) -> None:
        """Carry out all operations on this memory, with these generators for those of the graph."""

        def there(x: Any) -> Any:
            if not isinstance(x, Address):
                return x
            storage = memory[x.memory].untyped_storage()
            return torch.empty(0, dtype=x.dtype).set_(storage, x.offset, x.shape, x.strides)  # type: ignore[call-overload]

        for step in self._steps:
            args, kwargs = (
                with_states(pytree.tree_map(there, x, is_leaf=_is_address), lambda x: states[_impl_of(x)])
                for x in (step.args, step.kwargs)
            )
            given = {_place(x) for x in _tensors((args, kwargs))}
            made = [x for x in _tensors(step.func(*args, **kwargs)) if _place(x) not in given]
            for address, x in zip(step.fresh, made, strict=bool(step.fresh)):
                there(address).copy_(x)

    def _address(self, x: torch.Tensor) -> Address:
        storage = x.untyped_storage()
        number = self._number.get(id(storage))
        if number is None or self._memory[number][0]() is not storage:
            number = self._number[id(storage)] = len(self._memory)
            self._memory.append((weakref.ref(storage), storage.nbytes()))
        return Address(number, x.dtype, x.storage_offset(), tuple(x.shape), x.stride())


def _bytes(storage: Any, nbytes: int) -> torch.Tensor:
    if storage is None:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # as floats: NaN
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))  # type: ignore[call-overload]


def _is_address(x: Any) -> bool:
    return isinstance(x, Address)


def _impl_of(x: torch.Generator) -> int:
    """Of the generator, for which every operation gets a new object."""
    return x._cdata  # type: ignore[attr-defined]


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))
