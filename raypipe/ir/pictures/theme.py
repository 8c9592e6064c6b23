"""Colours of all pictures in a light and in a dark theme, and the frame that every picture has.

Classes of CSS carry the colours, so that one picture shows in both themes. Their names begin with ``rp-``: a picture
inside a page shares its style with the page.
"""

from __future__ import annotations

import html
from typing import Final

__all__ = ["COLOURS", "LINES", "frame", "shortened", "style", "text"]

COLOURS: Final = {
    "paper": ("fill", "#ffffff", "#14181d"),
    "ink": ("fill", "#1f2328", "#e6e9ee"),
    "mute": ("fill", "#59636e", "#a2acb8"),
    "grid": ("stroke", "#e3e7ec", "#2a3139"),
    "axis": ("stroke", "#8b949e", "#6d7783"),
    "limit": ("stroke", "#1f2328", "#e6e9ee"),
    "F": ("fill", "#3572b0", "#4f8fd0"),
    "B": ("fill", "#37813f", "#4ea65c"),
    "I": ("fill", "#7cc286", "#86cf92"),
    "W": ("fill", "#c3e3c4", "#b9e0bd"),
    "STEP": ("fill", "#c44944", "#d9655e"),
    "REDUCE": ("fill", "#8a63b0", "#a583cb"),
    "wait": ("fill", "#eaedf1", "#252c34"),
    "on-full": ("fill", "#ffffff", "#0b0f14"),
    "on-pale": ("fill", "#16301a", "#10240f"),
    "bad": ("stroke", "#c0392b", "#f08a80"),
    "good": ("stroke", "#2e8540", "#6cc87f"),
    "note": ("stroke", "#8b949e", "#6d7783"),
}
"""Class: (property, light, dark). Words stand on boxes of F, B, STEP in "on-full", on those of I and W in "on-pale"."""
LINES: Final = (
    ("#2f6fb0", "#6fb1f0"),
    ("#c8691c", "#f0a35e"),
    ("#2e8540", "#6cc87f"),
    ("#8250a8", "#c39be6"),
    ("#c0392b", "#f08a80"),
    ("#1f8a8a", "#5cc9c9"),
    ("#7d5a3c", "#c9a27e"),
    ("#6b7280", "#a3adba"),
    ("#b5528b", "#e59ac6"),
    ("#7a7a1e", "#c8c86a"),
)
"""(light, dark) of the lines of a chart: classes ``rp-line0``, ... and, as areas, ``rp-area0``, ..."""


def _rules(dark: bool) -> str:
    found = [f".rp-{name}{{{what}:{both[dark]}}}" for name, (what, *both) in COLOURS.items()]
    for number, pair in enumerate(LINES):
        found.append(f".rp-line{number}{{stroke:{pair[dark]}}}.rp-area{number}{{fill:{pair[dark]}}}")
    found.append(f".rp-plot rect{{stroke:{COLOURS['paper'][1 + dark]}}}")
    return "".join(found)


def style() -> str:
    """The style of all pictures, which follows the reader's theme."""
    return f"<style>{_rules(False)}@media (prefers-color-scheme:dark){{{_rules(True)}}}</style>"


def frame(width: float, height: float, label: str, inside: str, kind: str = "", data: str = "") -> str:
    """The whole picture.

    Args:
        width, height: pixels; a page may show it smaller.
        label: what it shows, for people who do not see it.
        inside: SVG.
        kind: a further class, for scripts.
        data: further attributes, for scripts.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:.0f}" '
        f'viewBox="0 0 {width:g} {height:.0f}" class="rp {kind}" {data} role="img" aria-label="{html.escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="14">{style()}'
        f'<rect width="100%" height="100%" class="rp-paper"/>{inside}</svg>'
    )


def text(
    x: float, y: float, words: str, kind: str = "ink", anchor: str = "", size: float = 0, bold: bool = False
) -> str:
    """Words at a place; by default they begin there, at the size of the picture."""
    more = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-size="{size:g}"' if size else "")
    more += ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="rp-{kind}"{more}>{html.escape(words)}</text>'


def shortened(words: str, most_px: float, size: float = 14) -> str:
    """Words that fit into a width, as wide letters take it: their begin and their end where they are too long."""
    most = max(8, int(most_px / (0.62 * size)))
    if len(words) <= most:
        return words
    return f"{words[: most - most // 3 - 1]}…{words[len(words) - most // 3 :]}"
