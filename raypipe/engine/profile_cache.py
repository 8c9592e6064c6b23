"""Profiles that are kept: measured once for a model, its shapes and a machine, and read again until one changes.

    key = SHA-256 of: code, attributes, graph, shapes, dtypes, sizes, device, versions  -->  <folder>/<key>.json

A file is complete or absent: it is written beside its place and moved there. One that cannot be read counts as
absent. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from raypipe import __version__
from raypipe.engine.capture import Capture
from raypipe.engine.profiling.described import described
from raypipe.engine.profiling.measure import (
    Progress,
    device_name,
    larger_sizes,
    powers_of_two,
)
from raypipe.engine.profiling.within import PROFILE_BUDGET_S, profile_within
from raypipe.engine.stage import GraphFunction, StageProgram
from raypipe.errors import PlanError
from raypipe.ir.profile import Profile

__all__ = [
    "cache_folder",
    "cached_profile",
    "load_profile",
    "profile_key",
    "save_profile",
]

MEASURING = 6
"""Number of the way in which seconds are measured: profiles of another one are not mixed with these."""


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where profiles are kept: RAYPIPE_CACHE_DIR, else ~/.cache/raypipe, and there ``profiles``."""
    chosen = (os.environ if environment is None else environment).get("RAYPIPE_CACHE_DIR")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "raypipe") / "profiles"


def cached_profile(
    captured: Capture,
    columns: Mapping[Any, torch.Tensor],
    larger: Mapping[Any, torch.Tensor] | None = None,
    *,
    folder: Path | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    budget_s: float = PROFILE_BUDGET_S,
    progress: Progress | None = None,
) -> tuple[Profile, bool]:
    """(profile, whether it was read): the saved one of exactly this model on this machine, else a new one, saved.

    Args:
        folder: of the cache, None for ``cache_folder()``. One that cannot be written to is no reason to fail.
        columns, larger, sizes, repeats, budget_s, progress: see ``profile_within``.
    """
    folder = folder if folder is not None else cache_folder()
    samples = min(len(t) for t in columns.values() if t.dim())
    tried = [*(powers_of_two(samples) if sizes is None else sizes), *larger_sizes(samples, larger or {})]
    key = profile_key(captured, columns, tried, repeats, budget_s)
    found = load_profile(folder, key)
    if found is not None and [n.name for n in found.graph.nodes] == [n.name for n in captured.graph.nodes]:
        return found, True
    measured = profile_within(
        captured, columns, larger, sizes=sizes, budget_s=budget_s, repeats=repeats, progress=progress
    )
    with suppress(OSError):
        save_profile(folder, key, measured)
    return measured, False


def profile_key(
    captured: Capture,
    columns: Mapping[Any, torch.Tensor],
    sizes: Sequence[int] = (),
    repeats: int = 5,
    budget_s: float = PROFILE_BUDGET_S,
) -> str:
    """Content key of a profile, as hexadecimal digits.

    Values of parameters and data do not count: they change no seconds that a plan should depend on.
    """
    (program,) = captured.programs(())
    tensors = {**captured.parameters, **captured.buffers}
    parts = {
        "raypipe": __version__,
        "torch": torch.__version__,
        "device": device_name(),
        "graph": captured.graph.to_json(),
        "precision": captured.recipe.precision.name,
        "code": _code(program),
        "loss": described(captured.loss_fn),
        "tensors": {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()},
        "columns": [[str(name), list(t.shape), str(t.dtype)] for name, t in columns.items()],
        "sizes": list(sizes),
        "repeats": repeats,
        "budget_s": budget_s,
        "measuring": MEASURING,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _code(program: StageProgram) -> Any:
    if isinstance(program.train, GraphFunction):
        shapes = [[list(t.shape), str(t.dtype)] for t in program.train.constants]
        return [program.train.source, shapes]
    children = getattr(program.train, "children", ())
    return [[child.name, described(child.module)] for child in children]


def load_profile(folder: Path, key: str) -> Profile | None:
    """The saved profile, None where there is none or it is damaged."""
    try:
        found = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        if found["sha256"] != _checksum(found["profile"]):
            return None
        return Profile.from_json(json.dumps(found["profile"]))
    except (OSError, PlanError, KeyError, TypeError, ValueError):
        return None


def save_profile(folder: Path, key: str, profile: Profile) -> Path:
    """Write a profile so that a reader sees all of it or nothing; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    content = json.loads(profile.to_json())
    handle, name = tempfile.mkstemp(prefix=f".{key[:12]}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"sha256": _checksum(content), "profile": content}, file, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
