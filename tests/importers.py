"""Who imports a module that a session must not import: asked before every import, and never answered with a module."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["Watch"]


class Watch:
    """A finder for ``sys.meta_path`` that finds nothing, and notes the first import of each of some modules.

    Attributes:
        found: for each of them that was looked for, by whom: the test that ran and the line of code.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.found: dict[str, str] = {name: "before the session" for name in names if name in sys.modules}
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, so that the import goes on with the next finder."""
        if name in self._names and name not in self.found:
            lines = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith("<frozen ")]
            test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" (")[0] or "a module of tests"
            self.found[name] = f"in {test}, by {lines[-1].filename}:{lines[-1].lineno}"
        return None
