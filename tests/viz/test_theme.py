"""Colours differ enough from what they lie on, in both themes, as WCAG 2.2 measures it (1.4.3 and 1.4.11)."""

from __future__ import annotations

import pytest

from raypipe.viz.svg import COLOURS, LINES, shortened

WORDS = [("ink", "paper"), ("mute", "paper"), *((box, "on-full") for box in ("F", "B", "STEP")), ("I", "on-pale"),
         ("W", "on-pale")]  # fmt: skip
THEMES = pytest.mark.parametrize("theme", [1, 2], ids=["light", "dark"])


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@THEMES
@pytest.mark.parametrize(("one", "other"), WORDS)
def test_words_can_be_read(theme: int, one: str, other: str) -> None:
    assert _contrast(COLOURS[one][theme], COLOURS[other][theme]) >= 4.5


@THEMES
def test_lines_can_be_seen(theme: int) -> None:
    paper = COLOURS["paper"][theme]
    drawn = [*(COLOURS[name][theme] for name in ("axis", "bad", "good", "note")), *(pair[theme - 1] for pair in LINES)]
    assert min(_contrast(colour, paper) for colour in drawn) >= 3


@pytest.mark.parametrize("length", [0, 8, 20, 21, 400])
def test_words_are_shortened_to_what_fits(length: int) -> None:
    words = "".join(chr(97 + at % 26) for at in range(length))
    short = shortened(words, 20 * 0.62 * 14 + 1)
    assert len(short) <= 20
    assert (
        short == words
        if length <= 20
        else words.startswith(short.split("…")[0]) and words.endswith(short.split("…")[1])
    )
