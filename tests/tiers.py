"""Run the tests tier by tier, cheapest first, and report the outcome and the time of each.

    python tests/tiers.py                  all tiers, without the long tests
    python tests/tiers.py --long           the long tests of all tiers
    python tests/tiers.py lint core        these tiers
    python tests/tiers.py --must-run       fail also if a tier was skipped that this machine can run
    python tests/tiers.py --in-turn        one tier after the other, also if there are cores for two
    python tests/tiers.py --keep FOLDER    keep the junit reports, which durations.py records
    python tests/tiers.py --long --part 2/3    of all long tests one third, chosen by their names

A test is long by its recorded seconds (durations.py) or if a tier names its file. Where there are two cores, actors
and links are tested beside the tiers that compute (lanes.py). A tier that exceeds its budget of CPU seconds is named;
it does not fail, because processors differ by more than a factor of two.

Exit status 0 if everything passed, else 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # to run this file by its name

from tests import durations  # noqa: E402
from tests.failures import counts_of, failures_of, in_words  # noqa: E402
from tests.lanes import Done, Part, carry_out, seconds_of  # noqa: E402

__all__ = [
    "TIERS",
    "Outcome",
    "Tier",
    "all_long",
    "files_of",
    "has_gpu",
    "is_long",
    "judge",
    "long_tests",
    "main",
    "parts_of",
    "tier_of",
]

PARALLEL = ("-n", "auto")
"""One worker of pytest-xdist per core, for tests that compute and bound no time. The engine's go group by group, as
conftest.py says, because tests share what they captured."""
FOLDERS = {
    "capture": "engine",
    "data": "engine",
    "engine": "engine",
    "profiling": "engine",
    "runs": "engine",
    "zoo": "engine",
    "run": "ray",
    "runtime": "ray",
    "jobs": "ray",
    "lab": "ray",
    "gpu": "gpu",
}
"""The tier of tests in these folders, where their file has no mark of another; elsewhere it is "core"."""
QUICK_LINT = (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("mypy",))
LINT = (*QUICK_LINT, ("mkdocs", "build", "--strict", "--quiet"))


@dataclass(frozen=True, slots=True)
class Tier:
    """A selection of tests: the files for which ``tier_of`` returns its name.

    Attributes:
        name: of the tier.
        cpu_s: budget of CPU seconds without its long tests; generous, since a busy machine needs more for the same.
        options: further options of pytest.
        marks: expression of pytest's -m.
        keep_s: recorded seconds of tests that ``make test`` runs; the most expensive ones above it are long.
        prompt: its tests watch heartbeats and links: they run beside all others, which run at low priority.
        patient: files without tight timeouts, as globs below tests/; they run in the other lane, in their own process.
        long: files of which all tests are long, as globs.
        first: expensive files, as globs: they start first, so that no core waits for another at the end.
        optional: may have no tests yet, or a machine that cannot run it.
        of: tier that its files belong to, if ``marks`` selects the tests in them.
    """

    name: str
    cpu_s: float
    options: tuple[str, ...] = ()
    marks: str = ""
    keep_s: float = float("inf")
    prompt: bool = False
    patient: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    optional: bool = False
    of: str = ""


TIERS = (
    Tier("lint", 600),
    Tier("core", 400, ("--forbid=torch,ray", *PARALLEL), "not slow"),
    Tier("laws", 600, ("--forbid=torch,ray", *PARALLEL), "slow", of="core"),
    Tier(
        "engine",
        1800,
        ("--forbid=ray", *PARALLEL, "--dist=loadgroup", "--no-loadscope-reorder"),
        keep_s=500,
        long=("zoo/test_precisions.py",),
        first=("zoo/test_zoo.py", "runs/test_exactness.py", "prepare/test_resume.py", "runs/test_asynchronous.py"),
    ),
    Tier(
        "ray",
        3600,
        keep_s=550,
        prompt=True,
        patient=("jobs/test_*.py", "lab/test_two_raylets.py", "cli/test_runs.py", "runtime/driver/test_publish.py"),
        long=("jobs/test_*.py", "lab/test_two_raylets.py"),
        first=("jobs/test_lm.py",),
    ),
    Tier("gpu", 1000, optional=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a tier: "passed", "FAILED" or "SKIPPED", with the reason, and whether it could have run."""

    word: str
    reason: str
    could_run: bool = True


