"""What several verbs share: their arguments, and the way from a YAML file to a trainer."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raypipe.runfile.read import RunFile

from raypipe.errors import ConfigError

__all__ = [
    "ConfigFile", "Overrides", "Run", "check_output", "is_run_folder", "known_folder", "open_runfile", "trainer_of",
    "unheard", "write",
]  # fmt: skip

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="a run's settings")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="changes a setting; C is YAML; may be repeated")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="name or folder of a run")]


def open_runfile(config: Path, overrides: list[str] | None) -> RunFile:
    """The settings of a file; from now on its targets may lie in the working directory, as with ``python -m``."""
    from raypipe.runfile.read import read_runfile

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return read_runfile(config, overrides or ())


def trainer_of(run: RunFile, *, planning: bool = False) -> Any:
    """The trainer of these settings; this is where torch is imported, and Ray unless it is for planning."""
    from raypipe.api.from_file import make_trainer

    return make_trainer(run, planning=planning)


def is_run_folder(path: Path) -> bool:
    """Whether a run has written here."""
    return (path / "events.jsonl").is_file()


def known_folder(run: str) -> Path | None:
    """The folder itself, or the usual place of that name, if there is a run."""
    from raypipe.api.listing import DEFAULT_STORAGE

    folders = (Path(run), Path(DEFAULT_STORAGE).expanduser() / run)
    return next((folder for folder in folders if is_run_folder(folder)), None)


def check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written, before a minute is spent on what goes into it.

    Raises:
        ConfigError: names the file.
    """
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
    """Write a file that was asked for.

    Raises:
        ConfigError: names the file.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}. Give another file.") from error


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, nothing is written to standard error, by libraries in C++ neither: what they complain of ends in an error
    that says it in a line."""
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
