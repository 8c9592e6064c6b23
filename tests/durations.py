"""Recorded seconds of tests, and which of them are long: left out by ``make test``, run by ``make test-long``.

    python tests/durations.py REPORT.xml ...    record the seconds in junit reports that tiers.py --keep FOLDER wrote

Seconds are CPU time of the test process, where Ray is used wall time. A tier keeps its cheapest tests up to ``keep_s``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.failures import id_of  # noqa: E402

__all__ = ["LISTED_S", "long_of", "main", "measured", "recorded", "seconds_of_file"]

RECORD = ROOT / "tests" / "durations.json"
LISTED_S = 1.0
"""Tests of at least as many seconds are recorded one by one, the others of a file as one sum under its name."""


def recorded(record: Path = RECORD) -> dict[str, float]:
    """Seconds by the id of a test, or by the file of tests that are not listed."""
    seconds: dict[str, float] = json.loads(record.read_text(encoding="utf-8"))
    return seconds


def seconds_of_file(file: str, seconds: Mapping[str, float], but: frozenset[str] = frozenset()) -> float:
    """Seconds of a file's tests, those in ``but`` left out; 0 if it was never recorded."""
    return sum(s for test, s in seconds.items() if test.partition("::")[0] == file and test not in but)


def long_of(files: Sequence[str], seconds: Mapping[str, float], keep_s: float) -> frozenset[str]:
    """Ids of the most expensive tests of these files, as many as must go so that the others take ``keep_s`` at most."""
    wanted = set(files)
    own = {test: s for test, s in seconds.items() if test.partition("::")[0] in wanted}
    total, long = sum(own.values()), set()
    for test in sorted((test for test in own if "::" in test), key=lambda test: (-own[test], test)):
        if total <= keep_s:
            break
        total -= own[test]
        long.add(test)
    return frozenset(long)


def measured(reports: Sequence[Path]) -> dict[str, float]:
    """Seconds in junit reports, as ``recorded`` gives them."""
    seconds: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            properties = {one.get("name"): one.get("value", "0") for one in case.iter("property")}
            s = float(properties.get("cpu_s", case.get("time", "0")))
            name = id_of(case) if s >= LISTED_S else case.get("file", "")
            seconds[name] = round(seconds.get(name, 0.0) + s, 2)
    return seconds


def main(arguments: list[str]) -> int:
    """Replace the record of the files that these reports name; files that no longer exist leave it."""
    new = measured([Path(name) for name in arguments])
    files = {test.partition("::")[0] for test in new}
    old = {test: s for test, s in recorded().items() if test.partition("::")[0] not in files}
    kept = {test: s for test, s in (old | new).items() if (ROOT / test.partition("::")[0]).exists()}
    RECORD.write_text(json.dumps(dict(sorted(kept.items())), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
