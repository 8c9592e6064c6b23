"""Cache of plans in files: `raypipe plan` traces and searches once, until anything that the plan follows from changes.

    key      files of all imported modules, environment, versions, settings, cluster, the built model, the first rows
      |
      v      <folder>/<key>.json
    entry    plan, or why none is possible; files imported and rows read while it was made, which must be the same still

Whatever cannot be compared completely is not cached: a model with an object of a compiled extension, a stream, a file
that was edited while this process ran, and a forward that opens a file. Not compared are network and clock, and the
state that user code leaves in an installed package. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raypipe.data.open_data import Source
from raypipe.data.stream_source import StreamSource
from raypipe.engine.io.storage import PlaceError
from raypipe.engine.torch_settings import torch_settings
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.prepare.inputs import BegunArguments
from raypipe.prepare.value_digest import UnreadableError, digest_of
from raypipe.profiling.json_cache import JsonCache, cache_folder
from raypipe.profiling.measure import device_name

_UNREAD = {"_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables of the environment that the shell changes with every command, or torch when it is imported."""
GRANULARITY_S = 2.0
"""Coarsest resolution of the times of files, as on FAT."""
_UNSEEN = ("/proc/", "/sys/", "/dev/", f"{sys.prefix}/", f"{sys.base_prefix}/")
"""Folders of the system and of installed packages, whose files may be opened."""


def cached_plan(
    begun: BegunArguments,
    settings: Mapping[str, Any],
    make: Callable[[BegunArguments], Plan],
    began_s: float,
    folder: Path | None = None,
) -> Plan:
    """Read the saved plan of this model, data and settings; without one, make it and save it.

    Args:
        settings: everything else that the plan follows from.
        make: makes the plan; it must use the BegunArguments that it is given.
        began_s: time at which this process began; files that were edited later may differ from the code that runs.
        folder: folder of the cache; None for ``cache_folder("plans")``. If it cannot be written to, nothing is saved.

    Raises:
        PlanError: no plan is possible, as it was found now or earlier.
    """
    cache = JsonCache(cache_folder("plans") if folder is None else folder)
    reads = [_Reads(mode, source) for mode, source in begun.sources.items()]
    try:
        known = _code_of_process(began_s)
        key = digest_of([_surroundings(), known, dict(settings), _facts_of(begun)])
    except UnreadableError:
        return make(begun)
    if (found := _read(cache, key, reads)) is not None:
        return found
    watched = replace(begun, sources={one.mode: one for one in reads})
    content: dict[str, Any]
    with _opened_files() as opened:
        try:
            plan = make(watched)
            content = {"plan": json.loads(plan.to_json())}
        except PlanError as error:
            if _is_of_planner(error):
                _save(cache, key, {"refused": str(error)}, reads, known, opened, began_s)
            raise
    if _as_plan(content) == plan:
        _save(cache, key, content, reads, known, opened, began_s)
    return plan


def _read(cache: JsonCache, key: str, reads: Sequence[_Reads]) -> Plan | None:
    """Return the saved plan, if all that was read while it was made is the same still.

    Raises:
        PlanError: the saved result is that no plan is possible.
    """
    content = cache.load(key)
    try:
        if content is None or any(_digest_of_file(path) != digest for path, digest in content["files"].items()):
            return None
        for one in reads:
            one.refuse_changes(content["rows"][one.mode])
        refused = content.get("refused")
        plan = _as_plan(content) if refused is None else None
    except Exception:  # noqa: BLE001  (an older entry, or a dataset that fails)
        return None
    if refused is not None:
        raise PlanError(refused)
    return plan


def _is_of_planner(error: BaseException | None) -> bool:
    """Return False for a PlanError that explains an unexpected error, which may not come again."""
    while isinstance(error, PlanError):
        error = error.__context__
    return error is None


