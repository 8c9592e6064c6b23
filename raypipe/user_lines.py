"""Texts on errors in user code: the innermost line of the traceback that is the user's, and the message."""

from __future__ import annotations

import os
import platform
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a process or a thread. Any other exception of user code is a failure. That includes exceptions of
Rust code through pyo3 (tokenizers, polars), which are not subclasses of Exception."""
MOST = 160
"""Maximum number of characters of a message that are quoted."""


def quoted(error: BaseException) -> str:
    """Format the innermost line of an error's traceback in user code: `` at FILE:LINE, in NAME, "CODE"``.

    Returns:
        "" if all lines are in torch, Python's standard library or raypipe.
    """
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _quotable(frame.filename)]
    return f' at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}, "{own[-1].line}"' if own else ""


def library_function(error: BaseException) -> str | None:
    """Return the function with the line that ``quoted`` shows, as ``Codebook.forward of its_package.its_module``.

    Returns:
        None if that line is not in an installed package. For a function inside another one, the outer one.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _quotable(frame.f_code.co_filename)]
    if not frames:
        return None
    code, module = frames[-1].f_code, frames[-1].f_globals.get("__name__", "")
    if not any(any(folder.glob("*.dist-info")) for folder in Path(code.co_filename).parents):
        return None
    return f"{code.co_qualname.split('.<')[0]} of {module}"


def _quotable(filename: str) -> bool:
    return not filename.startswith(("<", *_LIBRARIES)) and not _of_python(filename)


def line_outside_torch(frame: FrameType | None) -> str:
    """Format `` at FILE:LINE`` of the innermost line, from ``frame`` outwards, outside torch and Python's library.

    Returns:
        "" if there is no such line, or ``frame`` is None.
    """
    while frame is not None and _not_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def users_line(frame: FrameType | None) -> str:
    """Return ``line_outside_torch(frame)``, or "" if that line is in raypipe."""
    line = line_outside_torch(frame)
    return "" if line.startswith(f" at {_LIBRARIES[1]}") else line


def _not_the_users(filename: str) -> bool:
    return filename.startswith(_LIBRARIES[0]) or _of_python(filename)


def _of_python(filename: str) -> bool:
    # Without a virtual environment, packages lie below the standard library.
    return filename.startswith(_STANDARD) and not {"site-packages", "dist-packages"} & {*Path(filename).parts}


def short(error: BaseException) -> str:
    """Return an error's type and first line as a sentence.

    If a file with a relative path was not found, a second sentence gives the working directory and the host.
    """
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  (its own __str__ is wrong)
        message = ""
    text = next((line.strip() for line in message.splitlines() if line.strip()), "")
    text = text if len(text) <= MOST else f"{text[: MOST - 3].rstrip()}..."
    kind = type(error).__name__
    sentence = as_sentence(f"{kind}: {text}" if text else kind)
    missing = _missing_file(error)
    if missing is None or _is_absolute(missing.filename):
        return sentence
    return f"{sentence} The working directory was {Path.cwd()} on {platform.node()}."


def cure_of(error: BaseException, otherwise: str) -> str:
    """Return the remedy for an error in user code.

    Returns:
        ``otherwise``, or, if a file was not found, sentences on how every node gets that file.
    """
    if _missing_file(error) is None:
        return otherwise
    return (
        f"Each worker reads its own files, this one on {platform.node()}: give an absolute path that every node has, "
        "read the file in __init__, or have Ray bring the folder (ray.init(runtime_env={'working_dir': '.'}) or ray "
        "job submit --working-dir .)."
    )


def _missing_file(error: BaseException) -> FileNotFoundError | None:
    """Find a FileNotFoundError: the error itself, or one of its causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, FileNotFoundError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _is_absolute(name: object) -> bool:
    """Return True for an absolute path; False for an error without a file name."""
    return isinstance(name, str | os.PathLike) and Path(name).is_absolute()


def as_sentence(text: str) -> str:
    """Append a full stop to a text, unless it ends in ".", "!" or "?"."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
