"""Draw the boards from the data of a real Prometheus, for those who have no Grafana at hand.

    python -m dashboards.render http://localhost:9090 --last 600 --run lm -o boards

Writes one PNG for every board; needs matplotlib. Each panel has its title, its unit and a line per series, named as
Grafana would name it.
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
from pathlib import Path
from typing import Any, NamedTuple

from dashboards.boards import BOARDS, Board, Panel

__all__ = ["Line", "ask", "draw", "lines_of", "main", "step_between", "with_gaps"]

UNITS = {
    "short": (1.0, ""),
    "percentunit": (100.0, "%"),
    "s": (1.0, "s"),
    "Bps": (1e-6, "MB/s"),
    "bytes": (2.0**-20, "MiB"),
}
"""Factor and name for people, by Grafana's name of a unit."""


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
    url = f"{prometheus}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def draw(
    board: Board, prometheus: str, run: str, begin_s: float, end_s: float, path: Path, *, dark: bool = False
) -> None:
    """Write the picture of a board.

    Args:
        dark: on black, as Grafana's dark theme has it.
    """
    from matplotlib import style

    with style.context("dark_background" if dark else "default"):
        _draw(board, prometheus, run, begin_s, end_s, path)


def _draw(board: Board, prometheus: str, run: str, begin_s: float, end_s: float, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    numbers = [panel for panel in board.panels if panel.stat]
    plots = [panel for panel in board.panels if not panel.stat]
    rows = (len(plots) + 1) // 2
    figure = Figure(figsize=(14, 1.0 + 1.3 * bool(numbers) + 3.0 * rows), layout="constrained")
    figure.suptitle(f"{board.title}: {board.meaning}", fontsize=13)
    grid = GridSpec(rows + bool(numbers), 12, figure, height_ratios=[0.45] * bool(numbers) + [1.0] * rows)
    for place, panel in enumerate(numbers):
        lines = lines_of(panel, prometheus, run, begin_s, end_s)
        _number(figure.add_subplot(grid[0, 2 * place : 2 * place + 2]), panel, lines)
    for place, panel in enumerate(plots):
        row, column = place // 2 + bool(numbers), 6 * (place % 2)
        lines = lines_of(panel, prometheus, run, begin_s, end_s)
        _plot(figure.add_subplot(grid[row, column : column + 6]), panel, lines, begin_s, end_s)
    figure.savefig(path, dpi=80)


def _number(axes: Any, panel: Panel, lines: list[Line]) -> None:
    factor, unit = UNITS[panel.unit]
    text = "\n".join(f"{line.values[-1] * factor:.4g} {unit}" for line in lines) or textwrap.fill(
        _nothing(panel, ": "), 20
    )
    axes.set_title(panel.title, fontsize=10)
    axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=18 if lines else 9)
    axes.set_xticks([])
    axes.set_yticks([])


def _plot(axes: Any, panel: Panel, lines: list[Line], begin_s: float, end_s: float) -> None:
    factor, unit = UNITS[panel.unit]
    axes.set_title(panel.title, fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel("seconds ago", fontsize=8)
    axes.set_xlim(begin_s - end_s, 0)
    for number, line in enumerate(lines):
        times_s, values = with_gaps(line, begin_s, end_s)
        dashes = (0, (5, 2 + 2 * number)) if number else "-"  # of equal lines, those below show in the gaps
        scaled = [value * factor for value in values]
        axes.plot([at - end_s for at in times_s], scaled, label=line.name, linestyle=dashes)
    if lines:
        values = [value * factor for line in lines for value in line.values if math.isfinite(value)] or [1.0]
        axes.set_ylim(1.08 * min(0.0, *values), 1.08 * max(values) or 1.0)
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    else:
        axes.text(0.5, 0.5, _nothing(panel, ": "), ha="center", va="center", transform=axes.transAxes)
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