def _as_plan(content: Mapping[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(content["plan"]))


def _save(
    cache: JsonCache, key: str, content: dict[str, Any], reads: Sequence[_Reads], known: Mapping[str, str],
    opened: Sequence[str], began_s: float,
) -> None:  # fmt: skip
    """Save a result with the files that were imported and the rows that were read while it was made."""
    ours = cache_folder("").absolute()
    if not all(Path(path).absolute().is_relative_to(ours) for path in opened):
        return
    with suppress(OSError, PlaceError, UnreadableError):
        files = {path: digest for path, digest in _code(began_s).items() if known.get(path) != digest}
        cache.save(key, {**content, "files": files, "rows": {one.mode: one.rows for one in reads}})


def _surroundings() -> dict[str, Any]:
    """Collect what a plan may follow from outside of its arguments."""
    if torch.ops.loaded_libraries:
        raise UnreadableError("a library of operations")
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "environment": {name: value for name, value in sorted(os.environ.items()) if name not in _UNREAD},
        "folder": str(Path.cwd()),
        "path": list(sys.path),
        "python": [sys.version, str(sys.flags)],
        "machine": [platform.machine(), device_name(), os.cpu_count(), processors],
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": [torch.__version__, torch.get_num_threads(), torch.get_default_device()],
        "settings": torch_settings().values,
    }


def _facts_of(begun: BegunArguments) -> list[Any]:
    """List what is known of model and data before the model is captured."""
    if any(isinstance(source, StreamSource) for source in begun.sources.values()):
        raise UnreadableError("a stream, which is read once")
    sources = {
        mode: [type(source).__qualname__, source.num_samples, source.columns] for mode, source in begun.sources.items()
    }
    unfilled = [type(source).__qualname__ for source in begun.unfilled]
    return [begun.model, sources, begun.request, begun.columns, begun.example, begun.sizes, unfilled]


@functools.cache
def _code_of_process(began_s: float) -> dict[str, str]:
    """Return the digests of all modules' files at the first call, so that plans of one process have keys alike."""
    return _code(began_s)


def _code(began_s: float) -> dict[str, str]:
    """Return the digests of the files of all imported modules, by path.

    Raises:
        UnreadableError: a module's file does not exist, or was edited since this process began.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or (name.startswith("torch.") and not Path(path).is_absolute()):  # torch.classes, for one
            continue
        try:
            state = Path(path).stat()
            found[path] = _digest_of_file(path)
        except OSError:
            raise UnreadableError(f"{path} of the module {name}") from None
        if max(state.st_mtime, state.st_ctime) > began_s - GRANULARITY_S:
            raise UnreadableError(f"{path}, which was edited just now")
    return found


def _digest_of_file(path: str) -> str:
    """Return the digest of a file's content; of a compiled extension, its size and the time of its last change."""
    if path.endswith(".py"):
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    state = Path(path).stat()
    return f"{state.st_size} {state.st_mtime_ns}"


@dataclass(slots=True)
class _Reads:
    """Source that keeps the digests of the rows that are read of it.

    Attributes:
        mode: "train" or "eval".
        rows: [epoch, start, count, columns, digest] of each read.
    """

    mode: str
    source: Source
    rows: list[list[Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, epoch: int, start: int, count: int, columns: Sequence[Any]) -> Any:
        with _unwatched():
            rows = self.source.read(epoch, start, count, columns)
        self.rows.append([epoch, start, count, list(columns), _digest_of_rows(rows)])
        return rows

    def refuse_changes(self, rows: Sequence[Sequence[Any]]) -> None:
        """Read the rows of an earlier process again.

        Raises:
            ValueError: they are others now.
        """
        for epoch, start, count, columns, digest in rows:
            if _digest_of_rows(self.source.read(epoch, start, count, columns)) != digest:
                raise ValueError("other rows")


def _digest_of_rows(rows: Any) -> str:
    try:
        return digest_of(rows)
    except UnreadableError:
        return f"unreadable at {time.time_ns()}"  # equal to no other


_WATCHING: list[list[str]] = []
"""Lists to which opened files are added; only the last one counts."""


@contextmanager
def _opened_files() -> Iterator[list[str]]:
    """Return a context whose list gets the files that Python code opens inside, apart from modules."""
    _install_hook()
    opened: list[str] = []
    _WATCHING.append(opened)
    try:
        yield opened
    finally:
        _WATCHING.pop()


@contextmanager
def _unwatched() -> Iterator[None]:
    """Return a context in which opened files do not count."""
    _WATCHING.append([])
    try:
        yield
    finally:
        _WATCHING.pop()


@functools.cache
def _install_hook() -> None:
    """Install a hook of Python that notes every file that is opened; such a hook cannot be removed."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not _WATCHING or not isinstance(path := arguments[0], str):
            return
        if not path.endswith((".py", ".pyc", ".so")) and not path.startswith(_UNSEEN):
            _WATCHING[-1].append(path)

    sys.addaudithook(note)
