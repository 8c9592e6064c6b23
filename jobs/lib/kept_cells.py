"""Cells (independent parts) of a long benchmark, saved in a folder as they end, so that an interrupted run can resume.

    FOLDER/<title>.json    settings, result, date, load and commit

A cell that was saved with other settings is measured again. ``KeptCells.kept`` belongs into the raw numbers of the
record, to show when each cell was measured.
"""

from __future__ import annotations

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
"""Options of the command line, for ``Bench``."""


class KeptCells:
    """Cells of one run of a benchmark.

    Args:
        folder: folder of the saved cells, created if missing; None saves nothing. Delete it, or a file in it, to
            measure again.
        only_kept: True to measure nothing, and to use saved cells only.

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
        """Return True if this cell belongs into the record: with ``only_kept`` if it is saved, else always."""
        return not self._only_kept or (self._folder is not None and (self._folder / f"{title}.json").exists())

    def measured(self, title: str, options: Any, measure: Callable[[], Any]) -> Any:
        """Return the saved result of a cell, or call ``measure`` and save its result.

        Args:
            title: title of the cell, which must be a file name.
            options: settings of the command line on which the result depends.
            measure: function that measures the cell; its result is converted to JSON and back, so tuples become lists.

        Raises:
            SystemExit: ``only_kept``, and the cell was saved with other settings.
        """
        wanted = json.loads(json.dumps(options))
        file = None if self._folder is None else self._folder / f"{title}.json"
        if file is not None and file.exists():
            cell = json.loads(file.read_text())
            if cell.get("options") == wanted:  # missing in an older format
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
            "dirty": dirty, "took_s": round(time.monotonic() - began.clock_s, 1), "options": wanted, "found": found,
        }  # fmt: skip
        self._cells[title] = cell
        if file is not None:  # whole or not at all
            beside = file.with_suffix(".part")
            beside.write_text(json.dumps(cell))
            beside.replace(file)
        return found

    @property
    def kept(self) -> dict[str, dict[str, Any]]:
        """Date and load of every cell, by title."""
        return {
            title: {name: value for name, value in cell.items() if name not in ("options", "found")}
            for title, cell in self._cells.items()
        }

    def date(self, run: Any) -> None:
        """Change the begin of a BenchRun in place, if saved cells were used.

        The run then begins at the oldest saved cell, and its duration includes the seconds of all saved cells. If no
        cell was measured now, its load at the end is that of the newest cell.
        """
        if not self._earlier:
            return
        earlier = [self._cells[title] for title in self._earlier]
        first = min(earlier, key=lambda cell: cell["date"])
        spent_s = sum(cell["took_s"] for cell in earlier)
        run.began = records.Began(first["date"], run.began.clock_s - spent_s, first["load"]["before"])
        if self._earlier == set(self._cells):
            last = max(earlier, key=lambda cell: cell["date"])
            run.began = run.began._replace(load_after=last["load"]["after"])
