"""Run the tests tier by tier, cheapest first, and say of each what happened and how long it took.

    python tests/tiers.py                  all tiers
    python tests/tiers.py lint core        these
    python tests/tiers.py --must-run       fail too if a tier was skipped that this machine can run

Exit status 0 when all is well, 1 when not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["TIERS", "Outcome", "Tier", "files_of", "has_gpu", "judge", "main", "run", "tier_of"]

ROOT = Path(__file__).resolve().parents[1]
PARALLEL = ("-n", "auto")
"""One worker of pytest-xdist per core, for tests that compute and bound no time. The engine's go group by group, as
conftest.py says, because tests share what they captured."""
FOLDERS = {
    "data": "engine",
    "engine": "engine",
    "runs": "engine",
    "zoo": "engine",
    "runtime": "ray",
    "jobs": "ray",
    "lab": "ray",
    "gpu": "gpu",
}
"""The tier of tests in these folders, where their file has no mark of another; elsewhere it is "core"."""
LINT = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy",),
    ("mkdocs", "build", "--strict", "--quiet"),
)


@dataclass(frozen=True, slots=True)
class Tier:
    """A selection of tests: the files of which ``tier_of`` says its name.

    Attributes:
        name: of the tier.
        aim_s: seconds that it should stay below.
        options: further options of pytest.
        patient: those of them that bound no time tightly, as globs below tests/; they run beside the others, at low
            priority, in a process of their own.
        long: those that take longest, as globs: they are begun first, so that no core waits for another at the end.
        optional: may have no tests yet, or a machine that cannot run it.
        of: the tier whose files it takes, where its own are those that ``options`` choose among them.
    """

    name: str
    aim_s: float
    options: tuple[str, ...] = ()
    patient: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    optional: bool = False
    of: str = ""


TIERS = (
    Tier("lint", 60),
    Tier("core", 10, ("--forbid=torch,ray", *PARALLEL, "-m", "not slow")),
    Tier("laws", 60, ("--forbid=torch,ray", *PARALLEL, "-m", "slow"), of="core"),
    Tier(
        "engine",
        180,
        ("--forbid=ray", *PARALLEL, "--dist=loadgroup", "--no-loadscope-reorder"),
        long=(
            "zoo/test_zoo.py",
            "runs/test_exactness.py",
            "prepare/test_resume.py",
            "runs/test_asynchronous.py",
            "runs/test_planned_nets.py",
        ),
    ),
    Tier(
        "ray",
        300,
        patient=(
            "jobs/test_*.py",
            "lab/test_two_raylets.py",
            "cli/test_runs.py",
            "runtime/driver/test_publish.py",
        ),
        long=("jobs/test_lm.py",),
    ),
    Tier("gpu", 300, optional=True),
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
    """The tier's test files: the long ones first, else sorted."""
    long = [path for pattern in tier.long for path in sorted(root.glob(pattern))]
    return long + sorted(
        {path for path in root.rglob("test_*.py") if tier_of(path, root) == (tier.of or tier.name)} - set(long)
    )


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this machine shows an NVIDIA device."""
    return any(devices.glob("nvidia[0-9]*"))


def judge(tier: Tier, status: int, ran: int, skipped: int) -> Outcome:
    """The outcome of a pytest run that ended with ``status``; ran counts passed and failed tests."""
    counts = f"{ran} ran, {skipped} skipped"
    if status not in (0, 5):
        return Outcome("FAILED", f"{counts}, pytest's exit status {status}")
    if ran:
        return Outcome("passed", counts)
    return Outcome("SKIPPED", f"no test ran, {skipped} skipped", could_run=not tier.optional or has_gpu())


def run(tier: Tier) -> Outcome:
    """Carry out one tier; its output goes to the terminal."""
    if tier.name == "lint":
        failed = [" ".join(command) for command in LINT if _tool(*command)]
        return (
            Outcome("FAILED", ", ".join(failed))
            if failed
            else Outcome("passed", "ruff format, ruff check, mypy, mkdocs")
        )
    files = files_of(tier)
    if not files:
        return Outcome("SKIPPED", "no tests yet", could_run=not tier.optional)
    if tier.name == "gpu" and not has_gpu():
        return Outcome("SKIPPED", "no NVIDIA device on this machine", could_run=False)
    patient = [path for path in files if any(path.match(f"tests/{pattern}") for pattern in tier.patient)]
    prompt = [path for path in files if path not in patient]
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / "prompt.xml", Path(folder) / "patient.xml"]
        beside = _beside(_pytest(tier, reports[1], patient), Path(folder) / "patient.log") if patient else None
        statuses = [_tool(*_pytest(tier, reports[0], prompt))]
        if beside is not None:
            statuses.append(beside.wait())
            print((Path(folder) / "patient.log").read_text(), flush=True)
        counts = [_counts(report) for report in reports]
    total, skipped = (sum(column) for column in zip(*counts, strict=True))
    return judge(tier, max(statuses, key=abs), total - skipped, skipped)


def _pytest(tier: Tier, report: Path, files: list[Path]) -> list[str]:
    return ["pytest", "-q", "--durations=8", f"--junitxml={report}", *tier.options, *map(str, files)]


def _beside(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A tool of this environment that takes what processor time the others leave; ``log`` gets its output."""
    nice = [
        sys.executable,
        "-c",
        "import os, sys; os.nice(10); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    ]
    print(f"$ nice {' '.join(command[:4])} ...", flush=True)
    with log.open("wb") as file:
        return subprocess.Popen([*nice, "-m", *command], cwd=ROOT, stdout=file, stderr=file, env=_environment())


def _tool(*command: str) -> int:
    """Exit status of a tool of this environment."""
    print(f"$ {' '.join(command[:6])}{' ...' if len(command) > 6 else ''}", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False, env=_environment()).returncode


def _environment() -> dict[str, str]:
    """This process's own, and a traceback from a process that crashes, also while it ends.

    Modules are compiled once, whatever this shell says of that: the ray tier starts hundreds of processes, and each
    would compile all of raypipe again.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**given, "PYTHONFAULTHANDLER": "1", "NO_MKDOCS_2_WARNING": "1"}


def _counts(report: Path) -> tuple[int, int]:
    """(tests, skipped ones) of a junit report; nothing where pytest did not get that far."""
    if not report.exists():
        return 0, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped = (sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "skipped"))
    return tests, skipped


def main(arguments: list[str]) -> int:
    """Run the asked tiers; 1 when one failed or, with --must-run, was left out; else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=", ".join(tier.name for tier in TIERS))
    parser.add_argument("--must-run", action="store_true", help="a tier that this machine can run must run")
    asked = parser.parse_args(arguments)
    unknown = set(asked.tiers) - {tier.name for tier in TIERS}
    if unknown:
        parser.error(f"no tier {min(unknown)!r}: choose from {', '.join(tier.name for tier in TIERS)}")
    rows, bad = [], False
    for tier in TIERS:
        if asked.tiers and tier.name not in asked.tiers:
            continue
        if asked.must_run:  # also of the tests of a tier that runs
            tier = replace(tier, options=(*tier.options, "--must-run"))
        print(f"\n=== {tier.name}", flush=True)
        start = time.monotonic()
        outcome = run(tier)
        seconds = time.monotonic() - start
        late = f"  (aim: {tier.aim_s:.0f} s)" if seconds > tier.aim_s else ""
        rows.append(f"{tier.name:<8}{outcome.word:<9}{seconds:7.1f} s   {outcome.reason}{late}")
        left_out = asked.must_run and outcome.word == "SKIPPED" and outcome.could_run
        if left_out:
            rows[-1] += "  <- must run on this machine"
        bad = bad or outcome.word == "FAILED" or left_out
    print("\n" + "\n".join(rows))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
