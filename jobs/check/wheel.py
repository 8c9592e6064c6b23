"""The wheel alone: built, installed into an environment that has nothing else, and used from an empty folder.

    python jobs/check/wheel.py               installs the declared dependencies, at the versions of requirements.txt
    python jobs/check/wheel.py --borrow      takes them from this environment: quicker, and misses what is not declared

Every command has an empty home folder and no PYTHONPATH, so that nothing of this checkout is found. It ends with 1
where one of them fails, or leaves out a file that it should write.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("raypipe", "pyproject.toml", "README.md", "LICENSE")
TIMEOUT_S = 600
COMMANDS = (
    ("init",),
    ("data", "run.yaml"),
    ("plan", "run.yaml"),
    ("simulate", "run.yaml", "--svg", "step.svg"),
    ("train", "run.yaml", "--local", "--set", "num_steps=20"),
    ("train", "run.yaml", "--set", "run_config.name=first"),
    ("status", "runs/first"),
    ("list", "runs"),
    ("report", "runs/first"),
    ("trace", "runs/first", "-o", "trace.json"),
    ("export", "runs/first", "-o", "model.safetensors"),
    ("doctor",),
    ("dashboards", "install", "boards"),
)
WRITTEN = (
    "step.svg",
    "trace.json",
    "model.safetensors",
    "runs/first/report.html",
    "boards/grafana/dashboards/raypipe-overview.json",
    "boards/prometheus/rules.yaml",
)


def build(folder: Path) -> Path:
    """Build the wheel of a copy of these sources, so that files of an old build folder cannot be used."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(source)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path, *, borrow: bool) -> None:
    """Create an environment with the wheel and its dependencies."""
    run([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / "bin" / "python")
    if not borrow:
        pins = environment / "constraints.txt"
        pins.write_text(re.sub(r"\[[^]]*\]", "", (ROOT / "requirements.txt").read_text("utf-8")))
        run([python, "-m", "pip", "install", "--quiet", "--constraint", str(pins), str(wheel)])
        return
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (Path(asked.stdout.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


def use(environment: Path, empty: Path) -> list[str]:
    """Run all commands once and list their faults."""
    home = empty.parent / "home"
    home.mkdir()
    variables = {"HOME": str(home), "PATH": f"{environment / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    wrong = []
    for words in COMMANDS:
        print("$ raypipe", *words, flush=True)
        done = subprocess.run(
            [str(environment / "bin" / "raypipe"), *words], cwd=empty, env=variables, check=False, timeout=TIMEOUT_S
        )
        if done.returncode:
            wrong.append(f"raypipe {' '.join(words)} ended with {done.returncode}")
    wrong += [f"{name} was not written" for name in WRITTEN if not (empty / name).is_file()]
    return wrong


def main() -> int:
    """Return exit status 1 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--borrow", action="store_true", help="take the dependencies from this environment")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypipe-wheel-") as made:
        folder = Path(made)
        wheel = build(folder)
        install(wheel, folder / "environment", borrow=asked.borrow)
        (folder / "empty").mkdir()
        wrong = use(folder / "environment", folder / "empty")
    for line in wrong:
        print(f"FAILED: {line}")
    print("all commands work" if not wrong else f"{len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
