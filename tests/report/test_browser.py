"""The report in a browser: both themes, an empty console, clicks and zooms, and no words over each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.engine.io.run_files import RunFolder
from raypipe.ir.schedule import parse_action
from raypipe.ir.timeline import Span, Timeline
from raypipe.report.page import report_html
from raypipe.report.run_facts import read_run
from tests.browser import MISPLACED, SMALL, needs_chromium, opened
from tests.report.run_folder import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_chromium]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "report.html"
    path.write_text(report_html(read_run(make_run(folder / "lm")), "finished"))
    return path


def _colour(page: Any, selector: str, what: str) -> str:
    return str(page.eval_on_selector(selector, f"(found) => getComputedStyle(found).{what}"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_in_both_themes(report: Path, scheme: str) -> None:
    with opened(report, scheme) as (page, complaints):
        paper = "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)"
        assert _colour(page, "body", "backgroundColor") == paper
        assert _colour(page, "svg.rp-timeline > rect", "fill") == paper
        assert page.evaluate(MISPLACED) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        assert complaints == []


def test_a_click_tells_a_box_and_zooming_shows_more(report: Path) -> None:
    with opened(report, "light") as (page, complaints):
        box = page.locator(".rp-plot rect.rp-F", has_text="0F3 forward").first
        box.click()
        told = page.locator(".picked")
        assert told.inner_text().startswith("0F3 forward: ")
        before = box.bounding_box()["width"]
        page.click("button[data-zoom=in]")
        page.click("button[data-zoom=out]")
        assert box.bounding_box()["width"] == pytest.approx(before, abs=0.1), "in and out again is where it was"
        ticks = page.locator(".rp-ticks").first.text_content()
        page.mouse.move(box.bounding_box()["x"] + before / 2, box.bounding_box()["y"] + 5)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
        page.wait_for_function(f"document.querySelector('.rp-ticks').textContent !== {ticks!r}")
        assert box.bounding_box()["width"] > 1.2 * before
        assert page.evaluate(MISPLACED) == []
        page.click("button[data-zoom=all]")
        assert box.bounding_box()["width"] == pytest.approx(before, abs=0.1)
        assert complaints == []


def test_the_pointer_reads_a_chart(report: Path) -> None:
    with opened(report, "light") as (page, complaints):
        chart = page.locator("svg.rp-chart").first
        place = chart.bounding_box()
        page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        tip = page.locator("figure .tip").first
        assert tip.is_visible()
        assert tip.inner_text().startswith("step ")
        assert "loss " in tip.inner_text()
        page.locator("summary").last.click()
        assert page.locator("pre").is_visible()
        assert complaints == []


def test_a_narrow_window_has_it_whole_and_readable(report: Path) -> None:
    with opened(report, "dark", width=390) as (page, complaints):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(SMALL, 9) == []
        assert complaints == []


def test_many_stages_and_long_names_have_room(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_html(read_run(make_run(tmp_path / f"lm-{'of_many_letters' * 12}", stages=8)), "finished"))
    with opened(path, "light") as (page, complaints):
        assert page.evaluate(MISPLACED) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []


def test_messages_that_overlap_have_their_words_where_they_are_seen(tmp_path: Path) -> None:
    """Three messages that are handed over together, as over a link that is slow to answer."""
    names = [(0, f"0F{at}", 0.05 * at, 0.05 * at + 0.05) for at in range(3)]
    names += [(0, f"0SEND_F{at}", 0.05 * at + 0.05, 0.05 * at + 4.05) for at in range(3)]
    names += [(1, f"1F{at}", at + 5.0, at + 6.0) for at in range(3)]
    spans = tuple(Span(worker, parse_action(name), begin, end) for worker, name, begin, end in names)
    folder = make_run(tmp_path / "lm", stages=2)
    RunFolder(folder).write_timelines([Timeline(spans, "measured", name="lm")])
    path = tmp_path / "report.html"
    path.write_text(report_html(read_run(folder), "finished"))
    with opened(path, "light") as (page, complaints):
        assert page.evaluate(MISPLACED) == []
        words = page.locator("svg.rp-timeline g.rp-plot").last.locator("text").all_text_contents()
        assert sorted(words) == ["F0", "F1", "F2", "F2"], "forwards of worker 1, and the last message"
        assert complaints == []


def test_keys_move_from_box_to_box_zoom_and_read_charts(report: Path) -> None:
    with opened(report, "light") as (page, complaints):
        page.locator("svg.rp-timeline").focus()
        told, box = page.locator(".picked"), page.locator(".rp-plot rect.rp-F", has_text="0F3 forward").first
        before = box.bounding_box()["width"]
        found = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
            found.append(told.inner_text().split(":")[0])
        assert found[0] == found[2] == "0F0 forward"
        assert found[1] == "0F1 forward"
        assert found[3].startswith("1")
        assert found[4].startswith("0")
        page.keyboard.press("+")
        assert box.bounding_box()["width"] == pytest.approx(2 * before, rel=0.05)
        page.keyboard.press("0")
        assert box.bounding_box()["width"] == pytest.approx(before, abs=0.1)
        page.keyboard.press("Escape")
        assert told.is_hidden()
        page.locator("svg.rp-chart").first.focus()
        tip = page.locator("figure .tip").first
        for key, step in (("ArrowRight", "step 1:"), ("ArrowRight", "step 2:"), ("End", "step 200:")):
            page.keyboard.press(key)
            assert tip.inner_text().startswith(step)
        page.keyboard.press("Tab")
        assert tip.is_hidden()
        assert complaints == []
