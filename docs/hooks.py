"""What mkdocs does not do by itself for this site.

metrics.md         has the table of raypipe.metrics in it
index.md           is the repository's README: what it says stands nowhere else
nav: "design/"     all pages of that folder, in the order of their names
links that leave   docs/ become the file's path as text, for the site holds docs/ only; the file has to exist
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError

from raypipe.metrics import METRICS, exported_name

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s:]*)(?P<anchor>#[^)]*)?\)")
WIDE = ("compare.md", "zoo.md")
"""Pages whose tables take the room of the table of contents."""
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    config.nav = [_expanded(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def on_page_read_source(page: Any, config: Any) -> str | None:
    if page.file.src_uri == "index.md":
        return (Path(config.docs_dir).parent / "README.md").read_text("utf-8")
    return None


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    docs = Path(config.docs_dir)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    markdown = markdown.replace("<!-- raypipe.metrics.METRICS -->", _metrics())
    source = docs.parent / "README.md" if page.file.src_uri == "index.md" else docs / page.file.src_uri
    parts = FENCE.split(markdown)  # every second part is a fenced block, in which nothing is a link
    parts[::2] = [LINK.sub(lambda found: _link(found, source, docs), part) for part in parts[::2]]
    return "".join(parts)


def _metrics() -> str:
    lines = ["| metric | unit | labels | meaning |", "|---|---|---|---|"]
    for found in METRICS:
        unit = "" if found.unit == "1" else found.unit
        lines.append(f"| `{exported_name(found)}` | {unit} | {', '.join(found.tags)} | {found.meaning} |")
    return "\n".join(lines)


def _expanded(entry: Any, docs: Path) -> Any:
    """An entry of the menu, with a folder's pages for its name."""
    if isinstance(entry, str):
        return entry
    ((title, below),) = entry.items()
    if isinstance(below, list):
        return {title: [_expanded(one, docs) for one in below]}
    if below.endswith("/"):
        return {title: sorted(path.relative_to(docs).as_posix() for path in (docs / below).glob("*.md"))}
    return entry


def _link(found: re.Match[str], source: Path, docs: Path) -> str:
    """A link as the site needs it: pages by their place below docs/, other files as their path."""
    target, anchor = found["target"], found["anchor"] or ""
    if not target:
        return found[0]
    path = (source.parent / target).resolve()
    if not path.exists():
        raise PluginError(f"{source}: {target} does not exist")
    if path.is_file() and path.is_relative_to(docs):
        here = source if source.is_relative_to(docs) else docs / "index.md"
        return f"[{found['text']}]({_relative(path, here.parent)}{anchor})"
    inside = path.relative_to(docs.parent).as_posix()
    return f"`{inside}`" if found["text"].strip("`") in (inside, target) else f"{found['text']} (`{inside}`)"


def _relative(path: Path, folder: Path) -> str:
    up = 0
    while not path.is_relative_to(folder):
        folder, up = folder.parent, up + 1
    return str(PurePosixPath(*[".."] * up, path.relative_to(folder).as_posix()))
