"""The legend below a picture: colours and words in as many rows as the width asks for."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.pictures.theme import text

__all__ = ["ROW", "legend"]

ROW, MARK, GAP, LETTER_PX = 22.0, 22.0, 22.0, 7.3


def legend(entries: Sequence[tuple[str, str]], left: float, top: float, right: float) -> tuple[list[str], int]:
    """SVG, and the number of rows, each ``ROW`` pixels high.

    Args:
        entries: (class and further attributes of the mark, words).
        left, top, right: where it begins, and where a row ends.
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
