"""Blocks of the documentation: ``(language, text)`` in the order of a page."""

from __future__ import annotations

import re

from tests.sources import ROOT

__all__ = ["blocks", "pages", "sessions"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """README and all pages of docs/, the folders below included."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    """Texts of all fenced blocks of a language on a page of the repository."""
    return [text for found, text in FENCE.findall((ROOT / page).read_text("utf-8")) if found == language]


def sessions(page: str) -> list[tuple[str, str]]:
    """(command, what it prints) of all console blocks of a page."""
    found = []
    for text in blocks(page, "console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((command, printed))
    return found
