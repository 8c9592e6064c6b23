"""A table ends with an empty line: what follows it at once becomes a row of it on the site."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import pages
from tests.sources import ROOT

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLLOWED = re.compile(r"^ *\|[-:| ]+\|\n(?: *\|.*\n)+(?! *\||<!-- end| *\n)(.+)", re.MULTILINE)


@pytest.mark.parametrize("page", pages())
def test_nothing_follows_a_table_at_once(page: str) -> None:
    assert FOLLOWED.findall(FENCE.sub("", (ROOT / page).read_text("utf-8"))) == []
