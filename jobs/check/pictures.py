"""Pictures of everything that raypipe draws, taken in a headless Chromium, for people to look at.

    python jobs/check/pictures.py DIR                   all of them
    python jobs/check/pictures.py DIR --only reports    reports, drawings, notebooks, site
    python jobs/check/pictures.py DIR --run RUNS/lm     the reports of these runs too

Pages are taken in a light and a dark theme, whole, at half size and as narrow as a telephone:
DIR/<page>-<theme>-<size>.png, and each section of a report by itself. What a program can see is told, and makes the
exit status 1: words that are cut off, lie over each other or are too small to read, a page wider than its window, lines
in the console, and whatever a page asks another place for.

reports     of the runs in jobs/lib/unusual_runs.py, which are trained here in threads, and of one that is usual
drawings    plans, schedules and timelines, with up to 64 stages
notebooks   what the cells of jobs/notebooks show; three of the four start Ray on this machine
site        pages of the documentation that have pictures, built by mkdocs
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.unusual_runs import UNUSUAL, many_stages
from raypipe.api.listing import summary_of
from raypipe.engine.storage import Place
from raypipe.ir.pictures.plan import plan_html, plan_svg
from raypipe.ir.pictures.timeline import timeline_svg
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs, simulate
from raypipe.planner.tune import timeline_of
from raypipe.report.page import write_report
from tests.browser import MISPLACED, SMALL, Scheme, opened
from tests.report.run_folder import make_run

ROOT = Path(__file__).resolve().parents[2]
SITE = ("index.html", "why.html", "plan.html", "schedules.html", "metrics.html", "zoo.html", "compare.html")
THEMES: tuple[Scheme, ...] = ("light", "dark")
WIDE = "document.documentElement.scrollWidth > innerWidth"
CELL_S = 400
READABLE_PX = 9.0
"""Height of letters that people read; half of it at half size."""


class Size(NamedTuple):
    """How a page is looked at: pixels of the window, and of the picture for one of them."""

    name: str
    width: int
    scale: float


SIZES = (Size("whole", 1400, 1.0), Size("half", 1400, 0.5), Size("narrow", 390, 1.0))
"""Drawings have a width of their own: they are not looked at in a narrow window."""


def reports(folder: Path, more: list[Path]) -> Iterator[Path]:
    runs = [make_run(folder / "usual"), *(make(folder) for make in UNUSUAL.values()), *map(Place.of, more)]
    for run in runs:
        yield Path(write_report(run, summary_of(run).state, str(folder / f"report-{run.name[:30]}.html")))


def drawings(folder: Path) -> Iterator[Path]:
    """Pictures that a command or a notebook gives, each on a page of its own."""
    drawn = {}
    for name, plan in {
        "1": many_stages(1), "4": many_stages(4), "64": many_stages(64), "long": many_stages(3, long=True)
    }.items():  # fmt: skip
        drawn[f"plan-{name}"] = plan_svg(plan, timeline_of(plan))
        drawn[f"notebook-plan-{name}"] = plan_html(plan, str(plan))
    slow = Costs.uniform(8, forward_s=0.010, backward_s=0.020, latency_s=0.006)
    specs = [
        ScheduleSpec("interleaved", 8, chunks=2),
        ScheduleSpec("zb-v", 8),
        ScheduleSpec("zb-h1", 8, slack=(2,) * 7),
        ScheduleSpec("2bw", 8, slack=(1,) * 7),
    ]
    for spec in specs:
        schedule = schedule_of(spec, 8)
        drawn[f"schedule-{spec.kind}"] = schedule._repr_html_()
        if spec.kind != "2bw":  # it never runs empty, so there is no step to simulate
            drawn[f"step-{spec.kind}"] = timeline_svg([simulate(lower(schedule), slow)])
    for name, content in drawn.items():
        path = folder / f"{name}.html"
        path.write_text(_page(content))
        yield path


def notebooks(folder: Path) -> Iterator[Path]:
    import nbformat
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = str(ROOT)  # of the kernels
    for source in sorted((ROOT / "jobs/notebooks").glob("*.ipynb")):
        notebook = nbformat.read(source, as_version=4)
        NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(folder)}}).execute()
        shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        path = folder / f"notebook-{source.stem}.html"
        path.write_text(_page("".join(map(_output, shown))))
        yield path


def _output(output: Any) -> str:
    """What a notebook makes of one output: the richest form of it."""
    data = output.get("data", {})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return f"<div>{data[kind]}</div>"
    return f"<pre>{escape(output.get('text', data.get('text/plain', '')))}</pre>"


def site(folder: Path) -> Iterator[Path]:
    subprocess.run(
        ["mkdocs", "build", "--quiet", "--site-dir", str(folder / "site")], cwd=ROOT, check=True, timeout=600
    )
    for page in SITE:
        yield folder / "site" / page


KINDS = ("reports", "drawings", "notebooks", "site")


def take(path: Path, into: Path, sizes: Sequence[Size]) -> list[str]:
    """Take the pictures of one page; returns what is wrong with it."""
    found = []
    for theme, size in itertools.product(THEMES, sizes):
        with opened(path, theme, size.width, size.scale) as (page, complaints):
            page.wait_for_load_state("networkidle")  # the site chooses its theme by a script
            where = f"{path.stem}-{theme}-{size.name}"
            page.screenshot(path=into / f"{where}.png", full_page=True)
            if size.name == "whole":
                _sections(page, into, where)
            told = [*complaints, *page.evaluate(MISPLACED), *page.evaluate(SMALL, READABLE_PX)]
            told += ["wider than its window"] if page.evaluate(WIDE) else []
            found += [f"{where}: {what}" for what in dict.fromkeys(told)]
    return found


def _sections(page: Any, into: Path, where: str) -> None:
    for section in page.locator("section[id]").all():
        for detail in section.locator("details").all():
            detail.evaluate("(found) => { found.open = true; }")
        section.screenshot(path=into / f"{where}-{section.get_attribute('id')}.png")


def _page(inside: str) -> str:
    """As a notebook shows it: on its own paper, in its own letters."""
    paper = "<style>:root{color-scheme:light dark}body{font:14px sans-serif;margin:16px}svg{max-width:100%}"
    paper += "pre{white-space:pre-wrap;overflow-wrap:anywhere}</style>"
    return f'<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">{paper}{inside}'


def main() -> int:
    """1 where something is wrong that a program can see."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--run", nargs="+", type=Path, default=[], metavar="FOLDER", help="of runs, for their reports")
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="raypipe-pictures-") as made:
        folder = Path(made)
        kinds: dict[str, tuple[Iterator[Path], Sequence[Size]]] = {
            "reports": (reports(folder, asked.run), SIZES),
            "drawings": (drawings(folder), SIZES[:2]),
            "notebooks": (notebooks(folder), SIZES[:2]),
            "site": (site(folder), SIZES),
        }
        count = 0
        for pages, sizes in (kinds[kind] for kind in KINDS if kind in asked.only):
            for path in pages:  # each is drawn when it is there, for notebooks take minutes
                found = take(path, asked.into, sizes)
                wrong += found
                count += 1
                print(f"{path.stem}: {len(found)} faults", *found, sep="\n  ", flush=True)
    print(f"{count} pages, {len(list(asked.into.glob('*.png')))} pictures in {asked.into}, {len(wrong)} faults")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
