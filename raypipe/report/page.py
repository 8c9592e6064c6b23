"""The page around the sections: one HTML file with style and script inside, and nothing loaded from anywhere."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from raypipe import __version__
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError
from raypipe.report.read import RunFacts, read_run
from raypipe.report.sections import SECTIONS, facts_of

__all__ = ["report_html", "write_report"]


def write_report(folder: Place, state: str, output: str = "") -> str:
    """Write the report of a run; returns where it is.

    Args:
        folder: of the run.
        state: as in ``report_html``.
        output: file of this machine; "" is report.html in the folder.

    Raises:
        ConfigError: there is no run, or the file cannot be written.
    """
    page = report_html(read_run(folder), state).encode()
    if not output:
        folder.write_bytes("report.html", page)
        return str(folder / "report.html")
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_bytes(page)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}. Give another file.") from error
    return output


def report_html(run: RunFacts, state: str) -> str:
    """The report.

    Args:
        state: of the run, in a word: finished, stopped, failed, running, killed.
    """
    sections = [(title, fill(run)) for title, fill in SECTIONS]
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, inside in sections if inside)
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{inside}</section>'
        for title, inside in sections
        if inside
    )
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts_of(run))
    ends = run.told("fail") if state == "failed" else []
    why = f'<p class="why">{escape(str(ends[-1].get("reason", "")))}</p>' if ends else ""
    missing = "".join(f"<li>{escape(what)}</li>" for what in run.missing)
    # The browser holds the page to what it promises: no script but ours, nothing from elsewhere.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run.name)}: raypipe report</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{_asset('page.css')}</style></head><body><header><h1>{escape(run.name)} "
        f'<span class="state {escape(state)}">{escape(state)}</span></h1><nav>{links}</nav></header>'
        f'<main>{why}<dl class="facts">{facts}</dl>'
        f"{f'<ul class=missing>{missing}</ul>' if missing else ''}{body}</main>"
        f"<footer>{escape(run.folder)}; written by raypipe {__version__}</footer>"
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _asset(name: str) -> str:
    return resources.files("raypipe.report").joinpath(name).read_text(encoding="utf-8")
