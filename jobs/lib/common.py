"""What the benchmarks share: their command line, medians, tables, and how they end.

A benchmark ends with one line of JSON, ``{"bench": NAME, "figures": {...}}``. A full run also leaves a record in
docs/results (records.py); ``--json FILE`` writes the same elsewhere. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.lib import records
from jobs.lib.machine import ROOT, machine_line

__all__ = [
    "arguments", "final_line", "finish", "handicap_seen", "machine_line", "median",
    "quantile", "table", "topic_of",
]  # fmt: skip

HANDICAP_TOLERANCE = 0.03


def arguments(
    description: str | None,
    given: Sequence[str] | None = None,
    *,
    handicap: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> argparse.Namespace:
    """The command line of a benchmark: ``--quick``, ``--json FILE``, ``--no-record`` and, for some, ``--handicap``.

    Besides what was asked, the answer says how and when: ``command``, and ``began`` as in records.

    Args:
        handicap: offer ``--handicap SECONDS``.
        options: further ones by name, with what argparse is to know of each.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: fewer configurations and steps, no record"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write figures and the raw numbers of all trials there"
    )
    parser.add_argument("--no-record", action="store_true", help="leave docs/results as it is")
    if handicap:
        text = "slow each of our actions down by that much; no record"
        parser.add_argument("--handicap", type=float, default=0.0, metavar="SECONDS", help=text)
    further = [parser.add_argument(name, **known) for name, known in (options or {}).items()]
    if given is None:  # a program of its own: what asks it to end shall not leave its processes and namespaces behind
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    asked = parser.parse_args(given)
    if handicap and not 0 <= asked.handicap < math.inf:
        parser.error(f"--handicap {asked.handicap:g}: seconds must be a number from 0 up")
    asked.command = _command(parser.prog, asked, further)
    asked.began = records.begin()
    return asked


def _command(prog: str, asked: argparse.Namespace, further: Sequence[argparse.Action]) -> str:
    """The command line from the repository's root, with the options that change figures: none that names a file."""
    path = Path(sys.argv[0]).resolve()
    path = path.parent if path.name == "__main__.py" else path
    words = ["python", str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else prog]
    for action in further:
        value = getattr(asked, action.dest)
        if value != action.default and action.type is not Path:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [action.option_strings[0], *map(str, values)]
    return " ".join(words)


# Numbers.


def median(values: Iterable[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    return statistics.median(values)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed, so always one of them."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def handicap_seen(label: str, handicap_s: float, plain: float, slowed: float, moves_by: float) -> bool:
    """Print how a ratio moved under ``--handicap`` and how it should have; whether both agree within 3 points.

    Args:
        plain, slowed: the ratio without and with it.
        moves_by: what arithmetic says about the difference.
    """
    agree = abs(slowed - plain - moves_by) <= HANDICAP_TOLERANCE
    print(
        f"handicap of {handicap_s * 1e3:g} ms per action, {label}: ratio {plain:.4f} without, {plain + moves_by:.4f} "
        f"predicted, {slowed:.4f} measured: {'seen' if agree else 'NOT AS PREDICTED'}"
    )
    return agree


# What is printed.


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text: the first column to the left, all others to the right; floats with four digits."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [title]
    for line in (columns, ["-" * width for width in widths], *cells):
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def final_line(bench: str, figures: Mapping[str, float], missed: Sequence[str] | None = None) -> str:
    """The line that machines read. A figure that is no finite number is a mistake of the benchmark.

    Args:
        missed: figures that are not within their targets, of a check, which says so too where there are none.
    """
    rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
    verdict = {} if missed is None else {"missed": list(missed)}
    return json.dumps({"bench": bench, "figures": rounded, **verdict}, allow_nan=False)


def finish(
    bench: str, figures: Mapping[str, float], raw: Mapping[str, Any], asked: argparse.Namespace, variant: str = "",
    missed: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Write what was asked for: the file of ``--json`` and, after a full run, the record. Then print the last line.

    Args:
        bench: its name; the record is named after the topic.
        raw: the numbers of every trial, from which the figures can be computed again.
        asked: what ``arguments`` gave.
        variant: of a benchmark that measures one thing in several ways, each of which has a record of its own.
        missed: see ``final_line``.
    """
    line = final_line(bench, figures, missed)
    run = records.run_of(asked.command, asked.began, json.loads(line)["figures"], raw)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"bench": bench, **run}, indent=1, allow_nan=False))
        print(f"raw numbers in {asked.json}")
    if not (asked.quick or asked.no_record or getattr(asked, "handicap", 0)):
        file = records.FOLDER / f"{topic_of(bench)}{variant and '-' + variant}.json"
        try:
            records.keep(file, bench, run)
            print(f"recorded in {file.relative_to(ROOT)}; python jobs/check/results.py makes the pages anew")
        except (OSError, ValueError) as error:  # what was measured is printed in any case
            print(f"not recorded: {error}")
    print(line, flush=True)


def topic_of(bench: str) -> str:
    """The folder of a benchmark: "bench_runtime" lies in jobs/bench/runtime."""
    return bench.removeprefix("bench_").removeprefix("check_")
