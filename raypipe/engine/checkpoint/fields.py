"""Reads JSON that somebody else may have written: the kind that is wanted, or an error that names the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raypipe.errors import CheckpointError

__all__ = ["count", "fields", "items", "mapping", "names", "refuse", "text"]

LARGEST = 1 << 62


def refuse(what: str, wanted: str, found: Any) -> CheckpointError:
    """The error to raise."""
    return CheckpointError(f"{what}: {str(found)[:80]!r} is not {wanted}. The manifest is damaged; use an older one.")


def count(found: Any, what: str, least: int | None = 0) -> int:
    """An integer; True is none."""
    if type(found) is not int or abs(found) > LARGEST or (least is not None and found < least):
        raise refuse(what, "an integer in range", found)
    return int(found)


def text(found: Any, what: str) -> str:
    if not isinstance(found, str):
        raise refuse(what, "a text", found)
    return found


def items(found: Any, what: str) -> list[Any]:
    if not isinstance(found, list):
        raise refuse(what, "a list", found)
    return found


def mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise refuse(what, "an object", found)
    return found


def fields(found: Any, what: str, wanted: Iterable[str]) -> None:
    """An object with exactly these fields."""
    if mapping(found, what).keys() != set(wanted):
        raise refuse(what, f"an object of {', '.join(wanted)}", sorted(map(str, found)))


def names(found: Any, what: str) -> tuple[str, ...]:
    """Texts, none of them twice."""
    listed = [text(name, f"{what}, names") for name in items(found, f"{what}, names")]
    if len(set(listed)) < len(listed):
        raise refuse(f"{what}, names", "free of doubles", listed)
    return tuple(listed)
