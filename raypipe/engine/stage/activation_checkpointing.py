"""Activation checkpointing: recomputation of a stage's forward, and torch.utils.checkpoint in user models.

    F (forward)     inputs, columns, buffers --> outputs, sent and freed; kept: the arguments, and buffers' old values
    B (backward)    the same ------------------> outputs with their graph --> gradients

Recomputation of a stage: between F and B (I, or W if no input requires a gradient) a micro-batch holds its arguments
instead of its activations. Both forwards are bitwise equal: they use the weight version of the micro-batch and the
same random numbers, keyed by step and micro-batch (``KeyedRandomness``). In-place changes take effect once: a buffer (a
batch norm's statistics) is changed in F, and a copy of its old value in B; an input that the stage overwrites is
changed in B, and a copy of it in F.

F builds a graph too, and frees it: without one torch selects other kernels for some operations (an LSTM on a CPU),
which round differently, and requires_grad of the outputs would be unknown. The first micro-batch shows what a forward
changes. torch does not count in-place changes of a batch norm's statistics, and a change may keep the value, so the
model's graph lists the buffers that may change.

Chen et al., arXiv:1604.06174; per stage of a pipeline: GPipe, arXiv:1811.06965, section 2.3.

Checkpoints in user models: torch lets the backward restore the state of the global generator. Keyed random numbers do
not use that generator, and a backward is outside of `KeyedRandomness`, so the mask of a dropout would differ from the
forward's. The patched function enters the forward's key and draw number before it recomputes.

    tracing          the function is called directly: a graph has no use for recomputation
    a stage's child  without reentrant autograd, which does not support the inputs= of a stage's backward, and with the
                     tensors of its own forward bound again: other micro-batches, with other weights, ran in between
    eager            as in torch, keyed if the forward is

As in torch, no gradient reaches the function of a reentrant checkpoint if none of its inputs requires one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from raypipe.engine.stage.randomness import KeyedRandomness
from raypipe.errors import StageError

Tensors = tuple[torch.Tensor, ...]


class ForwardInputs(NamedTuple):
    """Inputs of a stage's forward, except weights and random key.

    Attributes:
        inputs: boundary tensors from the previous stage; None for a tensor that was not sent.
        columns: data columns by name, including those that the loss reads.
        buffers: buffers of the stage by name.
    """

    inputs: Sequence[torch.Tensor | None]
    columns: Mapping[Any, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class Recomputation:
    """Activation recomputation of one stage; ``changing`` has the names of buffers that a forward may change."""

    def __init__(self, stage: int, changing: Collection[str] = ()) -> None:
        self._stage = stage
        self._changing = {("buffer", name) for name in changing}
        self._changed: frozenset[tuple[str, Any]] | None = None  # by a forward; None before the first

    def first(
        self, run: Callable[[ForwardInputs], Tensors], arguments: ForwardInputs
    ) -> tuple[Tensors, Callable[[], Tensors]]:
        """Call ``run``, the forward; return (outputs without a graph, function that recomputes them with their graph).

        The backward must call the function at most once.

        Raises:
            StageError: the forward changed a tensor that the first micro-batch left unchanged.
        """
        kept = arguments._replace(buffers=self._copied("buffer", arguments.buffers))
        inputs = self._copied("input", dict(enumerate(arguments.inputs)))
        used = ForwardInputs(list(inputs.values()), self._copied("column", arguments.columns), arguments.buffers)
        before = dict(_versions(used))
        outputs = run(used)
        if not outputs:  # no valid target: nothing to make a gradient of
            return (), tuple
        changed = {key for key, version in _versions(used) if version != before[key]}
        if self._changed is None:
            self._changed = frozenset(changed | self._changing)
        elif changed - self._changed:
            raise self._unsteady(f"changes {_in_words(*min(changed - self._changed, key=str))}")
        requires_grad = tuple(x.requires_grad for x in outputs)
        bare = tuple(x.detach().requires_grad_(flag) for x, flag in zip(outputs, requires_grad, strict=True))
        return bare, partial(self._second, run, kept, requires_grad)

    def _second(
        self, run: Callable[[ForwardInputs], Tensors], kept: ForwardInputs, requires_grad: tuple[bool, ...]
    ) -> Tensors:
        """Recompute the outputs with their graph by ``run(kept)``, at the beginning of the backward.

        Raises:
            StageError: other outputs require a gradient than in the first forward (``requires_grad``).
        """
        outputs = run(kept)
        now_required = tuple(x.requires_grad for x in outputs)
        if now_required != requires_grad:
            raise self._unsteady("has outputs that require a gradient")
        return outputs

    def _copied(self, kind: str, tensors: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the tensors; clone each that a forward changes in place, and in the first forward clone all.

        ``kind`` is "input", "column" or "buffer", as in ``_versions``.
        """
        changed = self._changed
        return {
            name: _copy(x) if x is not None and (changed is None or (kind, name) in changed) else x
            for name, x in tensors.items()
        }

    def _unsteady(self, what: str) -> StageError:
        return StageError(
            f"Stage {self._stage} {what} in some micro-batches and not in others, so it cannot be recomputed. Set "
            "recompute='never', or leave this stage out of recompute."
        )


