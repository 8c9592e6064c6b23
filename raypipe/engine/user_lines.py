"""The user's own line on the way to an error, and what the error says, in the words of one sentence."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

__all__ = ["LEAVING", "as_sentence", "line_outside_torch", "quoted", "short", "users_line"]

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a process or a thread, and is no failure of the code in it. All else that a user's code raises is, also
what Rust raises through pyo3 (tokenizers, polars), which is no Exception."""
MOST = 160
"""Characters of somebody else's complaint that are quoted."""


def quoted(error: BaseException) -> str:
    """`` at FILE:LINE, in NAME, "CODE"``: the innermost line not of torch, Python or raypipe; nothing without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(("<", *_LIBRARIES)) and not _of_python(f.filename)]
    return f' at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}, "{own[-1].line}"' if own else ""


def line_outside_torch(frame: FrameType | None) -> str:
    """`` at FILE:LINE``: the innermost line not of torch or Python that calls this frame; nothing without one."""
    while frame is not None and _not_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def users_line(frame: FrameType | None) -> str:
    """The same, and nothing where that line is raypipe's: no code of the user's has led here."""
    found = line_outside_torch(frame)
    return "" if found.startswith(f" at {_LIBRARIES[1]}") else found


def _not_the_users(filename: str) -> bool:
    return filename.startswith(_LIBRARIES[0]) or _of_python(filename)


def _of_python(filename: str) -> bool:
    # Without a virtual environment, packages lie below the standard library.
    return filename.startswith(_STANDARD) and not {"site-packages", "dist-packages"} & {*Path(filename).parts}


def short(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, as a sentence."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  (its own __str__ is wrong)
        said = ""
    text = next((line.strip() for line in said.splitlines() if line.strip()), "")
    text = text if len(text) <= MOST else f"{text[: MOST - 3].rstrip()}..."
    kind = type(error).__name__
    return as_sentence(f"{kind}: {text}" if text else kind)


def as_sentence(text: str) -> str:
    """With a full stop, where it ends in nothing like one."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
