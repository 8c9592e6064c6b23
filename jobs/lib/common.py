"""Base of every benchmark: ``Bench`` with its command line, settings, figures and record; medians and tables.

    BENCH = Bench("bench_x", __doc__, settings=Settings(), quick=Settings(rounds=1), targets={...})

    run = BENCH.begin()                  --quick, --json FILE, --no-record and its own options
    for turn, name in run.turns(names, run.settings.rounds): ...
    run.figures["overhead"] = 1.02       and run.raw, from which figures can be computed again
    run.end()                            last line: {"bench": "bench_x", "figures": {...}}

A full run leaves a record in docs/results (records.py). ``layout`` and ``targets`` are literals, because
``python jobs/check/results.py`` reads them from the source. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.lib import records
from jobs.lib.machine import ROOT, machine_line

__all__ = ["Bench", "BenchRun", "final_line", "median", "quantile", "table", "topic_of"]

HANDICAP_TOLERANCE = 0.03


@dataclass(frozen=True)
class Bench:
    """Benchmark, or check that leaves a record.

    Attributes:
        name: name in the record; the benchmark "bench_runtime" is in the folder jobs/bench/runtime.
        description: text of ``--help``, the docstring of the benchmark's module.
        settings: dataclass instance with the settings of a full run; an option named as a field replaces the field.
        quick: settings of ``--quick``, which takes less than a minute and leaves no record.
        layout: title of a column in the result tables -> pattern of figure names, whose group is the row.
        targets: pattern of figure names -> "<= 1.03", ">= 1.25" or "0.95 to 1.05".
        options: further options of the command line -> keyword arguments of argparse's add_argument.
        handicap: True to offer ``--handicap SECONDS``, which slows our side down to check that figures show it; nothing
            is recorded then.
    """

    name: str
    description: str | None
    settings: Any = None
    quick: Any = None
    layout: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    handicap: bool = False

    def begin(self, given: Sequence[str] | None = None) -> BenchRun:
        """Begin a run: read the command line, and note the time and the machine's load.

        Args:
            given: arguments; None reads the command line of this process.
        """
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--quick", action="store_true", help="under a minute: fewer configurations and steps, no record"
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write figures and the raw numbers of all trials there"
        )
        parser.add_argument("--no-record", action="store_true", help="leave docs/results as it is")
        if self.handicap:
            text = "slow each of our actions down by that much; no record"
            parser.add_argument("--handicap", type=float, default=0.0, metavar="SECONDS", help=text)
        further = [parser.add_argument(name, **known) for name, known in self.options.items()]
        if given is None:  # this is a process of its own: SIGTERM must leave no processes and namespaces behind
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        options = parser.parse_args(given)
        if self.handicap and not 0 <= options.handicap < math.inf:
            parser.error(f"--handicap {options.handicap:g}: seconds must be a number from 0 up")
        settings = self.quick if options.quick and self.quick is not None else self.settings
        if settings is not None:
            names = {each.name for each in dataclasses.fields(settings)}
            chosen = {each.dest: value for each in further if (value := getattr(options, each.dest)) != each.default}
            settings = dataclasses.replace(settings, **{k: v for k, v in chosen.items() if k in names})
        return BenchRun(self, options, _command(parser.prog, options, further), settings)


class BenchRun:
    """Run of a benchmark, from its command line to its last line.

    Attributes:
        options: parsed command line.
        settings: settings of this run.
        command: command line from the repository's root, with the options that change figures.
        began: time and load at the begin of the run.
        figures: figures of the record, by name.
        raw: numbers of every trial, from which the figures can be computed again.
    """

    def __init__(self, bench: Bench, options: argparse.Namespace, command: str, settings: Any) -> None:
        self.bench, self.options, self.command, self.settings = bench, options, command, settings
        self.began = records.begin()
        self.figures: dict[str, float] = {}
        self.raw: dict[str, Any] = {}
        if settings is not None:
            self.raw["settings"] = dataclasses.asdict(settings)

    @staticmethod
    def turns(names: Iterable[Any], rounds: int) -> Iterator[tuple[int, Any]]:
        """Yield (round, name) of candidates in turns, in alternating order, so that no candidate is always first."""
        order = list(names)
        for turn in range(rounds):
            yield from ((turn, name) for name in order[:: -1 if turn % 2 else 1])

    @staticmethod
    def note(text: str) -> None:
        """Print a line with the machine's load."""
        print(f"{text}; {machine_line()}", flush=True)

    @staticmethod
    def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Print a table with the machine's load."""
        print("\n" + table(f"{title}; {machine_line()}", columns, rows))

    def handicap_seen(self, label: str, plain: float, slowed: float, moves_by: float) -> bool:
        """Print how much a ratio changed under ``--handicap``, and the predicted change.

        Args:
            plain, slowed: ratio without and with the handicap.
            moves_by: predicted difference of the two.

        Returns:
            True if both agree within 3 points.
        """
        agree = abs(slowed - plain - moves_by) <= HANDICAP_TOLERANCE
        print(
            f"handicap of {self.options.handicap * 1e3:g} ms per action, {label}: ratio {plain:.4f} without, "
            f"{plain + moves_by:.4f} predicted, {slowed:.4f} measured: {'seen' if agree else 'NOT AS PREDICTED'}"
        )
        return agree

    def end(self, *, variant: str = "", missed: Sequence[str] | None = None) -> None:
        """Write the file of ``--json`` and, after a full run, the record; print the last line.

        Args:
            variant: suffix of the record's file name, for a benchmark that measures in several ways.
            missed: see ``final_line``.
        """
        options, name = self.options, self.bench.name
        line = final_line(name, self.figures, missed)
        run = records.run_of(self.command, self.began, json.loads(line)["figures"], self.raw)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"bench": name, **run}, indent=1, allow_nan=False))
            print(f"raw numbers in {options.json}")
        if not (options.quick or options.no_record or getattr(options, "handicap", 0)):
            file = records.FOLDER / f"{topic_of(name)}{variant and '-' + variant}.json"
            try:
                records.keep(file, name, run)
                print(f"recorded in {file.relative_to(ROOT)}; python jobs/check/results.py makes the pages anew")
            except (OSError, ValueError) as error:  # figures are printed in any case
                print(f"not recorded: {error}")
        print(line, flush=True)


