"""Cache of profiles in files: a profile is made once, and read until the model, its shapes or the machine change.

    key = SHA-256 of: code, attributes, graph, shapes, dtypes, sizes, device, versions  -->  <folder>/<key>.json

An estimate for a described device follows from the graph alone. Its key has the rates of that device too, and the
source of this package.

A file is complete or absent, and an unreadable one counts as absent. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.capture import Capture, TracedModel
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.engine.stage.autograd_functions import AutogradFunction
from raypipe.engine.stage.generated_source import Region, Registered
from raypipe.engine.stage.minibatch_loss import LossTail
from raypipe.engine.stage.stage import GraphFunction, StageProgram
from raypipe.errors import PlanError
from raypipe.ir.profile import Profile
from raypipe.profiling.estimate import estimate_graph
from raypipe.profiling.held_outputs import HeldOutputs
from raypipe.profiling.measure import (
    PROFILE_BUDGET_S,
    REPEATS,
    Progress,
    device_name,
    larger_sizes,
    powers_of_two,
    profile_graph,
)
from raypipe.profiling.rates import Rates
from raypipe.profiling.steps import fingerprint, samples_of

MEASURING = 8
"""Version of the measuring method, a part of the cache key: profiles of other versions are not read."""

MOST_FILES = 256


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
    measure = functools.partial(
        profile_graph, captured, columns, larger, sizes=sizes, budget_s=budget_s, progress=progress
    )
    return _read_or_made(folder, key, captured, measure)


def cached_estimate(
    captured: Capture,
    columns: Mapping[Any, torch.Tensor],
    rates: Rates,
    *,
    folder: Path | None = None,
    sizes: Sequence[int] = (),
) -> tuple[Profile, bool]:
    """Read the saved estimate of a model's profile on a described device; without one, estimate it and save it.

    Nothing is saved for an nn.Sequential, whose children call code that the key does not have, and for operations that
    do not come from torch, in branches too, and custom autograd functions, because their shapes follow from other code
    than the graph.

    Args:
        rates: rates of the device.
        sizes: further micro-batch sizes, see ``estimate_graph``.
        columns, folder: see ``cached_profile``.

    Returns:
        (profile, True if it was read from the cache).
    """
    estimate = functools.partial(estimate_graph, captured, samples_of(columns) or 1, rates, sizes=sizes)
    if not isinstance(captured.model, TracedModel):
        return estimate(), False
    (program,) = captured.programs(())
    functions = [getattr(part, "train", None) for part in (program, program.loss)]
    if any(isinstance(one, GraphFunction) and _calls_other_code(one.names) for one in functions):
        return estimate(), False
    parts = [profile_key(captured, columns, sizes), dataclasses.astuple(rates), _own_source()]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return _read_or_made(folder if folder is not None else cache_folder(), key, captured, estimate)


def _calls_other_code(names: Mapping[str, Any]) -> bool:
    """Return True if generated source with these globals calls custom operations or autograd functions."""
    bodies = [body for region in names.values() if isinstance(region, Region) for body in region.bodies]
    calls = any(isinstance(thing, Registered | AutogradFunction) for thing in names.values())
    return calls or any(_calls_other_code(body.names) for body in bodies)


def _read_or_made(folder: Path, key: str, captured: Capture, make: Callable[[], Profile]) -> tuple[Profile, bool]:
    """Read a profile of this model from the cache; without one, make it and save it."""
    saved = load_profile(folder, key)
    if saved is not None and [n.name for n in saved.graph.nodes] == [n.name for n in captured.graph.nodes]:
        return saved, True
    made = make()
    with suppress(OSError, PlaceError):
        save_profile(folder, key, made)
    return made, False


@functools.cache
def _own_source() -> str:
    """Return a digest of the source of this package."""
    files = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


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
        "loss": _loss_code(program.loss, captured.loss_fn),
        "tensors": {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()},
        "columns": [[str(name), list(t.shape), str(t.dtype)] for name, t in columns.items()],
        "sizes": list(sizes),
        "repeats": REPEATS,
        "budget_s": budget_s,
        "measuring": MEASURING,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _loss_code(loss: Any, loss_fn: Any) -> Any:
    if isinstance(loss, LossTail):
        return _code(loss)
    return ["held", loss.joined] if isinstance(loss, HeldOutputs) else fingerprint(loss_fn)


def _code(program: StageProgram | LossTail) -> Any:
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


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of profiles in RAYPIPE_CACHE_DIR, or in ~/.cache/raypipe if that is not set.

    Args:
        environment: environment variables; None for those of this process.
    """
    chosen = (os.environ if environment is None else environment).get("RAYPIPE_CACHE_DIR")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "raypipe") / "profiles"


@dataclass(frozen=True, slots=True)
class JsonCache:
    """Folder with a file for each key, of which the ``most`` newest are kept."""

    folder: Path
    most: int = MOST_FILES

    def load(self, key: str) -> Any:
        """Read the saved content; None if it is missing or damaged."""
        try:
            saved = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            return saved["content"] if saved["sha256"] == _checksum(saved["content"]) else None
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def save(self, key: str, content: Any) -> None:
        """Write content that is JSON atomically: a reader finds a complete file or none.

        Raises:
            OSError, PlaceError: the folder cannot be written to.
        """
        data = json.dumps({"sha256": _checksum(content), "content": content}).encode()
        # Two processes may save the result of one key at once.
        Place.of(self.folder).write_bytes(f"{key}.json", data, partial=f".{key[:12]}.{os.getpid()}.tmp")
        for old in self._by_age()[: -self.most]:
            old.unlink(missing_ok=True)

    def _by_age(self) -> list[Path]:
        """List the files, oldest first; another process may remove some meanwhile."""
        ages = []
        for path in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):
                ages.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(ages)]


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
