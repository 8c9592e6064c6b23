"""Processes of a benchmark, with cleanup that leaves none behind. Loads neither torch nor Ray."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["in_child", "run_processes"]


END_S = 60.0
"""Seconds that a process may take to end what it has started: clusters of several nodes, a run."""


def run_processes(processes: Sequence[Any], limit_s: float, end_s: float = 0.0) -> None:
    """Start processes of multiprocessing and wait until all have ended; on an error all are killed.

    Args:
        limit_s: seconds to wait for each process.
        end_s: seconds between SIGINT and SIGKILL for processes that still run after an error; 0 to kill at once.

    Raises:
        RuntimeError: a process failed, or took longer than ``limit_s``.
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
                if end_s and process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
                    process.join(end_s)
                process.kill()
                process.join(10)


def in_child(work: Callable[..., None], *arguments: Any, limit_s: float) -> Any:
    """Call ``work(*arguments, file)`` in a new process, and return the JSON that it writes into the file.

    Raises:
        RuntimeError: the process failed, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        file = Path(folder) / "found.json"
        child = multiprocessing.get_context("spawn").Process(target=_in_session, args=(work, *arguments, str(file)))
        run_processes([child], limit_s, END_S)
        return json.loads(file.read_text())


def _in_session(work: Callable[..., None], *arguments: Any) -> None:
    """Run in a new session: the parent alone gets Ctrl-C and signals this process once; twice would stop its
    cleanup.
    """
    os.setsid()
    work(*arguments)