def _command(prog: str, options: argparse.Namespace, further: Sequence[argparse.Action]) -> str:
    """Build the command line from the repository's root, with options that change figures; file names are left out."""
    path = Path(sys.argv[0]).resolve()
    path = path.parent if path.name == "__main__.py" else path
    words = ["python", str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else prog]
    for action in further:
        value = getattr(options, action.dest)
        if value != action.default and action.type is not Path:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [action.option_strings[0], *map(str, values)]
    return " ".join(words)


def median(values: Iterable[float]) -> float:
    """Compute the median; of an even number of values, the mean of the two in the middle."""
    return statistics.median(values)


def quantile(values: Iterable[float], share: float) -> float:
    """Find the smallest value that at least ``share`` of all values do not exceed; it is always one of them."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as plain text: the first column left-aligned, others right-aligned; floats with four digits."""
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
    """Format the machine-readable last line.

    Args:
        missed: names of the figures outside their limits, for a check; None for a benchmark.

    Raises:
        ValueError: a figure is NaN or infinite.
    """
    rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
    verdict = {} if missed is None else {"missed": list(missed)}
    return json.dumps({"bench": bench, "figures": rounded, **verdict}, allow_nan=False)


def topic_of(bench: str) -> str:
    """Return the folder of a benchmark: "bench_runtime" is jobs/bench/runtime."""
    return bench.removeprefix("bench_").removeprefix("check_")
