"""Pages of the repository: links lead to files, tables end with an empty line, decision records can be looked up."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import pages
from tests.sources import ROOT

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILES = [
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/*.md")) if ".venv" not in path.parts
]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_links_lead_to_files(path: object) -> None:
    text = FENCE.sub("", (ROOT / str(path)).read_text("utf-8"))
    here = (ROOT / str(path)).parent
    assert [target for target in LINK.findall(text) if not (here / target).exists()] == []


FOLLOWED = re.compile(r"^ *\|[-:| ]+\|\n(?: *\|.*\n)+(?! *\||<!-- end| *\n)(.+)", re.MULTILINE)


@pytest.mark.parametrize("page", pages())
def test_nothing_follows_a_table_at_once(page: str) -> None:
    assert FOLLOWED.findall(FENCE.sub("", (ROOT / page).read_text("utf-8"))) == []


DESIGN = ROOT / "docs" / "design"
RECORDS = sorted(DESIGN.glob("[0-9]*.md"))
MOST_WORDS = 700
"""One page."""
STATUS = re.compile(r"^Status: (?:current|superseded)", re.MULTILINE)
REFERENCE = re.compile(r"design/(\d{4})")
SOURCES = [
    path
    for folder in ("raypipe", "jobs", "tests", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md"} and path.is_file() and path.name != "decisions.md"
]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_a_page_with_a_status(path: object) -> None:
    text = (DESIGN / str(path)).read_text("utf-8")
    assert STATUS.search(text)
    assert "\n## Price" in text
    assert len(text.split()) <= MOST_WORDS


def test_numbers_are_used_once() -> None:
    numbers = [path.name[:4] for path in RECORDS]
    assert len(set(numbers)) == len(numbers) > 20
    archived = re.findall(r"^\*\*(\d{4}) ", (DESIGN / "archive.md").read_text("utf-8"), re.MULTILINE)
    assert archived == sorted(set(archived))


def test_references_lead_to_records() -> None:
    numbers = {path.name[:4] for path in RECORDS}
    texts = {path: path.read_text("utf-8") for path in [*SOURCES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}
    named = {str(path.relative_to(ROOT)): set(REFERENCE.findall(text)) for path, text in texts.items()}
    assert {path: sorted(found - numbers) for path, found in named.items() if found - numbers} == {}
