"""Pages of the records: docs/results/<topic>.md, the table of benchmarks in jobs/README.md, and that of README.md.

    python jobs/check/results.py            writes them again
    python jobs/check/results.py --check    changes nothing; the exit status is 1 if a page would change

A page shows the figures of the newest run, those that only older runs have, the targets, a line of history per run, and
notes of runs whose figures are not shown. Tables and targets follow from ``layout`` and ``targets`` of the benchmark's
``Bench`` (jobs/lib/common.py) or of the record of a study, whose ``computed`` is a pattern of commands that computed
figures without a run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.check.headlines import headline_rows
from jobs.lib import records
from jobs.lib.machine import ROOT

README = ROOT / "jobs" / "README.md"
FIRST_PAGE = ROOT / "README.md"
BEGIN, END = "<!-- begin: made by python jobs/check/results.py -->", "<!-- end -->"
MADE = "<!-- made by python jobs/check/results.py from {name}.json: do not edit -->"
NONE = "--"
STUDIES = (
    "Studies are finished: their records stay, and their code is at the tag `studies-0.1`, commit ebff0cef "
    "(`git worktree add ../studies studies-0.1`)."
)


class Benchmark(NamedTuple):
    """Description of a benchmark, from its source or, if it is a finished study, from its record.

    Attributes:
        topic: its folder in jobs/bench, or its file in jobs/check.
        measures: the first sentence of its docstring.
        layout, targets, computed: see the module.
        code: tag at which a study's code is; empty if the code is in the tree.
    """

    topic: str
    command: str
    measures: str
    layout: dict[str, str]
    targets: dict[str, str]
    computed: str = ""
    code: str = ""


def benchmarks() -> dict[str, Benchmark]:
    """Find benchmarks and studies by topic. Sources are parsed and not imported, so torch is not needed."""
    found = {}
    for path in [*ROOT.glob("jobs/bench/*/bench.py"), *(ROOT / "jobs" / "check").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if (literals := _bench_literals(tree)) is None:
            continue
        bench = path.name == "bench.py"
        topic = path.parent.name if bench else path.stem
        command = f"python {(path.parent if bench else path).relative_to(ROOT)}"
        measures = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
        found[topic] = Benchmark(topic, command, measures, literals.get("layout", {}), literals.get("targets", {}))
    for path in records.FOLDER.glob("*.json"):
        if study := records.read(path).get("study"):
            topic = path.stem.partition("-")[0]
            found[topic] = Benchmark(topic, **study)
    return dict(sorted(found.items()))


def _bench_literals(tree: ast.Module) -> dict[str, Any] | None:
    """Read layout and targets of ``BENCH = Bench(...)``; None if a module has no benchmark."""
    calls = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) == "Bench":
            known = {each.arg: each.value for each in call.keywords if each.arg in ("layout", "targets")}
            return {str(name): ast.literal_eval(value) for name, value in known.items()}
    return None


# Targets.


def met(bound: str, value: float) -> bool:
    """Return True if a figure keeps to "<= 1.03", ">= 1.25" or "0.95 to 1.05"."""
    words = bound.split()
    if len(words) == 3 and words[1] == "to":
        return float(words[0]) <= value <= float(words[2])
    if len(words) != 2 or words[0] not in ("<=", ">="):
        raise ValueError(f"{bound!r} is no target")
    return value <= float(words[1]) if words[0] == "<=" else value >= float(words[1])


def matching(pattern: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures whose whole name matches a pattern."""
    return {name: value for name, value in figures.items() if re.fullmatch(pattern, name)}


def missed(targets: Mapping[str, str], name: str, value: float) -> bool:
    """Return True if a figure misses one of its targets."""
    return any(re.fullmatch(pattern, name) and not met(bound, value) for pattern, bound in targets.items())


# Tables.


def number(value: float) -> str:
    return f"{value:.4g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure_tables(figures: Mapping[str, float], benchmark: Benchmark) -> str:
    """Format a table with a row for each case of the layout, and one of the rest; bold figures miss targets."""

    def cell(name: str) -> str:
        shown = number(figures[name])
        return f"**{shown}**" if missed(benchmark.targets, name, figures[name]) else shown

    cases: dict[str, dict[str, str]] = {}
    for title, pattern in benchmark.layout.items():
        for name in figures:
            if (match := re.fullmatch(pattern, name)) is not None:
                cases.setdefault(match[1], {})[title] = name
    shown = {name for row in cases.values() for name in row.values()}
    tables = []
    if cases:
        titles = [title for title in benchmark.layout if any(title in row for row in cases.values())]
        rows = [[case, *(cell(row[t]) if t in row else "" for t in titles)] for case, row in cases.items()]
        tables.append(markdown(["", *titles], rows))
    if rest := [name for name in figures if name not in shown]:
        tables.append(markdown(["figure", "value"], [[f"`{name}`", cell(name)] for name in rest]))
    return "\n\n".join(tables)


def target_table(figures: Mapping[str, float], targets: Mapping[str, str]) -> str:
    """Format the table of targets: their figures, and how many reach them."""
    rows = []
    for pattern, bound in targets.items():
        found = matching(pattern, figures)
        good = sum(met(bound, value) for value in found.values())
        shown = f"{good} of {len(found)}" if found else "not measured"
        rows.append([plain(pattern), bound, shown, _range(found.values())])
    return markdown(["figures", "target", "met", "least and most"], rows)


def plain(pattern: str) -> str:
    """Format a pattern for a cell of a table, with a star for the variable part."""
    shown = pattern.replace("(_emulated)?", "")
    shown = re.sub(r"(\\[dw]|\[[^]]+\])\+?", "*", shown)
    return f"`{shown}`".replace("|", "\\|")


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    if not found:
        return NONE
    return number(found[0]) if len(found) == 1 else f"{number(found[0])} to {number(found[-1])}"


