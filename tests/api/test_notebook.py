"""A run in a notebook: what cells show, and a view that ends with the run, or with an interrupt that leaves the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import raypipe
from raypipe.api import notebook
from raypipe.api.notebook import LiveView, run_html
from raypipe.errors import LeaseError
from raypipe.run.status import RunStatus
from tests.prepare.test_resume import trainer, unhurried

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_and_its_result_show_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=4, local=True)
    assert "<b>run</b>" in handle._repr_html_()
    handle.watch(every_s=0.05)
    assert "run: finished, step 4/4" in capsys.readouterr().out.splitlines()[-1]
    result = handle.wait(timeout_s=60)
    shown = result._repr_html_()
    assert "raypipe report" in shown
    assert "<svg" in shown
    assert result.report() == str(tmp_path / "run/report.html")
    assert "4 of 4" in (tmp_path / "run/report.html").read_text()
    assert "<b>run</b>" in handle._repr_html_(), "also of a run that is over"


def test_an_interrupt_ends_the_view_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=4, local=True)

    def interrupted(view: LiveView, html: str, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveView, "show", interrupted)
    handle.watch()
    assert len(handle.wait(timeout_s=60).records) == 4


def test_a_cell_that_is_run_again_is_refused_and_the_run_stays_in_reach(tmp_path: Path) -> None:
    """Else the new handle would be of a run that fails in its own thread, and the old run would train for nobody."""
    before = {thread.ident for thread in threading.enumerate()}
    handle = trainer("mlp", tmp_path, "run", 2, optimizer=unhurried).start(num_steps=100_000, local=True)
    with pytest.raises(LeaseError, match=r"Stop the earlier run: handle\.stop\(\), or raypipe\.attach\('run'\)\.stop"):
        handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=100_000, local=True)
    assert not handle.status().state.startswith("fail")
    raypipe.attach("run").stop("the handle was lost")
    again = trainer("mlp", tmp_path, "run", 2, optimizer=unhurried).start(num_steps=100_000, local=True)
    assert handle.wait(timeout_s=60).stopped == "the handle was lost"
    again.stop()
    assert again.wait(timeout_s=60).stopped
    left = [thread for thread in threading.enumerate() if thread.ident not in before and "raypipe" in thread.name]
    assert left == []


class Cell:
    """What ``display(..., display_id=True)`` gives."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, what: Any) -> None:
        self.shown.append(what.data)


def test_in_a_notebook_the_view_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython", reason="IPython is of the extra 'notebook'")
    cell = Cell()
    monkeypatch.setattr("IPython.display.display", lambda what, display_id: cell.update(what) or cell)
    monkeypatch.setattr(notebook, "_in_notebook", lambda: True)
    view = LiveView()
    view.show("<b>1</b>", "1")
    view.show("<b>2</b>", "2")
    assert cell.shown == ["<b>1</b>", "<b>2</b>"]


def test_what_a_run_says_is_shown_and_not_run() -> None:
    status = RunStatus("<x>", "", "running", step=3, num_steps=9, message="<script>\nmore", stages=({"host": "<h>"},))
    shown = run_html(status, [(1.0, 2.0)])
    assert "<script>" not in shown
    assert "<x>" not in shown
    assert "&lt;h&gt;:?" in shown
