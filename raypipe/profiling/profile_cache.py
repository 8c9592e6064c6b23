"""Cache of profiles in files: a profile is measured once, and read until the model, its shapes or the machine change.

    key = SHA-256 of: code, attributes, graph, shapes, dtypes, sizes, device, versions  -->  <folder>/<key>.json

Files are those of a JsonCache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from raypipe.capture import Capture
from raypipe.engine.io.storage import PlaceError
from raypipe.engine.stage.stage import GraphFunction, StageProgram
from raypipe.errors import PlanError
from raypipe.ir.profile import Profile
from raypipe.profiling.fingerprint import fingerprint
from raypipe.profiling.json_cache import JsonCache, cache_folder
from raypipe.profiling.measure import (
    PROFILE_BUDGET_S,
    REPEATS,
    Progress,
    device_name,
    larger_sizes,
    powers_of_two,
    profile_graph,
)

MEASURING = 7
"""Version of the measuring method, a part of the cache key: profiles of other versions are not read."""


def cached_profile(
    captured: Capture,
    columns: Mapping[Any, torch.Tensor],
    larger: Mapping[Any, torch.Tensor] | None = None,
    *,
    folder: Path | None = None,
    sizes: Sequence[int] | None = None,
    budget_s: float = PROFILE_BUDGET_S,
    progress: Progress | None = None,
) -> tuple[Profile, bool]:
    """Read the saved profile of a model on this machine; without one, measure a profile and save it.

    Args:
        folder: folder of the cache; None for ``cache_folder()``. If it cannot be written to, nothing is saved.
        columns, larger, sizes, budget_s, progress: see ``profile_graph``.

    Returns:
        (profile, True if it was read from the cache).
    """
    folder = folder if folder is not None else cache_folder()
    samples = min(len(t) for t in columns.values() if t.dim())
    tried = [*(powers_of_two(samples) if sizes is None else sizes), *larger_sizes(samples, larger or {})]
    key = profile_key(captured, columns, tried, budget_s)
    saved = load_profile(folder, key)
    if saved is not None and [n.name for n in saved.graph.nodes] == [n.name for n in captured.graph.nodes]:
        return saved, True
    measured = profile_graph(captured, columns, larger, sizes=sizes, budget_s=budget_s, progress=progress)
    with suppress(OSError, PlaceError):
        save_profile(folder, key, measured)
    return measured, False


def profile_key(
    captured: Capture,
    columns: Mapping[Any, torch.Tensor],
    sizes: Sequence[int] = (),
    budget_s: float = PROFILE_BUDGET_S,
) -> str:
    """Compute the key of a profile in the cache, as hexadecimal digits.

    The key does not depend on the values of parameters and data, because plans should not.
    """
    (program,) = captured.programs(())
    tensors = {**captured.parameters, **captured.buffers}
    parts = {
        "torch": torch.__version__,
        "device": device_name(),
        "graph": captured.graph.to_json(),
        "precision": captured.recipe.precision.name,
        "code": _code(program),
        "loss": fingerprint(captured.loss_fn),
        "tensors": {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()},
        "columns": [[str(name), list(t.shape), str(t.dtype)] for name, t in columns.items()],
        "sizes": list(sizes),
        "repeats": REPEATS,
        "budget_s": budget_s,
        "measuring": MEASURING,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _code(program: StageProgram) -> Any:
    if isinstance(program.train, GraphFunction):
        shapes = [[list(t.shape), str(t.dtype)] for t in program.train.constants]
        return [program.train.source, shapes]
    children = getattr(program.train, "children", ())
    return [[child.name, fingerprint(child.module)] for child in children]


def load_profile(folder: Path, key: str) -> Profile | None:
    """Read the saved profile; None if it is missing or damaged."""
    content = JsonCache(folder).load(key)
    try:
        return None if content is None else Profile.from_json(json.dumps(content))
    except PlanError:
        return None


def save_profile(folder: Path, key: str, profile: Profile) -> None:
    """Write a profile to the cache, as a file of its own."""
    JsonCache(folder).save(key, json.loads(profile.to_json()))