@functools.cache
def tier_of(path: Path, root: Path = ROOT / "tests") -> str:
    """Name of the tier of a test file: its own mark, in ``pytestmark``, or that of its folder."""
    text = path.read_text(encoding="utf-8")
    if "pytestmark" in text:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks = {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
                if own := marks & {tier.name for tier in TIERS if not tier.of}:
                    return own.pop()
    return FOLDERS.get(path.relative_to(root).parts[0], "core")


def files_of(tier: Tier, root: Path = ROOT / "tests") -> list[Path]:
    """Test files of a tier: those that start first, then the others, sorted."""
    own = {path for path in root.rglob("test_*.py") if tier_of(path, root) == (tier.of or tier.name)}
    first = [path for pattern in tier.first for path in sorted(root.glob(pattern))]
    return first + sorted(own - set(first))


@functools.cache
def long_tests(name: str) -> frozenset[str]:
    """Ids of the tests of a tier that are long by their recorded seconds."""
    tier = next(tier for tier in TIERS if tier.name == name)
    files = [path for path in files_of(tier) if not all_long(path)]
    return durations.long_of([_id(path) for path in files], durations.recorded(), tier.keep_s)


def is_long(path: Path, test: str) -> bool:
    """Whether the test with this id in this file is left out by ``make test``."""
    name = tier_of(path)
    return all_long(path) or test in long_tests(name)


def all_long(path: Path) -> bool:
    """Whether the tier of a file names it as long."""
    return any(_matches(path, tier.long) for tier in TIERS if tier.name == tier_of(path))


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(path.match(f"tests/{pattern}") for pattern in patterns)


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def has_gpu() -> bool:
    """Whether torch can use a GPU here. A process of its own is asked, because this one does not load torch."""
    asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=300).returncode == 0


def judge(tier: Tier, status: int, ran: int, skipped: int, long: bool = False) -> Outcome:
    """The outcome of pytest runs of which the worst ended with ``status``; ran counts passed and failed tests.

    A tier may have no long tests: with ``long``, only skipped ones count as tests that could have run.
    """
    counts = f"{ran} ran, {skipped} skipped"
    if status not in (0, 5):
        return Outcome("FAILED", f"{counts}, pytest's exit status {status}")
    if ran:
        return Outcome("passed", counts)
    return Outcome(
        "SKIPPED",
        f"no test ran, {skipped} skipped",
        could_run=(not tier.optional or has_gpu()) and (skipped > 0 or not long),
    )


def parts_of(
    tier: Tier,
    folder: Path,
    must_run: bool = False,
    long: bool = False,
    only: Sequence[Path] | None = None,
    part: str = "",
) -> list[Part]:
    """Commands of a tier, those of its patient files last; empty if it has no tests or no machine.

    Args:
        folder: gets a report for each command of pytest (see ``_report``).
        must_run: tests may not be skipped either for what this machine lacks.
        long: its long tests instead of the others.
        only: those of these files.
        part: "K/N" for the Kth of N parts of the tests; "" for all.
    """
    if tier.name == "lint":
        return [] if long else [Part(tier.name, LINT)]
    files = [path for path in files_of(tier) if _runs(path, tier, long) and (only is None or path in only)]
    if not files or (tier.name == "gpu" and not has_gpu()):
        return []
    patient = [path for path in files if _matches(path, tier.patient)]
    prompt = [path for path in files if path not in patient]
    marks = " and ".join(filter(None, (tier.marks, "long" if long else "not long")))
    # A machine with a GPU may be taken away amid the tests: each is named when it ends.
    options = ["-v" if tier.name == "gpu" else "-q", "--durations=8", *tier.options, "-m", marks]
    options += ["--must-run"] * must_run
    options += [f"--part={part}"] * bool(part)
    parts = []
    for chosen, beside, number in ((prompt, tier.prompt, 0), (patient, False, 1)):
        # Forking Ray's workers from a process with torch saves its import; long tests start them as Ray does.
        forked = ["--forked-workers"] * (beside and not long)
        command = ("pytest", *options, *forked, *_report(folder, tier, number), *map(str, chosen))
        parts += [Part(tier.name, (command,), beside)] * bool(chosen)
    return parts


