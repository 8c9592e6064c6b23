"""The notebooks of jobs/notebooks, as a reader runs them: all cells in their order, in a kernel of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.raylets import Home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

nbclient = pytest.importorskip("nbclient", reason="nbclient is of the extra 'notebook'")
nbformat = pytest.importorskip("nbformat", reason="nbformat is of the extra 'notebook'")

CELL_S = 400
"""More than any cell takes, also on a machine that is busy with something else."""
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "jobs/notebooks").glob("*.ipynb"))


def executed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *shorter: tuple[str, str], again: bool = False
) -> list[Any]:
    """Outputs of all cells, one text each.

    Args:
        folder: where the kernel works.
        shorter: numbers as they stand in a cell, and smaller ones, which show the same.
        again: all cells a second time.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(ROOT / f"jobs/notebooks/{name}.ipynb", as_version=4)
    for shown, run in shorter:
        assert any(shown in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(shown, run)
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with client.setup_kernel():
        for _ in range(2 if again else 1):
            for place, cell in enumerate(notebook.cells):
                client.execute_cell(cell, place)
    return [_text(cell) for cell in notebook.cells if cell.cell_type == "code"]


def _text(cell: Any) -> str:
    found = []
    for output in cell.outputs:
        data = output.get("data", {})
        shown = [data.get(kind, "") for kind in ("text/html", "image/svg+xml", "text/plain")]
        found += [output.get("text", ""), *shown, *output.get("traceback", ())]
    return "\n".join(found)


@pytest.fixture
def on_head(head: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel finds this cluster."""
    monkeypatch.setenv("RAY_ADDRESS", head.address)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert [cell.source for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


def test_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed("schedules", tmp_path, monkeypatch)
    assert sum(text.count("<svg") for text in outputs) >= 9
    assert "kfkb k=2: " in "".join(outputs)


def test_quickstart_trains_and_can_be_run_again(on_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed("quickstart", tmp_path, monkeypatch, ("num_steps=200", "num_steps=50"), again=True)
    assert "stages:  2" in outputs[1]
    assert "finished" in outputs[3]
    assert "<progress" in outputs[3], "the view is one cell that is updated in place"
    assert outputs[3].count("<progress") == 1
    assert (tmp_path / "runs/quickstart/report.html").exists()
    assert not (tmp_path / "runs/quickstart-2").exists()


def test_ada_grouper_hears_of_the_link(on_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another k pays is a matter of time, which a busy machine has little of; that the link changed is not."""
    outputs = executed(
        "ada_grouper", tmp_path, monkeypatch, ("STEPS, SLOW, FREE = 70, 15, 50", "STEPS, SLOW, FREE = 56, 12, 44"),
        ("STAGES, MICROBATCHES = 2, 16", "STAGES, MICROBATCHES = 2, 8"), ("(1, 2, 4, 8, 16)", "(1, 2, 4, 8)"),
    )  # fmt: skip
    assert "finished" in outputs[1]
    assert "drift" in outputs[2]
    assert "Link 0" in outputs[2]
    assert "Time per step" in outputs[3]


def test_a_killed_stage_changes_no_bit(on_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed("elastic", tmp_path, monkeypatch)
    assert "recovery after step" in "".join(outputs)
    assert "all equal" in "".join(outputs)


def test_a_script_for_trainer_generates_what_it_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is of the extra 'hf'")
    outputs = executed("hugging_face", tmp_path, monkeypatch, again=True)
    assert "stages:  2" in outputs[1]
    assert "after sunday comes monday" in outputs[-1]
