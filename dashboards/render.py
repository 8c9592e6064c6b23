"""Draw the boards from the data of a real Prometheus, for those who have no Grafana at hand.

    python -m dashboards.render http://localhost:9090 --last 600 --run lm -o boards

Writes one PNG for every board; needs matplotlib. Each panel has its title, its unit and a line per series, named as
Grafana would name it. The axis of time begins with the first value of any of them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dashboards.boards import BOARDS, Board, Panel
from raypipe.viz.svg import in_unit, shortened

__all__ = ["Line", "ask", "draw", "in_units", "lines_of", "main", "rules_of", "step_between", "with_gaps"]

UNITS = {"short": "", "percentunit": "%", "s": "s", "Bps": "B/s", "bytes": "B"}
"""As pictures of runs name it, by Grafana's name of a unit."""
LETTERS = 12
"""Size of most letters, in points; titles are larger. A board is read at half its size too."""
WIDE_IN = 14.0
DASHES = 3.0
"""Length of a legend's line, in sizes of letters: several dashes of any line."""
LEGEND, LEGEND_PX = 70, 520
"""What a row of a legend has room for: letters, and pixels of one name."""


class Line(NamedTuple):
    """One series: its name, seconds since 1970, and values."""

    name: str
    times_s: list[float]
    values: list[float]


def lines_of(panel: Panel, prometheus: str, run: str, begin_s: float, end_s: float) -> list[Line]:
    """What Grafana would draw in this panel.

    Args:
        run: a regular expression, as the board's variable.
    """
    found = []
    step_s = step_between(begin_s, end_s)
    for query in panel.queries:
        asked = {"query": query.expression.replace("$run", run), "start": begin_s, "end": end_s, "step": step_s}
        for series in ask(prometheus, "query_range", **asked):
            labels = series["metric"]
            name = _filled(query.legend, labels)
            points = [(float(at), float(value)) for at, value in series["values"]]
            found.append(Line(name, [at for at, _ in points], [value for _, value in points]))
    return found


def step_between(begin_s: float, end_s: float) -> float:
    """Seconds between two values of a line that is asked for."""
    return max(1.0, (end_s - begin_s) / 500)


