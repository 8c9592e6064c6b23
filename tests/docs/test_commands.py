"""Commands that the documentation shows: schedules on paper print what the pages say, and no command is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raypipe.cli import app
from tests.docs.pages import sessions
from tests.sources import ROOT

SIMULATED = [
    (page, command, printed)
    for page in ("docs/why.md", "docs/schedules.md")
    for command, printed in sessions(page)
    if command.startswith("raypipe simulate ")
]
PICTURES = {"1f1b.svg": [], "slack.svg": ["--schedule", "slack", "--slack", "2"]}


def test_there_are_commands() -> None:
    assert len(SIMULATED) >= 8


@pytest.mark.parametrize(("page", "command", "printed"), SIMULATED, ids=[f"{p}-{c[17:]}" for p, c, _ in SIMULATED])
def test_a_schedule_on_paper_prints_what_the_page_says(page: str, command: str, printed: str) -> None:
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == printed.strip()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_command(name: str, tmp_path: Path) -> None:
    options = ["--stages", "4", "--microbatches", "8", "--latency-ms", "10", *PICTURES[name], "--svg"]
    assert CliRunner().invoke(app, ["simulate", *options, str(tmp_path / name)]).exit_code == 0
    assert (tmp_path / name).read_text("utf-8") == (ROOT / "docs" / "pictures" / name).read_text("utf-8")


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    named = re.findall(r"^\| `raypipe ([a-z ]+?)(?: [A-Z].*| run\.yaml.*)?` ", page, re.MULTILINE)
    commands = set(typer.main.get_command(app).commands) - {"dashboards"} | {"dashboards install"}  # type: ignore[attr-defined]
    assert set(named) == commands
