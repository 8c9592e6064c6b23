"""Records of benchmarks: docs/results/<topic>.json, a list of runs with the newest first.

    {"bench": "bench_runtime", "runs": [newest, with its raw trials, the one before, ...]}
    {"bench": "bench_lv", "study": {"code": "studies-0.1", "command": ..., "measures": ..., ...}, "runs": [...]}

Every run keeps its figures and where, when and how they were measured. Only the newest run keeps its raw trials, from
which its figures can be computed again; git has the raw trials of earlier runs. A run that was copied from a page names
the page in ``source``; fields that the page lacks are null. A study is a finished benchmark: its code is at the git tag
``code``, and its record has the texts that its page needs. ``python jobs/check/results.py`` makes the pages.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jobs.lib import machine

__all__ = ["FOLDER", "Began", "begin", "keep", "problems", "read", "run_of", "text_of"]

FOLDER = machine.ROOT / "docs" / "results"
DIGITS = 6
"""Significant digits of raw numbers: a microsecond in a second."""

Record = dict[str, Any]
Run = dict[str, Any]


class Began(NamedTuple):
    """Begin of a run: date and time in UTC, monotonic clock, and load averages over 1, 5 and 15 minutes.

    Attributes:
        load_after: load averages at the end of the run; None to take those when the record is made.
    """

    date: str
    clock_s: float
    load: list[float]
    load_after: list[float] | None = None


def begin() -> Began:
    """Note the present time and load as the begin of a run."""
    return Began(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic(), machine.load())


def run_of(command: str, began: Began, figures: Mapping[str, float], raw: Mapping[str, Any]) -> Run:
    """Build the record of a run that ends now.

    Args:
        raw: numbers of every trial.
    """
    revision, dirty = machine.commit()
    return {
        "date": began.date,
        "command": command,
        "duration_s": round(time.monotonic() - began.clock_s, 1),
        "hardware": machine.hardware(),
        "load": {"before": began.load, "after": began.load_after or machine.load()},
        "commit": revision,
        "dirty": dirty,
        "versions": machine.versions(),
        "source": None,
        "note": None,
        "figures": dict(figures),
        "raw": raw,
    }


def read(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: the file is not a valid record; names its faults.
    """
    record: Any = json.loads(path.read_text(encoding="utf-8"))
    if wrong := problems(record):
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    found: Record = record
    return found


def keep(path: Path, bench: str, run: Run) -> None:
    """Add a run to a record file, before its earlier runs, and drop the raw trials of those.

    Raises:
        ValueError: the record would be invalid, or the file belongs to another benchmark.
    """
    before: Record = read(path) if path.exists() else {"bench": bench, "runs": []}
    if before["bench"] != bench:
        raise ValueError(f"{path.name} is a record of {before['bench']}, not of {bench}")
    older = [{**earlier, "raw": None} for earlier in before["runs"]]
    record = {"bench": bench, "runs": [json.loads(json.dumps(_rounded(run))), *older]}
    if wrong := problems(record):
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(record), encoding="utf-8")


def text_of(record: Record) -> str:
    """Format a record as JSON, a line for every field of a run, every figure and every part of the raw trials."""
    study = f' "study": {_compact(record["study"])},' if "study" in record else ""
    lines = [f'{{"bench": {json.dumps(record["bench"])},{study} "runs": [']
    for place, run in enumerate(record["runs"]):
        fields = []
        for name, value in run.items():
            if name in ("figures", "raw") and value:
                parts = ",\n".join(f"  {json.dumps(key)}: {_compact(part)}" for key, part in value.items())
                fields.append(f' "{name}": {{\n{parts}\n }}')
            else:
                fields.append(f' "{name}": {_compact(value)}')
        lines.append("{\n" + ",\n".join(fields) + "\n}" + ("," if place + 1 < len(record["runs"]) else ""))
    return "\n".join([*lines, "]}"]) + "\n"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Round every fraction to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


# Validity of a record.

_FIELDS: dict[str, tuple[type, ...]] = {
    "date": (str, type(None)),
    "command": (str,),
    "duration_s": (int, float, type(None)),
    "hardware": (dict,),
    "load": (dict,),
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "versions": (dict,),
    "source": (str, type(None)),
    "note": (str, type(None)),
    "figures": (dict,),
    "raw": (dict, type(None)),
}
_STUDY = {"code", "command", "measures", "layout", "targets", "computed"}
_HARDWARE = {"cpu", "cores", "memory_bytes", "gpus", "system"}


def problems(record: Any) -> list[str]:
    """List the faults of a record; empty if it is valid."""
    fields = set(record) - {"study"} if isinstance(record, dict) else set()
    if fields != {"bench", "runs"} or not isinstance(record["runs"], list):
        return ["a record has the fields bench and runs"]
    if "study" in record and set(record["study"]) != _STUDY:
        return [f"a study has the fields {', '.join(sorted(_STUDY))}"]
    if not record["runs"]:
        return ["there is no run"]
    found = [f"run {place}: {wrong}" for place, run in enumerate(record["runs"]) for wrong in _of_run(run)]
    if found:
        return found
    newest, *older = record["runs"]
    if newest["source"] is None and not newest["raw"]:
        found.append("the newest run has no raw trials")
    if any(run["raw"] for run in older):
        found.append("only the newest run keeps its raw trials")
    return found


def _of_run(run: Any) -> list[str]:
    if not isinstance(run, dict) or set(run) != set(_FIELDS):
        missing = sorted(set(_FIELDS) ^ set(run)) if isinstance(run, dict) else sorted(_FIELDS)
        return [f"the fields {', '.join(missing)} are missing or too many"]
    found = [f"{name} is {run[name]!r}" for name, types in _FIELDS.items() if not isinstance(run[name], types)]
    if found:
        return found
    if run["date"] is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?", run["date"]):
        found.append(f"date {run['date']!r} is not a date")
    if set(run["hardware"]) != _HARDWARE or set(run["load"]) != {"before", "after"}:
        found.append(f"hardware has {', '.join(sorted(_HARDWARE))}, and load has before and after")
    elif run["source"] is None:  # only what was copied from a page may not know these
        known = {"date": run["date"], "duration_s": run["duration_s"], **run["hardware"], **run["load"]}
        found += [f"{name} is unknown, and no source is named" for name, value in known.items() if value is None]
    for name, value in run["figures"].items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            found.append(f"figure {name} is {value!r}")
    return found
