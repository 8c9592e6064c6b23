"""Parts of a long benchmark, kept in a folder as they end: what was cut off goes on where it was.

    FOLDER/<title>.json    what was asked, what was found, and when, under which load and at which commit

A cell that was asked for something else is measured again. ``told`` goes to the raw numbers of the record, so that
nobody takes figures of several days for those of one hour.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.lib import machine, records

__all__ = ["ONLY_KEPT", "OPTION", "KeptCells"]

OPTION: dict[str, dict[str, Any]] = {
    "--folder": {"type": Path, "default": None, "help": "where parts that have ended are kept, and not measured again"}
}
ONLY_KEPT: dict[str, dict[str, Any]] = {
    "--kept": {"action": "store_true", "help": "measure nothing: what --folder has makes the record"}
}
"""Of the command line, for ``common.arguments``."""


class KeptCells:
    """Of one run of a benchmark.

    Args:
        folder: made where it is missing; None keeps nothing. Delete it, or a file in it, to measure anew.
        only_kept: nothing is to be measured, see ``counts``.

    Raises:
        SystemExit: ``only_kept`` without a folder.
    """

    def __init__(self, folder: Path | None, *, only_kept: bool = False) -> None:
        if only_kept and folder is None:
            raise SystemExit("--kept records what is in a folder: name it with --folder.")
        self._folder, self._only_kept = folder, only_kept
        self._cells: dict[str, dict[str, Any]] = {}
        self._earlier: set[str] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def counts(self, title: str) -> bool:
        """Whether this cell is to be in the record: any, or where nothing is measured, one that is kept."""
        return not self._only_kept or (self._folder is not None and (self._folder / f"{title}.json").exists())

    def measured(self, title: str, asked: Any, measure: Callable[[], Any]) -> Any:
        """What ``measure`` finds, or has found before.

        Args:
            title: of the cell; a name of a file.
            asked: all that the outcome depends on, as far as the command line changes it.
            measure: its result goes through JSON: tuples come back as lists.
        """
        wanted = json.loads(json.dumps(asked))
        file = None if self._folder is None else self._folder / f"{title}.json"
        if file is not None and file.exists():
            cell = json.loads(file.read_text())
            if cell.get("asked") == wanted:  # an older form says nothing of it
                print(f"{title}: kept in {file}, of {cell['date']} at {cell['commit']}", flush=True)
                self._cells[title] = cell
                self._earlier.add(title)
                return cell["found"]
        if self._only_kept:
            raise SystemExit(f"--kept: {file} was measured with other arguments; measure it again, or delete it.")
        began = records.begin()
        found = json.loads(json.dumps(measure()))
        revision, dirty = machine.commit()
        cell = {
            "date": began.date, "load": {"before": began.load, "after": machine.load()}, "commit": revision,
            "dirty": dirty, "took_s": round(time.monotonic() - began.clock_s, 1), "asked": wanted, "found": found,
        }  # fmt: skip
        self._cells[title] = cell
        if file is not None:  # whole or not at all
            beside = file.with_suffix(".part")
            beside.write_text(json.dumps(cell))
            beside.replace(file)
        return found

    @property
    def told(self) -> dict[str, dict[str, Any]]:
        """When and how every cell was measured, by title."""
        return {
            title: {name: value for name, value in cell.items() if name not in ("asked", "found")}
            for title, cell in self._cells.items()
        }

    def date(self, asked: argparse.Namespace) -> None:
        """Have the record begin with the oldest cell that was kept, if any, and count what these took.

        Where nothing was measured now, it ends with the newest cell.
        """
        if not self._earlier:
            return
        earlier = [self._cells[title] for title in self._earlier]
        first = min(earlier, key=lambda cell: cell["date"])
        spent_s = sum(cell["took_s"] for cell in earlier)
        asked.began = records.Began(first["date"], asked.began.clock_s - spent_s, first["load"]["before"])
        if self._earlier == set(self._cells):
            last = max(earlier, key=lambda cell: cell["date"])
            asked.began = asked.began._replace(load_after=last["load"]["after"])
