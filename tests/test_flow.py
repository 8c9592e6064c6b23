"""docs/flow.md names files and what is in them; all of these exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.sources import ROOT, tree_of

HOP = re.compile(r"`([a-z_/]+\.py)(?:::([\w.]+))?`")


def hops(text: str) -> list[tuple[str, str]]:
    """(file below raypipe/, name in it or "") of every hop."""
    return [(file, name) for file, name in HOP.findall(text) if not file.startswith("tests/")]


def defines(tree: ast.Module, name: str) -> bool:
    """Whether a module defines the class, function or method of this dotted name."""
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.slow
def test_every_hop_exists() -> None:
    found = hops((ROOT / "docs" / "flow.md").read_text("utf-8"))
    assert len(found) > 40
    missing = []
    for file, name in found:
        path = ROOT / "raypipe" / file
        if not path.is_file() or (name and not defines(tree_of(path), name)):
            missing.append(f"{file}::{name}")
    assert missing == []
