"""Processes that a benchmark starts, of which none is left behind. Loads neither torch nor Ray."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["end_with_parent", "in_child", "run_processes"]


def run_processes(processes: Sequence[Any], limit_s: float) -> None:
    """Start processes of multiprocessing and wait until all have ended; none is left, whatever happens.

    Raises:
        RuntimeError: one failed, or took longer than ``limit_s``.
    """
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(limit_s)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"the processes ended with {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


def in_child(work: Callable[..., None], *arguments: Any, limit_s: float) -> Any:
    """What ``work(*arguments, file)`` writes into its file as JSON, in a process of its own.

    Raises:
        RuntimeError: it failed, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        file = Path(folder) / "found.json"
        child = multiprocessing.get_context("spawn").Process(target=work, args=(*arguments, str(file)))
        run_processes([child], limit_s)
        return json.loads(file.read_text())


def end_with_parent() -> None:
    """For the initializer of a pool's processes: without it they wait for ever when their parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def wait() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
