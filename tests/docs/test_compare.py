"""docs/compare.md: behind each cell of ours stands a test, a job or a page that exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.sources import ROOT
from tests.test_flow import defines

PAGE = (ROOT / "docs" / "compare.md").read_text("utf-8")
TABLE, _, REST = PAGE.partition("## Where our cells come from")
PROOFS = dict(re.findall(r"^\| (\d+) \| (.+) \|$", REST, re.MULTILINE))


def missing(name: str) -> bool:
    """Whether ``path`` or ``path::function`` is not there."""
    path, _, function = name.partition("::")
    file = ROOT / path
    return not file.is_file() or bool(function and not defines(ast.parse(file.read_text("utf-8")), function))


def test_every_yes_of_ours_has_a_proof() -> None:
    cells = [
        line.split("|")[2].strip() for line in TABLE.splitlines() if line.startswith("| ") and "raypipe" not in line
    ]
    assert len(cells) > 20
    claims = [cell for cell in cells if not cell.startswith(("no", "not shown"))]
    numbers = [re.search(r"\[(\d+)\]$", cell) for cell in claims]
    assert [cell for cell, found in zip(claims, numbers, strict=True) if found is None] == []
    assert [found[1] for found in numbers if found] == list(PROOFS)


@pytest.mark.parametrize("number", PROOFS)
def test_proofs_exist(number: str) -> None:
    names = re.findall(r"`([^`]+)`", PROOFS[number])
    assert names
    assert [name for name in names if missing(name)] == []
