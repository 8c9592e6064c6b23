"""torch.utils.checkpoint where draws are keyed: what the backward computes again draws what the forward drew.

torch lets the backward set the global generator back to where it was in the forward. Keyed draws do not use that
generator, and a backward is outside of `KeyedRandomness`, so the mask of a dropout would be another one than that of
the forward. Here the function that is computed again enters the forward's key and number first.

    traced           the function runs as it is: a graph has no use for computing twice
    a stage's child  without reentrant autograd, which does not know the inputs= of a stage's backward, and with the
                     tensors of its own forward bound: other micro-batches, with other weights, came in between
    eager            as torch does it, keyed if the forward is

As with torch a reentrant checkpoint of which no input requires a gradient passes none to what is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from raypipe.engine.randomness import KeyedRandomness
from raypipe.engine.torch_parts import CHECKPOINT_PART, PACKED_ARGUMENTS

__all__ = ["key_checkpoints", "traced_checkpoints", "untraced_checkpoints"]

Bind = Callable[[], None]


class _Here(threading.local):
    """Where this thread is."""

    tracing = False
    bind: Bind | None = None


_here = _Here()
_lock = threading.Lock()
_installed = False
_apply = checkpoints.CheckpointFunction.apply
_parts = getattr(checkpoints, CHECKPOINT_PART)


def key_checkpoints() -> None:
    """From now on checkpoints know keyed draws; one that runs outside of `KeyedRandomness` is torch's as before."""
    global _installed
    with _lock:
        if not _installed:
            checkpoints.CheckpointFunction.apply = classmethod(_reentrant)  # type: ignore[assignment]
            setattr(checkpoints, CHECKPOINT_PART, _not_reentrant if PACKED_ARGUMENTS else _of_old)
            _installed = True


@contextmanager
def traced_checkpoints() -> Iterator[None]:
    """While inside, this thread traces: checkpoints just run their function."""
    key_checkpoints()
    before, _here.tracing = _here.tracing, True
    try:
        yield
    finally:
        _here.tracing = before


@contextmanager
def untraced_checkpoints(bind: Bind) -> Iterator[None]:
    """While inside, this thread runs children of a stage as they are.

    Args:
        bind: lets the children use the tensors of this forward again.
    """
    key_checkpoints()
    before, _here.bind = _here.bind, bind
    try:
        yield
    finally:
        _here.bind = before


def _reentrant(cls: type, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """``CheckpointFunction.apply``."""
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
    """``_checkpoint_without_reentrant_generator_impl``, which calls the function in the backward only."""
    again = None if _here.tracing else _again(function)
    keeps = preserve_rng_state and again is None
    return _parts(function if again is None else again, args, kwargs, preserve_rng_state=keeps, **how)


def _of_old(function: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
    """The same as ``_checkpoint_without_reentrant_generator`` until torch 2.13."""
    again = None if _here.tracing else _again(function)
    return _parts(function, preserve, *args, **kwargs) if again is None else _parts(again, False, *args, **kwargs)


def _again(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function as the backward is to call it, None where nothing is keyed here."""
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