def _filled(legend: str, labels: dict[str, str]) -> str:
    """The legend of a series: {{name}} stands for the value of this label."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def ask(prometheus: str, what: str, **asked: object) -> list[dict[str, Any]]:
    """Series of an answer of Prometheus.

    Args:
        what: "query" or "query_range".
    """
    found: list[dict[str, Any]] = _data(f"{prometheus}/api/v1/{what}?{urllib.parse.urlencode(asked)}")["result"]
    return found


def rules_of(prometheus: str) -> dict[str, dict[str, Any]]:
    """Every alert that Prometheus knows, by its name: ``health``, ``lastError``, ``state`` and more."""
    groups = _data(f"{prometheus}/api/v1/rules?type=alert")["groups"]
    return {rule["name"]: rule for group in groups for rule in group["rules"]}


def _data(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)["data"]
    return found


def draw(
    board: Board, prometheus: str, run: str, begin_s: float, end_s: float, path: Path, *, dark: bool = False
) -> None:
    """Write the picture of a board.

    Args:
        dark: on black, as Grafana's dark theme has it.
    """
    from matplotlib import style

    with style.context(["dark_background" if dark else "default", {"font.size": LETTERS, "lines.linewidth": 2.0}]):
        _draw(board, prometheus, run, begin_s, end_s, path)


def _draw(board: Board, prometheus: str, run: str, begin_s: float, end_s: float, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    found = {panel: lines_of(panel, prometheus, run, begin_s, end_s) for panel in board.panels}
    first_s = min((at for lines in found.values() for line in lines for at in line.times_s[:1]), default=begin_s)
    numbers = [panel for panel in board.panels if panel.stat]
    plots = [panel for panel in board.panels if not panel.stat]
    rows = (len(plots) + 1) // 2
    figure = Figure(figsize=(WIDE_IN, 1.2 + 1.5 * bool(numbers) + 3.4 * rows), layout="constrained")
    figure.suptitle(f"{board.title}\n{board.meaning}", fontsize=LETTERS + 3)
    grid = GridSpec(rows + bool(numbers), 12, figure, height_ratios=[0.45] * bool(numbers) + [1.0] * rows)
    for place, panel in enumerate(numbers):
        _number(figure.add_subplot(grid[0, 2 * place : 2 * place + 2]), panel, found[panel])
    for place, panel in enumerate(plots):
        row, column = place // 2 + bool(numbers), 6 * (place % 2)
        where = figure.add_subplot(grid[row, column : column + 6])
        _plot(where, panel, found[panel], begin_s, (first_s, end_s))
    figure.savefig(path, dpi=80)


def in_units(values: Sequence[float], unit: str) -> tuple[float, str]:
    """Factor for values of a unit of Grafana, and the name of the unit that they are in then, which fits the largest.

    Args:
        unit: Grafana's name.
    """
    if unit == "percentunit":
        return 100.0, "%"
    largest = max((abs(value) for value in values if math.isfinite(value)), default=1.0)
    divisor, name = in_unit(largest, UNITS[unit])
    return 1.0 / divisor, name


def _number(axes: Any, panel: Panel, lines: list[Line]) -> None:
    axes.set_title(panel.title, fontsize=LETTERS + 1)
    told = []
    for line in lines:
        factor, unit = in_units(line.values[-1:], panel.unit)
        told.append(f"{line.values[-1] * factor:.4g} {unit}".strip())
    words = "\n".join(told) or textwrap.fill(_nothing(panel, ": "), 20)
    axes.text(0.5, 0.45, words, ha="center", va="center", fontsize=LETTERS + 10 if lines else LETTERS - 1)
    axes.set_xticks([])
    axes.set_yticks([])


def _plot(axes: Any, panel: Panel, lines: list[Line], begin_s: float, shown_s: tuple[float, float]) -> None:
    """One panel.

    Args:
        begin_s: from when on values were asked for.
        shown_s: begin and end of the axis.
    """
    first_s, end_s = shown_s
    axes.set_title(panel.title, fontsize=LETTERS + 2)
    if not lines:
        words = textwrap.fill(_nothing(panel, ": "), 44)
        axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    factor, unit = in_units([value for line in lines for value in line.values], panel.unit)
    axes.set_ylabel(unit or textwrap.fill(panel.title.lower(), 20))
    axes.set_xlabel("seconds ago")
    axes.set_xlim(first_s - end_s, 0)
    for number, line in enumerate(lines):
        times_s, values = with_gaps(line, begin_s, end_s)
        dashes = (0, (5, 2 + 2 * number)) if number else "-"  # of equal lines, those below show in the gaps
        scaled = [value * factor for value in values]
        axes.plot([at - end_s for at in times_s], scaled, label=shortened(line.name, LEGEND_PX), linestyle=dashes)
    values = [value * factor for line in lines for value in line.values if math.isfinite(value)] or [1.0]
    low, high = min(0.0, *values), max(values)
    spare = 0.05 * ((high - low) or 1.0)
    axes.set_ylim(low - spare, high + spare)  # a line along the axis can be told from it
    longest = max(len(shortened(line.name, LEGEND_PX)) for line in lines)
    columns = max(1, LEGEND // (longest + 6))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "frameon": False, "columnspacing": 1.2}
    axes.legend(fontsize=LETTERS - 1, ncols=columns, handlelength=DASHES, **below)
    axes.grid(alpha=0.3)


def _nothing(panel: Panel, between: str) -> str:
    return f"no data{between}needs {panel.needs}" if panel.needs else "no data"


def with_gaps(line: Line, begin_s: float, end_s: float) -> tuple[list[float], list[float]]:
    """Times and values, with a NaN wherever values are missing, so that no line is drawn across."""
    least_s = 2 * step_between(begin_s, end_s)
    times_s, values = line.times_s[:1], line.values[:1]
    for before, at, value in zip(line.times_s, line.times_s[1:], line.values[1:], strict=False):
        if at - before > least_s:
            times_s.append(before)
            values.append(math.nan)
        times_s.append(at)
        values.append(value)
    return times_s, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus", help="its address, as http://localhost:9090")
    parser.add_argument("--last", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--run", default=".+", help="regular expression of names of runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("boards"), metavar="DIR")
    parser.add_argument("--dark", action="store_true", help="on black")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    end_s = time.time()
    for board in BOARDS:
        path = asked.output / f"{board.uid}.png"
        draw(board, asked.prometheus.rstrip("/"), asked.run, end_s - asked.last, end_s, path, dark=asked.dark)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
