"""The report in a browser: both themes, an empty console, clicks and zooms, and no words over each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.report.page import report_html
from raypipe.report.read import read_run
from tests.browser import needs_chromium, opened
from tests.report.run_folder import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_chromium]

OVERLAPS = """() => [...document.querySelectorAll('svg.rp')].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
  const out = words.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1
    || b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => `cut off: ${t}`);
  for (let i = 0; i < words.length; i++) for (let j = i + 1; j < words.length; j++) {
    const [a, b] = [words[i][1], words[j][1]];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) out.push(`${words[i][0]} over ${words[j][0]}`);
  }
  return out;
})"""
"""Words of a picture that leave it, or that lie over each other."""


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
        assert page.evaluate(OVERLAPS) == []
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
        assert page.evaluate(OVERLAPS) == []
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


def test_a_narrow_window_has_it_whole(report: Path) -> None:
    with opened(report, "dark", width=480) as (page, complaints):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []
