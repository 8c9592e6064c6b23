"""Links between files of the repository lead somewhere. mkdocs looks at those of the site, with their anchors."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

PAGES = [
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/*.md")) if ".venv" not in path.parts
]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_lead_to_files(path: object) -> None:
    text = FENCE.sub("", (ROOT / str(path)).read_text("utf-8"))
    here = (ROOT / str(path)).parent
    assert [target for target in LINK.findall(text) if not (here / target).exists()] == []
