"""The Python of the documentation runs as it stands, in a project that ``raypipe init`` has written, in threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.starter import write
from tests.docs.pages import blocks, pages

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SHORTER = (("fit(num_steps=100)", "fit(num_steps=2, local=True)"),)
"""README's run is on Ray, which has tests of its own."""
PAGES = [page for page in pages() if blocks(page, "python")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    yield tmp_path
    sys.modules.pop("model", None)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, project: Path) -> None:
    if page == "docs/start.md":  # its command line has trained this one
        options = ["--local", "--set", "run_config.name=spirals", "--set", "num_steps=5"]
        assert CliRunner().invoke(app, ["train", "run.yaml", *options], catch_exceptions=False).exit_code == 0
    found = blocks(page, "python")
    assert found
    names: dict[str, object] = {"__name__": "__main__"}
    for text in found:
        for shown, run in SHORTER:
            text = text.replace(shown, run)
        exec(compile(text, page, "exec"), names)
