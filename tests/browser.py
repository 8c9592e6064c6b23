"""A headless Chromium for tests that look at a page: the system's own, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

__all__ = ["MISPLACED", "SMALL", "Scheme", "needs_chromium", "opened"]

Scheme: TypeAlias = Literal["dark", "light"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
MISPLACED = """() => [...document.querySelectorAll('svg.rp')].flatMap((svg) => {
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
SMALL = """(least) => [...document.querySelectorAll('svg.rp')].flatMap((svg) => {
  const height = (t) => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a;
  const words = [...svg.querySelectorAll('text')].map((t) => [height(t), t]);
  const small = words.filter(([px]) => px < least).sort(([a], [b]) => a - b);
  return small.slice(0, 1).map(([px, t]) => `letters of ${px.toFixed(1)} pixels: ${t.textContent}`);
})"""
"""The smallest words of each picture that has some smaller than so many pixels."""
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="there is no Chromium (apt-get install chromium), or no playwright (pip install playwright)",
)


@contextmanager
def opened(path: Path, scheme: Scheme, width: int = 1400, scale: float = 1.0) -> Iterator[tuple[Any, list[str]]]:
    """(page, complaints): a file in a browser whose reader prefers the theme "light" or "dark".

    Args:
        width: of the window, in pixels of the page.
        scale: pixels of a screenshot for one of the page.

    Complaints are what stands in the console, errors of scripts, and everything that the page asks another place for.
    """
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            page = browser.new_page(
                color_scheme=scheme, viewport={"width": width, "height": 1000}, device_scale_factor=scale
            )
            page.set_default_timeout(30_000)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: complaints.extend([] if _own(request.url) else [request.url]))
            page.goto(path.as_uri())
            yield page, complaints
        finally:
            browser.close()


def _own(url: str) -> bool:
    return url.startswith(("file:", "data:"))
