"""Processes that a test session started, found through /proc, so that none outlives it.

The session becomes the reaper of its orphans: a child whose parent dies (raylets of a killed driver)
then belongs to the session instead of to init, and "descendants of this process" misses nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["adopt_orphans", "alive", "descendants", "end", "outlive", "said_last", "survivors"]

_PR_SET_CHILD_SUBREAPER = 36
# The standard library's own helper: it lives as long as its parent, by design.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own (Linux only)."""
    if Path("/proc/self/stat").exists():
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> dict[int, str]:
    """Command line by process id of everything below ``root`` that still runs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, so fields count from the last parenthesis.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: dict[int, str] = {}
    waiting = list(children.get(root, []))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(helper in command for helper in _HELPERS):
            found[pid] = command
    return found


def survivors(root: int, known: set[int], patience_s: float) -> dict[int, str]:
    """Descendants beyond the known ones that do not end by themselves within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        left = {pid: command for pid, command in descendants(root).items() if pid not in known}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def outlive(found: dict[int, str], patience_s: float) -> dict[int, str]:
    """Those of these processes that are still there after ``patience_s``; returns when none is."""
    deadline_s, left = time.monotonic() + patience_s, {}
    for pid, command in found.items():
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                left[pid] = command
        finally:
            os.close(handle)
    return left


def alive(pid: int) -> bool:
    """Whether this process runs: one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end(pids: dict[int, str]) -> None:
    """Kill exactly these processes."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def said_last(output: str) -> Any:
    """The JSON object that a script printed last; Ray's own processes may print lines of theirs behind it."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
