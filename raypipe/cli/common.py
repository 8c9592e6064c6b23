"""Shared parts of the commands: their arguments, and the trainer of a YAML file."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raypipe.engine.io.storage import Place
    from raypipe.runfile.run_file import RunFile

from raypipe.errors import ConfigError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="a run's settings")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="changes a setting; C is YAML; may be repeated")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="name, folder or address of a run")]


def open_runfile(config: Path, overrides: list[str] | None) -> RunFile:
    """Read the settings of a run's file, and add the working directory to Python's path, as ``python -m`` does."""
    from raypipe.runfile.run_file import read_runfile

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return read_runfile(config, overrides or ())


def trainer_of(run: RunFile, *, planning: bool = False) -> Any:
    """Create the trainer of these settings. This imports torch, and Ray too unless ``planning`` is True."""
    from raypipe.api.from_file import make_trainer

    return make_trainer(run, planning=planning)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Run Python's garbage collector rarely inside the context.

    Importing torch and tracing a model make millions of objects, of which nearly all stay. By default the collector
    traverses them thousands of times.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


_RARELY = (50_000, 20, 100)
"""Thresholds of the garbage collector, as of ``gc.set_threshold``."""


def known_folder(run: str) -> Place | None:
    """Return the run's folder at this path or address, or of this name in ~/ray_results; None if no run is there.

    Raises:
        ConfigError: ``run`` is an address, and no run has written there.
    """
    from raypipe.config.paths import DEFAULT_STORAGE, is_address
    from raypipe.engine.io.run_files import EVENTS
    from raypipe.engine.io.storage import Place

    folders = [Place.of(run)] if is_address(run) else [Place.of(run), Place.of(f"{DEFAULT_STORAGE}/{run}")]
    known = next((folder for folder in folders if folder.exists(EVENTS)), None)
    if known is None and is_address(run):
        raise ConfigError(f"{folders[0]} is no folder of a run: it has no {EVENTS}. Give <storage_path>/<name>.")
    return known


def check_output(path: Path | None) -> None:
    """Raise ConfigError if an output file cannot be written, before time is spent on its content."""
    if path is None:
        return
    folder = path.absolute().parent
    fault = ""
    if path.is_dir():
        fault = "it is a folder"
    elif not folder.is_dir():
        fault = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        fault = "this user may not write there"
    if fault:
        raise ConfigError(f"{path} cannot be written: {fault}. Give another file.")


def write(path: Path, text: str) -> None:
    """Write an output file of a command.

    Raises:
        ConfigError: the file cannot be written; the message names the file.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}. Give another file.") from error


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Discard standard error inside the context, also that of C++ libraries; errors are printed by the caller."""
    sys.stderr.flush()
    own = os.dup(_STDERR)
    try:
        with tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), _STDERR)
            yield
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
        os.close(own)


_STDERR = 2