def _runs(path: Path, tier: Tier, long: bool) -> bool:
    """Whether a file has tests to run: all of it may be long, or none of it, or some by their own mark."""
    if all_long(path):
        return long
    if long and "pytest.mark.long" in path.read_text(encoding="utf-8"):
        return True
    return not long or any(test.startswith(f"{_id(path)}::") for test in long_tests(tier.name))


def _report(folder: Path, tier: Tier, number: int) -> tuple[str, ...]:
    """Options of pytest for the two files with its results that ``failures_of`` reads."""
    stem = f"{folder}/{tier.name}-{number}"
    return "-o", "junit_family=xunit1", f"--junitxml={stem}.xml", f"--complaints={stem}.txt"


def _reports(folder: Path, tier: Tier) -> list[Path]:
    """Of junit, also those that pytest did not get to."""
    return sorted({path.with_suffix(".xml") for path in folder.glob(f"{tier.name}-*")})


def _outcome(tier: Tier, done: Sequence[Done], folder: Path, long: bool) -> Outcome:
    if not done:
        if tier.name == "gpu" and files_of(tier):
            return Outcome("SKIPPED", "torch can use no GPU on this machine", could_run=False)
        return Outcome("SKIPPED", "no tests", could_run=not (tier.optional or long))
    statuses = [status for one in done for status in one.statuses]
    if tier.name == "lint":
        commands = [" ".join(command[:2]) for one in done for command in one.part.commands]
        failed = [command for command, status in zip(commands, statuses, strict=True) if status]
        outcome = Outcome("FAILED" if failed else "passed", ", ".join(failed or commands))
    else:
        counts = [counts_of(report) for report in _reports(folder, tier)] or [(0, 0)]
        total, skipped = (sum(column) for column in zip(*counts, strict=True))
        outcome = judge(tier, max(statuses, key=abs), total - skipped, skipped, long)
    cpu_s = sum(one.cpu_s for one in done)
    if outcome.word == "passed" and not long and cpu_s > tier.cpu_s:
        return Outcome(
            "passed",
            f"{outcome.reason}; {cpu_s:.0f} CPU seconds exceed its budget of {tier.cpu_s:.0f}: make its slowest tests "
            "cheaper, or record their durations",
        )
    return outcome


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: list[str]) -> int:
    """Run the chosen tiers; 1 if one failed or, with --must-run, was left out; else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=", ".join(tier.name for tier in TIERS))
    parser.add_argument("--long", action="store_true", help="the long tests, instead of the others")
    parser.add_argument("--must-run", action="store_true", help="a tier that this machine can run must run")
    parser.add_argument("--in-turn", action="store_true", help="nothing runs beside anything else")
    parser.add_argument("--part", default="", metavar="K/N", help="the Kth of N parts of the tests")
    parser.add_argument("--keep", type=Path, help="folder for the junit reports")
    options = parser.parse_args(arguments)
    unknown = set(options.tiers) - {tier.name for tier in TIERS}
    if unknown:
        parser.error(f"no tier {min(unknown)!r}: choose from {', '.join(tier.name for tier in TIERS)}")
    chosen = [tier for tier in TIERS if not options.tiers or tier.name in options.tiers]
    rows, bad = [], False
    with _folder(options.keep) as folder:
        parts = [
            part
            for tier in chosen
            for part in parts_of(tier, folder, options.must_run, options.long, part=options.part)
        ]
        done = carry_out(parts, 1 if options.in_turn else min(2, _cores()))
        for tier in chosen:
            own = [one for one in done if one.part.tier == tier.name]
            outcome, cpu_s = _outcome(tier, own, folder, options.long), sum(one.cpu_s for one in own)
            rows.append(
                f"{tier.name:<8}{outcome.word:<9}{seconds_of(own):7.1f} s {cpu_s:7.1f} CPU s   {outcome.reason}"
            )
            left_out = options.must_run and outcome.word == "SKIPPED" and outcome.could_run
            if left_out:
                rows[-1] += "  <- must run on this machine"
            bad = bad or outcome.word == "FAILED" or left_out
        failed = [
            failure
            for tier in chosen
            for report in _reports(folder, tier)
            for failure in failures_of(tier.name, report, report.with_suffix(".txt"))
        ]
    print("\n".join(["", *in_words(failed), "", *rows]))
    print(f"all{seconds_of(done):21.1f} s")
    return int(bad)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
