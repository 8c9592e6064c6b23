"""docs/errors.md quotes messages as the source has them."""

from __future__ import annotations

import re

import pytest

from tests.sources import FILES, ROOT, tree_of
from tests.test_words import spoken

QUOTED = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.MULTILINE)


def holds(text: str, message: str) -> bool:
    """Whether a text has the parts of a message in their order; "..." is anything between them."""
    place = 0
    for part in message.split("..."):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@pytest.mark.slow
def test_every_message_is_one_that_is_raised() -> None:
    texts = [text for path in FILES for text in spoken(tree_of(path)) if len(text) > 20]
    assert len(QUOTED) > 30
    assert [message for message in QUOTED if not any(holds(text, message) for text in texts)] == []
