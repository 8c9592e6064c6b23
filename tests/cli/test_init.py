"""``raypipe init``: its files are a run file and its module, and nothing is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.errors import ConfigError
from raypipe.runfile.run_file import read_runfile
from raypipe.starter import FILES, write


def test_it_writes_a_run_file_and_says_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", "deep/first"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "wrote deep/first/run.yaml",
        "wrote deep/first/model.py",
        "  cd deep/first",
        "  raypipe plan run.yaml             # what will run, and why",
        "  raypipe train run.yaml --local    # in threads; without --local on Ray",
    ]
    run = read_runfile("deep/first/run.yaml")
    assert run.length == {"num_steps": 300}
    assert run.values["run_config"] == {"storage_path": str(tmp_path / "runs")}


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"already has {name}, and nothing was written: init replaces no file. Name"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/first cannot be written to: .* Name another folder"):
        write(tmp_path / "file" / "first")
