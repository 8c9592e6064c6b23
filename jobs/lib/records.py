"""Records of benchmarks: docs/results/<topic>.json, a list of runs with the newest first.

    {"bench": "bench_runtime", "runs": [newest, with its raw trials, the one before, ...]}

Every run keeps its figures and where, when and how they were measured. Only the newest keeps its raw trials: they are
what its figures can be computed from again, and git has those of the runs before. Runs that were copied from a page
name it in ``source``; what the page does not say is null. ``python jobs/check/results.py`` makes pages of the records.
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
    """When a benchmark began: the time of day in UTC, the monotonic clock, and the load averages.

    Attributes:
        load_after: of one that ended earlier; None where it ends when its record is made.
    """

    date: str
    clock_s: float
    load: list[float]
    load_after: list[float] | None = None


def begin() -> Began:
    """Now."""
    return Began(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic(), machine.load())


def run_of(command: str, began: Began, figures: Mapping[str, float], raw: Mapping[str, Any]) -> Run:
    """A run that ends now.

    Args:
        raw: the numbers of every trial.
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
    """A record.

    Raises:
        ValueError: what it holds is no record; says why.
    """
    record: Any = json.loads(path.read_text(encoding="utf-8"))
    if wrong := problems(record):
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    found: Record = record
    return found


def keep(path: Path, bench: str, run: Run) -> None:
    """Put a run before those that the file has, whose raw trials go.

    Raises:
        ValueError: this would be no record, or the file is one of another benchmark.
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
    """JSON with a line for every field of a run, for every figure and for every top-level part of the raw trials."""
    lines = [f'{{"bench": {json.dumps(record["bench"])}, "runs": [']
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
    """With DIGITS significant digits in every fraction."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


# What a record is.

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
_HARDWARE = {"cpu", "cores", "memory_bytes", "gpus", "system"}


def problems(record: Any) -> list[str]:
    """What keeps this from being a record; nothing where it is one."""
    if not isinstance(record, dict) or set(record) != {"bench", "runs"} or not isinstance(record["runs"], list):
        return ["a record has the fields bench and runs"]
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
        found.append(f"date {run['date']!r} is none")
    if set(run["hardware"]) != _HARDWARE or set(run["load"]) != {"before", "after"}:
        found.append(f"hardware has {', '.join(sorted(_HARDWARE))}, and load has before and after")
    elif run["source"] is None:  # only what was copied from a page may not know these
        known = {"date": run["date"], "duration_s": run["duration_s"], **run["hardware"], **run["load"]}
        found += [f"{name} is unknown, and no source is named" for name, value in known.items() if value is None]
    for name, value in run["figures"].items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            found.append(f"figure {name} is {value!r}")
    return found
