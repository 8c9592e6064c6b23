"""The files of raypipe/ for tests that read them, each parsed once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["FILES", "ROOT", "tree_of"]

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "raypipe").rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))
