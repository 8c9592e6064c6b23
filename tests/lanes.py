"""Commands of several tiers, one after the other, or in two lanes side by side.

    lane    priority   what
    here    low        all that bounds no time tightly: its output goes to the terminal as it comes
    beside  usual      what watches others' heartbeats: its output is kept, and printed whole once both lanes are done

What waits for processes to start leaves a core idle that tests which compute can use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Done", "Part", "carry_out", "environment", "seconds_of"]

ROOT = Path(__file__).resolve().parents[1]
LOW_PRIORITY = 10
RAY_LOGS = Path("/tmp/ray/session_latest/logs")
_NICE = "import os, sys; os.nice({}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that belong together.

    Attributes:
        tier: whose they are.
        commands: modules of this environment with their arguments; all are carried out, also after one has failed.
        beside: they may have a lane for themselves.
    """

    tier: str
    commands: tuple[tuple[str, ...], ...]
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """A part, the exit status of each of its commands, when it ran by the monotonic clock, and its CPU seconds.

    CPU seconds are those of the commands and of the processes that they waited for.
    """

    part: Part
    statuses: tuple[int, ...]
    begin_s: float
    end_s: float
    cpu_s: float = 0.0


def carry_out(parts: Sequence[Part], lanes: int) -> list[Done]:
    """What became of all parts, in their order.

    Args:
        lanes: 1 carries them out one after the other; 2 those that may be beside the others beside them.
    """
    beside = [part for part in parts if part.beside] if lanes > 1 else []
    here = [part for part in parts if part not in beside]
    if not beside or not here:
        return [_done(part, None, 0) for part in parts]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(lambda: [_done(part, log, 0) for part in beside])
                done = {one.part: one for one in [_done(part, None, LOW_PRIORITY) for part in here]}
                done |= {one.part: one for one in running.result()}
        finally:
            log.seek(0)
            for line in log:
                print(line, end="")
            print(flush=True)
    return [done[part] for part in parts]


def seconds_of(done: Sequence[Done]) -> float:
    """For how long at least one of these ran."""
    total_s, end_s = 0.0, float("-inf")
    for one in sorted(done, key=lambda one: one.begin_s):
        total_s += max(0.0, one.end_s - max(one.begin_s, end_s))
        end_s = max(end_s, one.end_s)
    return total_s


def environment() -> dict[str, str]:
    """This process's own, and a traceback from a process that crashes, also while it ends.

    Modules are compiled once, whatever this shell says of that: the ray tier starts hundreds of processes, and each
    would compile all of raypipe again.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**given, "PYTHONFAULTHANDLER": "1", "NO_MKDOCS_2_WARNING": "1"}


def _done(part: Part, log: IO[str] | None, nice: int) -> Done:
    begin_s = time.monotonic()
    print(f"\n=== {part.tier}", file=log, flush=True)
    ended = [_reported(command, log, nice) for command in part.commands]
    statuses, seconds = tuple(status for status, _ in ended), sum(cpu_s for _, cpu_s in ended)
    return Done(part, statuses, begin_s, time.monotonic(), seconds)


def _reported(command: tuple[str, ...], log: IO[str] | None, nice: int) -> tuple[int, float]:
    """Run a tool, a second time if it died before it wrote its junit report.

    Ray ends the process that drives it at once, without a traceback, if its raylet is lost: that is no test's failure,
    and the last lines of Ray's logs name the cause.
    """
    status, cpu_s = _tool(command, log, nice)
    # A signal (a negative status) is a crash of native code: that is a failure, and no second run may hide it.
    reports = [Path(word.partition("=")[2]) for word in command if word.startswith("--junitxml=")]
    if status != 1 or not reports or reports[0].exists():
        return status, cpu_s
    print(f"pytest died with status {status} before its report, and runs once more. Ray's logs end with:", file=log)
    for name in ("raylet.out", "gcs_server.out", "python-core-driver-*.log"):
        for path in sorted(RAY_LOGS.glob(name)):
            lines = path.read_text(errors="replace").splitlines()[-12:]
            print(f"--- {path.name}", *lines, sep="\n", file=log, flush=True)
    again, more_s = _tool(command, log, nice)
    return again, cpu_s + more_s


def _tool(command: tuple[str, ...], log: IO[str] | None, nice: int) -> tuple[int, float]:
    """Exit status and CPU seconds of a tool of this environment."""
    print(f"$ {' '.join(command[:6])}{' ...' if len(command) > 6 else ''}", file=log, flush=True)
    before = ("-c", _NICE.format(nice)) if nice else ()
    started = [sys.executable, *before, "-m", *command]
    process = subprocess.Popen(started, cwd=ROOT, env=environment(), stdout=log, stderr=log)
    try:
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime
