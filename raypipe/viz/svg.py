"""Parts that all pictures share: colours in a light and a dark theme, frame, axis ticks and legend.

Colours are CSS classes, so that one picture works in both themes. Class names begin with ``rp-``, because a picture
embedded in a page shares its style with the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

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
"""CSS class without "rp-": (property, light, dark). Text on boxes of F, B and STEP has the class "on-full", text on
boxes of I and W the class "on-pale".
"""
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
"""(light, dark) colours. Entry i is the colour of lines with the class ``rp-line<i>`` and of areas with ``rp-area<i>``.
"""


def _rules(dark: bool) -> str:
    rules = [f".rp-{name}{{{what}:{both[dark]}}}" for name, (what, *both) in COLOURS.items()]
    for number, pair in enumerate(LINES):
        rules.append(f".rp-line{number}{{stroke:{pair[dark]}}}.rp-area{number}{{fill:{pair[dark]}}}")
    rules.append(f".rp-plot rect{{stroke:{COLOURS['paper'][1 + dark]}}}")
    return "".join(rules)


def style() -> str:
    """Return the style element of all pictures; it follows the preferred colour scheme."""
    return f"<style>{_rules(False)}@media (prefers-color-scheme:dark){{{_rules(True)}}}</style>"


def frame(width: float, height: float, label: str, inside: str, kind: str = "", data: str = "") -> str:
    """Wrap SVG parts into a complete picture.

    Args:
        width, height: size in pixels; a page may scale the picture down.
        label: text for screen readers.
        inside: SVG content.
        kind: additional CSS class, for scripts.
        data: additional attributes of the element, for scripts.
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
    """Return a text element at (x, y) pixels; by default left-aligned, in the picture's font size.

    ``kind`` is a CSS class without "rp-", and ``anchor`` is SVG's text-anchor.
    """
    more = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-size="{size:g}"' if size else "")
    more += ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="rp-{kind}"{more}>{html.escape(words)}</text>'


def shortened(words: str, most_px: float, size: float = 14) -> str:
    """Shorten words to ``most_px`` pixels in a font of ``size`` pixels, by an ellipsis in place of their middle."""
    most = max(8, int(most_px / (0.62 * size)))
    if len(words) <= most:
        return words
    return f"{words[: most - most // 3 - 1]}…{words[len(words) - most // 3 :]}"


_UNITS = {
    "s": ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")),
    "B": ((1.0, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"), (1 << 40, "TiB")),
    "B/s": ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")),
}


def in_unit(most: float, unit: str) -> tuple[float, str]:
    """Return (divisor, unit) that make values short: 0.02 s -> (0.001, "ms").

    Args:
        most: the largest of the values.
        unit: "s", "B" or "B/s"; any other unit is returned unchanged, with divisor 1.
    """
    fits = [step for step in _UNITS.get(unit, ()) if most >= step[0]]
    return fits[-1] if fits else _UNITS.get(unit, ((1.0, unit),))[0]


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> Sequence[float]:
    """Return about ``most`` round numbers from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of ten.

    Args:
        whole: True for integers only.
    """
    rough = max((high - low) / most, 1e-12 * max(abs(low), abs(high), 1e-300))
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


ROW, MARK, GAP, LETTER_PX = 22.0, 22.0, 22.0, 7.3


def legend(entries: Sequence[tuple[str, str]], left: float, top: float, right: float) -> tuple[list[str], int]:
    """Return the SVG parts of a legend, and the number of its rows, each ``ROW`` pixels high.

    Args:
        entries: (CSS class of the coloured mark, optionally with further attributes; text).
        left, top, right: origin, and the right end of a row, in pixels.
    """
    parts, at, rows = list[str](), left, 1
    for kind, words in entries:
        wide = MARK + LETTER_PX * len(words)
        if at + wide > right and at > left:
            at, rows = left, rows + 1
        y = top + (rows - 1) * ROW
        name, space, more = kind.partition(" ")
        parts.append(f'<rect x="{at:.1f}" y="{y:g}" width="16" height="14" class="rp-{name}"{space}{more}/>')
        parts.append(text(at + MARK, y + 12, words, "mute"))
        at += wide + GAP
    return parts, rows
