"""What failed, from the reports of all tiers: told once more at the end, where the tail of a long output shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["Failure", "counts_of", "failures_of", "id_of", "in_words"]

LINES = 120
"""Of the first failure; the last ones, where the error stands."""


class Failure(NamedTuple):
    """A test, its set-up or its tear-down that failed, or what a whole session was blamed for.

    Attributes:
        tier: whose.
        test: its id as pytest takes it; "" for a session.
        text: the traceback, or the complaint.
    """

    tier: str
    test: str
    text: str

    @property
    def error(self) -> str:
        """The line that says most: the first one of the error itself, else of all."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
        return (errors or lines or ["?"])[0]


def counts_of(report: Path) -> tuple[int, int]:
    """(tests, skipped ones) of a junit report; nothing where pytest did not get that far."""
    if not report.exists():
        return 0, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped = (sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "skipped"))
    return tests, skipped


def failures_of(tier: str, report: Path, complaints: Path) -> list[Failure]:
    """Those of one session of pytest.

    Args:
        report: its junit report, of the family "xunit1", which names files; it need not be there.
        complaints: what conftest.py held against the session, a line each; need not be there either.
    """
    found = []
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            found += [Failure(tier, id_of(case), one.text or "") for one in case if one.tag in ("failure", "error")]
    if complaints.exists():
        found += [Failure(tier, "", line) for line in complaints.read_text(encoding="utf-8").splitlines()]
    return found


def in_words(failures: Sequence[Failure]) -> list[str]:
    """Lines: the first one whole, then two for each."""
    if not failures:
        return []
    first = failures[0].text.rstrip().splitlines()
    left_out = [f"[{len(first) - LINES} lines before these]"] if len(first) > LINES else []
    lines = [f"=== the first failure: {failures[0].tier} {failures[0].test}", *left_out, *first[-LINES:], ""]
    lines.append(f"=== all that failed: {len(failures)}")
    for one in failures:
        lines += [f"{one.tier}: {one.test or 'the session'}", f"    {one.error[:200]}"]
    return lines


def id_of(case: ElementTree.Element) -> str:
    """Id of a test as pytest takes it, from its junit record."""
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = [part for part in case.get("classname", "").removeprefix(module).split(".") if part]
    return "::".join(([file] if file else []) + classes + [name])