def told(run: Mapping[str, Any]) -> str:
    """Describe a run in one line: date, machine, commit."""
    found = [_day(run), hardware(run), load(run)]
    found += [run["command"]] if run["source"] is None else [f"copied from {run['source']}, without raw trials"]
    found += [f"commit {revision(run)}"] if run["commit"] else []
    return "; ".join(part for part in found if part != NONE)


def _day(run: Mapping[str, Any]) -> str:
    return (run["date"] or "no date")[:10]


def hardware(run: Mapping[str, Any]) -> str:
    found = run["hardware"]
    cores = f"{found['cores']} cores" if found["cores"] else ""
    memory = f"{found['memory_bytes'] / 2**30:.0f} GiB" if found["memory_bytes"] else ""
    return ", ".join(filter(None, [found["cpu"] or "machine not named", cores, memory, *(found["gpus"] or [])]))


def load(run: Mapping[str, Any]) -> str:
    before, after = run["load"]["before"], run["load"]["after"]
    return NONE if before is None else f"load {before[0]:.1f} before, {after[0]:.1f} after"


def revision(run: Mapping[str, Any]) -> str:
    return NONE if run["commit"] is None else run["commit"][:7] + (" and changes" if run["dirty"] else "")


def history(runs: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> str:
    """Format a line per run: ranges of figures with targets or, without any, of the layout's columns."""
    wanted = {plain(pattern): pattern for pattern in benchmark.targets}
    rows = []
    for run in runs:
        for patterns in (wanted, benchmark.layout):
            ranges = [(name, matching(pattern, run["figures"]).values()) for name, pattern in patterns.items()]
            shown = "; ".join(f"{name} {_range(values)}" for name, values in ranges if values)
            if shown:
                break
        seconds = NONE if run["duration_s"] is None else f"{run['duration_s']:.0f}"
        computed = re.fullmatch(benchmark.computed, run["command"])
        where = run["source"] or ("computed" if computed else "measured")
        rows.append([_day(run), revision(run), hardware(run), load(run), seconds, shown or NONE, where])
    return markdown(["date", "commit", "machine", "load", "seconds", "figures, least to most", "source"], rows)


# Pages.


def page(name: str, record: Mapping[str, Any], benchmark: Benchmark) -> str:
    """Write docs/results/<name>.md."""
    command = f"`{record['runs'][0]['command']}`" + (f" at the tag `{benchmark.code}`" if benchmark.code else "")
    parts = [MADE.format(name=name), f"# {record['bench']}", benchmark.measures, command]
    newest: dict[str, float] = {}
    notes = []
    for place, run in enumerate(record["runs"]):
        new = {figure: value for figure, value in run["figures"].items() if figure not in newest}
        newest |= new
        if not new:
            notes += [f"- {told(run)}. {run['note']}"] if run["note"] else []
            continue
        title = "## Figures that newer runs do not have" if place else "## Figures"
        parts += [f"{title}\n\n{told(run)}.", *([run["note"]] if run["note"] else [])]
        parts += [figure_tables(new, benchmark)]
    if benchmark.targets:
        parts += ["## Targets", "Bold figures above miss theirs.", target_table(newest, benchmark.targets)]
    parts += ["## History", history(record["runs"], benchmark)]
    parts += ["## Notes of runs whose figures are not shown", *notes] if notes else []
    return "\n\n".join(parts) + "\n"


def index(found: Mapping[str, Benchmark], kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the tables of jobs/README.md: a line per benchmark and variant with a record, and per study."""
    rows, studies = [], []
    for topic, benchmark in found.items():
        for name in [topic, *(name for name in kept if name.startswith(f"{topic}-"))]:
            run = kept[name]["runs"][0] if name in kept else None
            seconds = f"{run['duration_s']:.0f}" if run and run["duration_s"] is not None else NONE
            results = f"[{name}](../docs/results/{name}.md)" if run else NONE
            command = run["command"] if run and run["source"] is None else benchmark.command
            command += " --" + name.removeprefix(f"{topic}-") if name != topic and "--" not in command else ""
            measures = benchmark.measures.replace("|", "\\|")
            if benchmark.code:
                studies.append([measures, f"`{command}` at `{benchmark.code}`", results])
            else:
                rows.append([topic, measures, f"`{command}`", seconds, results])
    benches = markdown(["topic", "what it measures", "command", "seconds", "results"], rows)
    return f"{benches}\n\n{STUDIES}\n\n{markdown(['what it measured', 'command', 'results'], studies)}"


def pages() -> dict[Path, str]:
    """Build the contents of every page."""
    found = benchmarks()
    kept = {path.stem: records.read(path) for path in sorted(records.FOLDER.glob("*.json"))}
    texts = {
        records.FOLDER / f"{name}.md": page(name, record, found[name.partition("-")[0]])
        for name, record in kept.items()
    }
    headlines = markdown(["what was measured", "figures", "record"], headline_rows(kept))
    for path, table in ((README, index(found, kept)), (FIRST_PAGE, headlines)):
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        texts[path] = f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
    return texts


BY_HAND = "decisions.md"
"""Page of measurements that came from decision records: no record makes it."""


def main() -> int:
    """Write the pages; return 1 if --check finds an outdated page."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(__doc__)
    texts = pages()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += sorted(set(records.FOLDER.glob("*.md")) - set(texts) - {records.FOLDER / BY_HAND})
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not what the records make' if check else 'written'}")
        if check:
            continue
        if path in texts:
            path.write_text(texts[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
