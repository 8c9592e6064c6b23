"""The command line: what it prints is right, and its errors are one paragraph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from typer.testing import CliRunner

from raypipe import __version__
from raypipe.cli import app


def test_simulate_prints_picture_time_and_memory_and_writes_files(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"schedule.{kind}" for kind in ("csv", "trace", "svg")}
    options = [f"--{kind}={path}" for kind, path in files.items()]
    result = CliRunner().invoke(app, ["simulate", "--stages=2", "--microbatches=2", "--schedule=gpipe", *options])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0: F0 F1  .  . B0 B1\n1:  . F0 F1 B0 B1  .\n")
    assert "gpipe: 90.0 ms per step, bubble 33.3%" in result.output
    assert "by stage: 2 2" in result.output
    assert files["csv"].read_text().splitlines()[0] == "0F0,0F1,0B0,0B1"
    assert len([e for e in json.loads(files["trace"].read_text())["traceEvents"] if e["ph"] == "X"]) >= 8
    ElementTree.parse(files["svg"])


def test_latency_costs_what_the_law_says() -> None:
    """By hand: 1F1B waits 20 ms longer than free links would take, slack 2 only for the first and last transfer."""
    arguments = ["simulate", "--stages=2", "--microbatches=4", "--latency-ms=5"]
    assert "1f1b: 170.0 ms" in CliRunner().invoke(app, arguments).output
    assert "slack(r=2): 160.0 ms" in CliRunner().invoke(app, [*arguments, "--schedule=slack", "--slack=2"]).output


def test_an_error_is_one_paragraph_on_standard_error() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "raypipe.cli", "simulate", "--schedule", "kfbk"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("raypipe: There is no schedule 'kfbk'")
    assert "Did you mean 'kfkb'?" in run.stderr
    assert "Traceback" not in run.stderr


def test_version() -> None:
    assert CliRunner().invoke(app, ["version"]).output.strip() == __version__
