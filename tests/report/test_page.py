"""The report of a run: everything its folder has is in it, nothing comes from elsewhere, and nothing in it runs."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError
from raypipe.report.page import bytes_over_step, facts_of, report_html
from raypipe.report.run_facts import read_run
from tests.report.run_folder import make_run

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Titles of the sections, tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_run(tmp_path_factory.mktemp("runs") / "lm")


@pytest.fixture(scope="module")
def text(folder: Place) -> str:
    return report_html(read_run(folder), "finished")


def test_every_section_is_there(text: str, folder: Place) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Loss", "Speed", "Timeline of one step", "The cut", "Memory", "Links and schedule", "Failures and recoveries",
        "Events and settings",
    ]  # fmt: skip
    words = Page(text).words
    links = text[text.index("A message, as the controller measured it") :]
    assert [f">{way}</text>" in links for way in ("0→1", "1→0", "1→2", "2→1")] == [True] * 4
    for expected in (
        "200 of 200", "Group size k of kFkB", "predicted lm", "measured lm", "link 0→1", "op0 to op3",
        "2 steps done again", "5 steps done again", "eval_loss", "eval_accuracy",
        "3.0 MiB moved", "810 ms", "A message, as the controller measured it", "Memory over a step, measured times",
    ):  # fmt: skip
        assert expected in words, expected
    assert "regroup: the run goes on" in text, "a mark of each chart"
    assert ("failures survived", "3") in facts_of(read_run(folder))


def test_nothing_comes_from_elsewhere(text: str) -> None:
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "img", "base"}
        for name in ("src", "href", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, value)
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_what_the_folder_says_is_shown_and_not_run(text: str) -> None:
    assert [tag for tag, _ in Page(text).tags].count("script") == 1
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_a_run_that_has_just_begun_has_a_report(folder: Place, tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    shutil.copy(f"{folder.path}/events.jsonl", young)
    run = read_run(Place.of(young))
    assert run.plan is None
    assert len(run.missing) == 3
    words = Page(report_html(run, "running")).words
    assert "no metrics: none of a step have been written yet" in words
    assert "No step is known." in words
    assert "Time per step" not in words


def test_why_a_run_failed_stands_first(folder: Place, tmp_path: Path) -> None:
    lines = '{"time": 1.0, "decision": "start", "reason": "fit was called"}\n'
    (tmp_path / "events.jsonl").write_text(lines + '{"time": 2.0, "decision": "fail", "reason": "the loss is <inf>"}\n')
    text = report_html(read_run(Place.of(tmp_path)), "failed")
    assert text.index('<p class="why">the loss is &lt;inf&gt;</p>') < text.index("<section")
    assert 'class="why"' not in report_html(read_run(folder), "finished")


def test_what_a_run_cost_is_among_its_numbers(folder: Place, text: str) -> None:
    assert "<dt>cost</dt>" not in text
    folder.write_bytes("cost.json", b'{"cost": 12.5, "worker_hours": 4.0}')
    assert "<dt>cost</dt><dd>12.50</dd>" in report_html(read_run(folder), "finished")
    folder.write_bytes("cost.json", b"{")
    damaged = report_html(read_run(folder), "finished")
    assert "no cost: cost.json cannot be read" in damaged
    assert "<dt>cost</dt>" not in damaged
    folder.delete("cost.json")


def test_a_damaged_part_is_named_and_the_rest_shown(folder: Place, tmp_path: Path) -> None:
    copy = tmp_path / "lm"
    shutil.copytree(folder.path, copy)
    (copy / "timeline/spans.parquet").write_bytes(b"no parquet")
    (copy / "plan.json").write_text("{")
    run = read_run(Place.of(copy))
    assert run.timelines == []
    assert len(run.records) == 200
    assert any(what.startswith("no plan: This is not a saved plan") for what in run.missing)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a run"):
        read_run(Place.of(tmp_path))


def test_memory_rises_with_every_forward_up_to_what_the_plan_counts(folder: Place) -> None:
    run = read_run(folder)
    assert run.plan is not None
    assert run.plan.prediction is not None
    stages = run.plan.prediction.stages
    for timeline in run.timelines:
        for stage, points in zip(stages, bytes_over_step(stages, timeline), strict=True):
            held = [count for _, count in points]
            assert max(held) == pytest.approx(stage.memory_bytes)
            assert held[0] == pytest.approx(held[-1])
            assert [moment for moment, _ in points] == sorted(moment for moment, _ in points)


def test_the_command_writes_it_into_the_folder_or_where_it_is_told(folder: Place, tmp_path: Path) -> None:
    copy = tmp_path / "lm"
    shutil.copytree(folder.path, copy)
    told = CliRunner().invoke(app, ["report", str(copy)])
    assert told.output == f"wrote {copy / 'report.html'}\n"
    assert '<span class="state finished">' in (copy / "report.html").read_text()
    CliRunner().invoke(app, ["report", str(copy), "-o", str(tmp_path / "new/x.html")])
    assert (tmp_path / "new/x.html").read_text() == (copy / "report.html").read_text()
    with pytest.raises(ConfigError, match="cannot be written"):
        CliRunner().invoke(app, ["report", str(copy), "-o", str(copy)], catch_exceptions=False)
