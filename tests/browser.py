"""A headless Chromium for tests that look at a page: the system's own, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

__all__ = ["needs_chromium", "opened"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="there is no Chromium (apt-get install chromium), or no playwright (pip install playwright)",
)


@contextmanager
def opened(path: Path, scheme: Literal["dark", "light"], width: int = 1400) -> Iterator[tuple[Any, list[str]]]:
    """(page, complaints): a file in a browser whose reader prefers the theme "light" or "dark".

    Complaints are what stands in the console, errors of scripts, and everything that the page asks another place for.
    """
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 1000})
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