def _versions(arguments: ForwardInputs) -> Iterator[tuple[tuple[str, Any], int]]:
    """Yield ((kind, name), in-place version counter) of each tensor; a kind is "input", "column" or "buffer"."""
    kinds = ("input", dict(enumerate(arguments.inputs))), ("column", arguments.columns), ("buffer", arguments.buffers)
    for kind, tensors in kinds:
        for name, x in tensors.items():
            if x is not None:
                yield (kind, name), x._version


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Clone a tensor as a leaf with the same requires_grad."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _in_words(kind: str, name: Any) -> str:
    return {"input": f"input {name}", "column": f"column {name!r}"}.get(kind, f"buffer {name!r}")


_SINCE_2_14 = "_checkpoint_without_reentrant_generator_impl"
PACKED_ARGUMENTS = hasattr(checkpoints, _SINCE_2_14)
"""True if CHECKPOINT_PART takes the user's arguments as a tuple and a dict, and its own arguments by keyword."""
CHECKPOINT_PART = _SINCE_2_14 if PACKED_ARGUMENTS else "_checkpoint_without_reentrant_generator"
"""Private function of torch.utils.checkpoint that runs a non-reentrant checkpoint; renamed in torch 2.14."""

Bind = Callable[[], None]


class _Here(threading.local):
    """Mode of torch.utils.checkpoint in this thread.

    ``tracing`` is True while a model is traced. ``bind`` binds the tensors of the present forward; None outside of one.
    """

    tracing = False
    bind: Bind | None = None


_here = _Here()
_lock = threading.Lock()
_installed = False
_apply = checkpoints.CheckpointFunction.apply
_parts = getattr(checkpoints, CHECKPOINT_PART)


def key_checkpoints() -> None:
    """Patch torch.utils.checkpoint for keyed randomness; checkpoints outside of `KeyedRandomness` behave as before."""
    global _installed
    with _lock:
        if not _installed:
            checkpoints.CheckpointFunction.apply = classmethod(_reentrant)  # type: ignore[assignment]
            setattr(checkpoints, CHECKPOINT_PART, _not_reentrant if PACKED_ARGUMENTS else _of_old)
            _installed = True


@contextmanager
def traced_checkpoints() -> Iterator[None]:
    """Run checkpointed functions directly while this thread traces a model."""
    key_checkpoints()
    before, _here.tracing = _here.tracing, True
    try:
        yield
    finally:
        _here.tracing = before


@contextmanager
def untraced_checkpoints(bind: Bind) -> Iterator[None]:
    """Run checkpoints in a stage's child modules without reentrant autograd inside the context.

    Args:
        bind: function that binds this forward's weights and buffers to the modules again; called in the backward,
            before it recomputes.
    """
    key_checkpoints()
    before, _here.bind = _here.bind, bind
    try:
        yield
    finally:
        _here.bind = before


def _reentrant(cls: type, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Replace ``CheckpointFunction.apply``, which runs a reentrant checkpoint."""
    if _here.tracing or _here.bind is not None:
        learns = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with nullcontext() if learns else torch.no_grad():
            if _here.tracing or not learns:
                return function(*args)
            return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
    again = _again(function)
    if again is None:
        return _apply(function, preserve, *args)
    calls = iter((function,))  # the forward's, then those of the backward
    return _apply(lambda *inputs: next(calls, again)(*inputs), False, *args)


def _not_reentrant(
    function: Callable[..., Any], args: Any, kwargs: Any, *, preserve_rng_state: bool = True, **how: Any
) -> Any:
    """Replace ``_checkpoint_without_reentrant_generator_impl``, which calls the function in the backward only."""
    again = None if _here.tracing else _again(function)
    keeps = preserve_rng_state and again is None
    return _parts(function if again is None else again, args, kwargs, preserve_rng_state=keeps, **how)


def _of_old(function: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_checkpoint_without_reentrant_generator``, which torch has until 2.13."""
    again = None if _here.tracing else _again(function)
    return _parts(function, preserve, *args, **kwargs) if again is None else _parts(again, False, *args, **kwargs)


def _again(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap a checkpointed function for its call in the backward, with the forward's random numbers and tensors.

    Returns None if no wrapper is needed, because random numbers are not keyed and no tensors are bound.
    """
    bind = _here.bind
    keyed = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, KeyedRandomness)]
    if not keyed and bind is None:
        return None
    key, index = (keyed[-1].key, keyed[-1].index) if keyed else (None, 0)

    def again(*args: Any, **kwargs: Any) -> Any:
        if bind is not None:
            bind()
        with nullcontext() if key is None else KeyedRandomness(key, index):
            return function(*args, **kwargs)

    return again
