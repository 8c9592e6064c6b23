"""Run the tests tier by tier, cheapest first, and say of each what happened and how long it took.

    python tests/tiers.py                  all tiers
    python tests/tiers.py lint core        these
    python tests/tiers.py --must-run       fail too if a tier was skipped that this machine can run
    python tests/tiers.py --in-turn        one after the other, also where there are cores for two

Where there are two cores, actors and links are tested beside the tiers that compute (lanes.py).

Exit status 0 when all is well, 1 when not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for whoever runs this file by its name

from tests.failures import counts_of, failures_of, in_words  # noqa: E402
from tests.lanes import Done, Part, carry_out, seconds_of  # noqa: E402

__all__ = ["TIERS", "Outcome", "Tier", "files_of", "has_gpu", "judge", "main", "parts_of", "tier_of"]

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
        prompt: its tests watch heartbeats and links: they run beside all others, and these at low priority.
        patient: those of them that bound no time tightly, as globs below tests/; they run with the others, in a process
            of their own.
        long: those that take longest, as globs: they are begun first, so that no core waits for another at the end.
        optional: may have no tests yet, or a machine that cannot run it.
        of: the tier whose files it takes, where its own are those that ``options`` choose among them.
    """

    name: str
    aim_s: float
    options: tuple[str, ...] = ()
    prompt: bool = False
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
        prompt=True,
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
    """The outcome of pytest runs of which the worst ended with ``status``; ran counts passed and failed tests."""
    counts = f"{ran} ran, {skipped} skipped"
    if status not in (0, 5):
        return Outcome("FAILED", f"{counts}, pytest's exit status {status}")
    if ran:
        return Outcome("passed", counts)
    return Outcome("SKIPPED", f"no test ran, {skipped} skipped", could_run=not tier.optional or has_gpu())


def parts_of(tier: Tier, folder: Path, must_run: bool = False) -> list[Part]:
    """What there is to run of a tier, the patient part last; nothing where it has no tests or no machine.

    Args:
        folder: gets a report for each command of pytest (see ``_report``).
        must_run: tests, too, may not be skipped for what this machine lacks.
    """
    if tier.name == "lint":
        return [Part(tier.name, LINT)]
    files = files_of(tier)
    patient = [path for path in files if any(path.match(f"tests/{pattern}") for pattern in tier.patient)]
    prompt = [path for path in files if path not in patient]
    if not files or (tier.name == "gpu" and not has_gpu()):
        return []
    options = ("-q", "--durations=8", *tier.options, *(["--must-run"] if must_run else []))
    return [
        Part(tier.name, (("pytest", *options, *_report(folder, tier, number), *map(str, chosen)),), beside)
        for number, (chosen, beside) in enumerate([(prompt, tier.prompt), (patient, False)])
        if chosen
    ]


def _report(folder: Path, tier: Tier, number: int) -> tuple[str, ...]:
    """Options that let pytest say what happened in two files, which ``failures_of`` reads."""
    stem = f"{folder}/{tier.name}-{number}"
    return "-o", "junit_family=xunit1", f"--junitxml={stem}.xml", f"--complaints={stem}.txt"


def _reports(folder: Path, tier: Tier) -> list[Path]:
    """Of junit, also those that pytest did not get to."""
    return sorted({path.with_suffix(".xml") for path in folder.glob(f"{tier.name}-*")})


def _outcome(tier: Tier, done: Sequence[Done], folder: Path) -> Outcome:
    if not done:
        if tier.name == "gpu" and files_of(tier):
            return Outcome("SKIPPED", "no NVIDIA device on this machine", could_run=False)
        return Outcome("SKIPPED", "no tests yet", could_run=not tier.optional)
    statuses = [status for one in done for status in one.statuses]
    if tier.name == "lint":
        failed = [" ".join(command) for command, status in zip(LINT, statuses, strict=True) if status]
        if failed:
            return Outcome("FAILED", ", ".join(failed))
        return Outcome("passed", "ruff format, ruff check, mypy, mkdocs")
    counts = [counts_of(report) for report in _reports(folder, tier)] or [(0, 0)]
    total, skipped = (sum(column) for column in zip(*counts, strict=True))
    return judge(tier, max(statuses, key=abs), total - skipped, skipped)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: list[str]) -> int:
    """Run the asked tiers; 1 when one failed or, with --must-run, was left out; else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=", ".join(tier.name for tier in TIERS))
    parser.add_argument("--must-run", action="store_true", help="a tier that this machine can run must run")
    parser.add_argument("--in-turn", action="store_true", help="nothing runs beside anything else")
    asked = parser.parse_args(arguments)
    unknown = set(asked.tiers) - {tier.name for tier in TIERS}
    if unknown:
        parser.error(f"no tier {min(unknown)!r}: choose from {', '.join(tier.name for tier in TIERS)}")
    chosen = [tier for tier in TIERS if not asked.tiers or tier.name in asked.tiers]
    rows, bad = [], False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [part for tier in chosen for part in parts_of(tier, folder, asked.must_run)]
        done = carry_out(parts, 1 if asked.in_turn else min(2, _cores()))
        for tier in chosen:
            own = [one for one in done if one.part.tier == tier.name]
            outcome, seconds = _outcome(tier, own, folder), seconds_of(own)
            late = f"  (aim: {tier.aim_s:.0f} s)" if seconds > tier.aim_s else ""
            rows.append(f"{tier.name:<8}{outcome.word:<9}{seconds:7.1f} s   {outcome.reason}{late}")
            left_out = asked.must_run and outcome.word == "SKIPPED" and outcome.could_run
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
