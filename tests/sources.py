"""The files of this repository for tests that read them, each parsed once, and which modules import which."""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import raypipe

__all__ = ["FILES", "ROOT", "imported", "imports", "module_of", "reached", "tree_of"]

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "raypipe").rglob("*.py"))
_FOLDERS = ("raypipe", "jobs", "tests")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file; shared, so read only."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Full names of all modules that a file imports anywhere, also relatively or through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # ``from raypipe import ir`` names a module only in its second half.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def module_of(path: Path, root: Path = ROOT) -> str:
    """Dotted name of a file below ``root``; a package has the name of its folder."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _files() -> dict[str, Path]:
    """Files of raypipe, jobs and tests by the module that each of them is."""
    return {module_of(path): path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")}


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Modules of raypipe, jobs and tests that one of them imports at any place, also for a type checker only."""
    files, path = _files(), _files()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = (raypipe._EXPORTS.get(name.removeprefix("raypipe."), name) for name in imports(tree_of(path), package))
    targets = {name if name in files else name.rpartition(".")[0] for name in names}
    return frozenset((targets & files.keys()) - {module, "raypipe"})


def _named(module: str) -> set[str]:
    """Modules that a file uses without an import: as ``raypipe.tune``, by ``-m``, or by the path of a script."""
    names = set()
    for node in ast.walk(tree_of(_files()[module])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raypipe":
            names.add(f"raypipe.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            name = node.value.removesuffix(".py").replace("/", ".")
            names |= {name, f"{name}.__main__"} if "." in name else set()
    return names & _files().keys()


@functools.cache
def reached(module: str) -> dict[str, int]:
    """Modules whose change may change what ``module`` does, with the number of imports on the shortest way to each.

    They are itself, its imports and theirs, with their packages; for a test also the conftest.py of its folder and of
    those above it, without what these import for fixtures.
    """
    parts = module.split(".")
    conftests = {".".join([*parts[:n], "conftest"]) for n in range(1, len(parts))} & _files().keys()
    steps = dict.fromkeys(conftests, 1) | {module: 0}
    waiting = deque([module])
    while waiting:
        one = waiting.popleft()
        parts = one.split(".")
        parents = {".".join(parts[:n]) for n in range(1, len(parts))} & _files().keys()
        for name in (parents | _neighbours(one)) - steps.keys():
            steps[name] = steps[one] + 1
            waiting.append(name)
    return steps


@functools.cache
def _neighbours(module: str) -> frozenset[str]:
    return imported(module) | _named(module)
