"""What a model shares with the rest of its process: global generators and settings, which no stage would share.

Python's and numpy's generators are not keyed, so a number that forward draws there is frozen in a traced graph and
different in every stage and on every resume; torch.manual_seed within forward would be ignored. Both are noticed
because the generators are seeded privately before the calls: where they stand afterwards must be where they stood.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.engine.item_randomness import generator_states, own_generators, seed_generators
from raypipe.errors import CaptureError

__all__ = ["surroundings_kept"]

_TOUCHING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (random, tuple(name for name in random.__all__ if name[0].islower())),
    (np.random, tuple(name for name in np.random.__all__ if name[0].islower() and name != "default_rng")),
    (torch, ("manual_seed", "seed", "set_rng_state")),
    (torch.random, ("manual_seed", "seed", "set_rng_state")),
)
_DENORMAL = torch.full((), 1e-40)
_TORCHS_OWN = ("TORCH", "PYTORCH", "TRITON", "CUDA", "KMP", "OMP")
"""Beginnings of environment variables that torch itself sets while it works."""
_LIBRARIES = ("torch", "numpy", "random", "sympy")
_REMEDIES = {
    "torch's generator": "Leave seeding out of forward: PipelineConfig(seed=...) keys every draw of every step",
    "numpy's generator": "Draw with torch (torch.rand, dropout), whose draws are keyed and equal on every stage",
    "Python's generator": "Draw with torch (torch.rand, dropout), whose draws are keyed and equal on every stage",
}


@contextmanager
def surroundings_kept(whose: str) -> Iterator[None]:
    """Refuse code that moves a global generator or changes a global setting; both are put back either way.

    Args:
        whose: runs inside, for the message.

    Raises:
        CaptureError: names what was changed, the line where that can be told, and what to do.
    """
    with own_generators():
        seed_generators(0x7A79, 0, 0)
        before, settings = generator_states(), _settings()
        touched: dict[str, str] = {}
        restore = _notice(touched)
        try:
            yield
        finally:
            restore()
            after, left = generator_states(), _settings()
            _put_back(settings)
        moved = {
            "torch's generator": not torch.equal(before.torch, after.torch),
            "numpy's generator": not before._replace(torch=after.torch, python=after.python).same_as(after),
            "Python's generator": before.python != after.python,
        }
    for generator, found in moved.items():
        if found:
            raise CaptureError(
                f"{whose} draws from {generator} or seeds it{_at(touched, generator)}. A traced model would repeat one "
                f"draw for ever, and stages would not agree on it. {_REMEDIES[generator]}."
            )
    for name, value in settings.items():
        if left[name] != value:
            raise CaptureError(
                f"{whose} changes {name}{_from_to(value, left[name])} and leaves it so. Stages are processes of their "
                "own and would not follow. Change it before training, or put it back before forward returns."
            )


def _settings() -> dict[str, Any]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's flushing of denormals": _flushes_denormals(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "the working directory": Path.cwd(),
        "the environment": {name: value for name, value in os.environ.items() if not name.startswith(_TORCHS_OWN)},
    }


def _flushes_denormals() -> bool:
    """Torch sets this for a thread and its children and does not tell it."""
    return bool((_DENORMAL * 0.5 == 0).item())


def _put_back(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(settings["torch's default dtype"])
    if torch.get_default_device() != settings["torch's default device"]:
        torch.set_default_device(settings["torch's default device"])
    torch.set_grad_enabled(settings["torch's grad mode"])
    if torch.get_num_threads() != settings["torch's number of threads"]:
        torch.set_num_threads(settings["torch's number of threads"])
    if torch.are_deterministic_algorithms_enabled() != settings["torch's deterministic mode"]:
        torch.use_deterministic_algorithms(settings["torch's deterministic mode"])
    if _flushes_denormals() != settings["torch's flushing of denormals"]:
        torch.set_flush_denormal(settings["torch's flushing of denormals"])
    for device, enabled in zip(("cpu", "cuda"), settings["autocast"], strict=True):
        torch.set_autocast_enabled(device, enabled)
    os.chdir(settings["the working directory"])
    for name in [name for name in os.environ if not name.startswith(_TORCHS_OWN)]:
        if name not in settings["the environment"]:
            del os.environ[name]
    os.environ.update(settings["the environment"])


def _notice(touched: dict[str, str]) -> Callable[[], None]:
    """Write down the first line of the user's that calls one of the functions that touch something global."""
    originals = [(owner, name, getattr(owner, name)) for owner, names in _TOUCHING for name in names]
    _listening.append(touched)
    for owner, name, function in originals:
        if callable(function) and not isinstance(function, type):
            setattr(owner, name, _noticing(owner.__name__.split(".")[0], function))

    def restore() -> None:
        _listening.pop()
        for owner, name, function in originals:
            setattr(owner, name, function)

    return restore


_listening: list[dict[str, str]] = []


@functools.cache
def _noticing(kind: str, function: Any) -> Any:
    """The function that says who called it. There is one for good: torch's compiler knows numpy's functions by their
    ids, and that of one which is gone may be the id of a function of the user's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if _listening and frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
            _listening[-1].setdefault(kind, f" at {frame.f_code.co_filename}:{frame.f_lineno}")
        return function(*args, **kwargs)

    return call


def _at(touched: dict[str, str], what: str) -> str:
    kind = {"numpy's generator": "numpy", "Python's generator": "random"}.get(what, "torch")
    return touched.get(kind, "")


def _from_to(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        names = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        return f" ({', '.join(names[:3])})"
    return f" from {before} to {after}"
