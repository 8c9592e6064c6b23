"""Lint, the core tier and the tests of what changed, in about three minutes: ``make quick``.

    python tests/quick.py [--base COMMIT] [--seconds 180]

Changed are files that differ from COMMIT (by default where this branch left main), committed or not. A test file is
chosen if its imports, and theirs, reach a changed module; changed test files come first, then those with the fewest
imports between, of these the cheapest, up to the limit. What is left out is listed, and ``make test`` runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import durations, tiers  # noqa: E402
from tests.failures import failures_of, in_words  # noqa: E402
from tests.lanes import Part, carry_out, seconds_of  # noqa: E402
from tests.sources import module_of, reached  # noqa: E402

__all__ = ["changed", "choose", "main"]

FIXED_S = 80.0
"""Lint and the core tier, on two cores."""
SESSION_S = 5.0
"""Start of a session of pytest with torch, or with Ray."""
UNKNOWN_S = 5.0
"""Of a file without a record."""


def changed(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from a commit, with those that git does not know yet, relative to ``root``."""

    def lines(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"git {' '.join(words)}: {done.stderr.strip()}. Use --base with a commit of this repository."
            )
        return done.stdout.splitlines()

    begin = lines("merge-base", base, "HEAD")[0]
    return sorted({*lines("diff", "--name-only", begin), *lines("ls-files", "--others", "--exclude-standard")})


def choose(
    files: Sequence[str], reaches: Mapping[str, Mapping[str, int]], seconds: Mapping[str, float], limit_s: float
) -> tuple[list[str], list[str]]:
    """(chosen, left out) test files, nearest to a change first.

    Args:
        files: changed files.
        reaches: modules by the test file that reaches them, with the number of imports between (``sources.reached``).
        seconds: of test files, without their long tests.
        limit_s: chosen files take at most that long, except changed ones.
    """
    modules = {module_of(Path(file), Path()) for file in files if file.endswith(".py")}
    near = {test: min(map(reach.__getitem__, reach.keys() & modules), default=None) for test, reach in reaches.items()}
    touched = sorted((steps, seconds[test], test) for test, steps in near.items() if steps is not None)
    chosen: list[str] = []
    left_s = limit_s
    for _, cost_s, test in touched:
        if test in files or cost_s <= left_s:
            left_s -= cost_s
            chosen.append(test)
    return chosen, [test for _, _, test in touched if test not in chosen]


def _cost(path: Path) -> float:
    """Seconds of a file's tests on two cores, its long ones left out; Ray's tests share one node, so one core."""
    tier, file = tiers.tier_of(path), path.relative_to(ROOT).as_posix()
    s = durations.seconds_of_file(file, durations.recorded(), tiers.long_tests(tier)) or UNKNOWN_S
    return s if tier == "ray" else s / 2


def main(arguments: list[str]) -> int:
    """Run them; 1 if anything failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="commit to compare with; default: main")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit on two cores that do nothing else")
    options = parser.parse_args(arguments)
    files = changed(options.base)
    by_name = {tier.name: tier for tier in tiers.TIERS}
    tests = [path for tier in ("engine", "ray") for path in tiers.files_of(by_name[tier])]
    tests = [path for path in tests if not tiers.all_long(path)]
    names = {path.relative_to(ROOT).as_posix(): path for path in tests}
    reaches = {name: reached(module_of(path)) for name, path in names.items()}
    costs = {name: _cost(path) for name, path in names.items()}
    chosen, left = choose(files, reaches, costs, options.seconds - FIXED_S - 2 * SESSION_S)
    print(f"{len(files)} changed files, {len(chosen)} test files beside the core tier, {len(left)} left out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [Part("lint", tiers.QUICK_LINT), *tiers.parts_of(by_name["core"], folder)]
        for tier in ("engine", "ray"):
            own = [names[name] for name in chosen if tiers.tier_of(names[name]) == tier]
            parts += tiers.parts_of(by_name[tier], folder, only=own)
        done = carry_out(parts, 1)
        failed = [
            failure
            for part in parts
            for report in sorted(folder.glob(f"{part.tier}-*.xml"))
            for failure in failures_of(part.tier, report, report.with_suffix(".txt"))
        ]
    print("\n".join(["", *in_words(failed)]))
    if left:
        print(f"left out ({sum(costs[name] for name in left):.0f} s; make test runs them):", *left, sep="\n  ")
    bad = [one.part.tier for one in done if set(one.statuses) - {0, 5}]
    print(f"quick: {'FAILED in ' + ', '.join(bad) if bad else 'passed'}, {seconds_of(done):.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
