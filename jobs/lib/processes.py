"""Processes that a benchmark starts, of which none is left behind. Loads neither torch nor Ray."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["end_with_parent", "in_child", "run_processes"]


END_S = 60.0
"""How long a process may take to end what it has started: clusters of several nodes, a run."""


def run_processes(processes: Sequence[Any], limit_s: float, end_s: float = 0.0) -> None:
    """Start processes of multiprocessing and wait until all have ended; none is left, whatever happens.

    Args:
        end_s: what the rest of them get to end what they have started, after SIGINT.

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
                if end_s and process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
                    process.join(end_s)
                process.kill()
                process.join(10)


def in_child(work: Callable[..., None], *arguments: Any, limit_s: float) -> Any:
    """What ``work(*arguments, file)`` writes into its file as JSON, in a process of its own.

    Raises:
        RuntimeError: it failed, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        file = Path(folder) / "found.json"
        child = multiprocessing.get_context("spawn").Process(target=_in_session, args=(work, *arguments, str(file)))
        run_processes([child], limit_s, END_S)
        return json.loads(file.read_text())


def _in_session(work: Callable[..., None], *arguments: Any) -> None:
    """Ctrl-C reaches the parent alone, which tells this process once: a second one would end its ending."""
    os.setsid()
    work(*arguments)


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
