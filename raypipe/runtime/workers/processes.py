"""What the kernel says of the stages' processes on one node: stopped, idle, or how they ended.

/proc/<pid>/stat is read ten times a second. Only time in which the reader was awake itself counts: where it was
starved, two looks a second apart say nothing about what lay between them.

    state T        stopped_s grows     SIGSTOP, or a terminal's job control; a debugger's trace stop is "t"
    little time    idle_s grows        less than IDLE_SHARE of a processor, by the second, and no more in the processes
                                       that it has started: compilers, for one
    gone           Ended               signal or status from a pidfd (Linux 6.15), the OOM killer by its counter
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["LOOK_S", "Ended", "Look", "Processes"]

LOOK_S = 0.1
AWAKE_S = 3 * LOOK_S
"""Two looks further apart than this were made by a reader that was not awake all the time."""
IDLE_SHARE = 0.05
WINDOW_S = 1.0
HELPERS_S = 10.0
"""How often one looks whether what an idle process has started is at work, for which all of a node's are read."""
OOM_WINDOWS = 4
REMEMBER_S = 60.0
"""For how long one can ask how a process ended."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """A process that is there.

    Attributes:
        stopped_s: since when it is stopped; 0 where it is not.
        idle_s: since when it has used next to no processor time.
    """

    stopped_s: float
    idle_s: float


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        signal: name of the signal that ended it, "" where none did or nobody knows.
        status: that it exited with; None where a signal ended it or nobody knows.
        out_of_memory: the kernel's OOM killer ended a process of this cgroup or node in the last seconds.
        resident_bytes: that it held when it was looked at last.
        ago_s: since it was first seen gone.
    """

    signal: str
    status: int | None
    out_of_memory: bool
    resident_bytes: int
    ago_s: float


@dataclass(slots=True)
class _Process:
    pidfd: int
    oom_file: Path | None
    stopped_s: float = 0.0
    idle_s: float = 0.0
    resident_bytes: int = 0
    window_s: float = 0.0  # of the window under way, and the processor time at its begin
    window_cpu_s: float = 0.0
    helpers_cpu_s: float | None = None  # processor time of what it has started, at the last look
    helpers_at_s: float = HELPERS_S  # idle, until the next look
    ooms: deque[int] = field(default_factory=lambda: deque(maxlen=OOM_WINDOWS))
    gone_s: float | None = None
    out_of_memory: bool = False


class Processes:
    """Looks at the processes of one node, by process id; ``sample`` is called ten times a second."""

    def __init__(self) -> None:
        self._known: dict[int, _Process] = {}
        self._last_s: float | None = None

    def watch(self, pid: int) -> bool:
        """Look at this process from now on; False where it cannot be seen: gone, or in another namespace."""
        if pid in self._known:
            return True
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # AttributeError: not Linux
            return False
        found = self._known[pid] = _Process(pidfd, _oom_file(pid))
        found.ooms.append(_oom_kills(found.oom_file))
        return True

    def __contains__(self, pid: int) -> bool:
        return pid in self._known

    def forget(self, pid: int) -> None:
        """Look at it no more."""
        found = self._known.pop(pid, None)
        if found is not None:
            os.close(found.pidfd)

    def close(self) -> None:
        for pid in list(self._known):
            self.forget(pid)

    def sample(self, now_s: float) -> None:
        """Look at all of them once."""
        awake_s = 0.0 if self._last_s is None else min(now_s - self._last_s, AWAKE_S)
        self._last_s = now_s
        for pid, process in list(self._known.items()):
            if process.gone_s is None:
                _look(pid, process, awake_s, now_s)
            elif now_s - process.gone_s > REMEMBER_S:
                self.forget(pid)
        idle = {pid: p for pid, p in self._known.items() if p.gone_s is None and p.idle_s >= p.helpers_at_s}
        if idle:
            everybody = _everybody()
            for pid, process in idle.items():
                _look_at_helpers(process, _helpers_cpu_s(pid, everybody))

    def looks(self) -> dict[int, Look]:
        """Of those that are there."""
        return {
            pid: Look(process.stopped_s, process.idle_s)
            for pid, process in self._known.items()
            if process.gone_s is None
        }

    def ended(self, pid: int, now_s: float) -> Ended | None:
        """How a process ended; None where it is there, or was never seen."""
        process = self._known.get(pid)
        if process is None:
            return None
        if process.gone_s is None:
            _look(pid, process, 0.0, now_s)
        return None if process.gone_s is None else _ended(process, now_s - process.gone_s)

    def end(self, pid: int) -> None:
        """SIGKILL, which ends a stopped process too; to exactly the process that was looked at."""
        process = self._known.get(pid)
        if process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)


def _look(pid: int, process: _Process, awake_s: float, now_s: float) -> None:
    # A pidfd becomes readable when its process ends, also where the number has been given to another one since.
    if select.select([process.pidfd], [], [], 0)[0]:
        process.gone_s = now_s
        process.out_of_memory = bool(process.ooms) and _oom_kills(process.oom_file) > process.ooms[0]
        return
    read = _read(pid)
    if read is None:
        return
    state, cpu_s, process.resident_bytes = read
    process.stopped_s = process.stopped_s + awake_s if state == "T" else 0.0
    process.window_s += awake_s
    if process.window_s >= WINDOW_S:
        used_s = cpu_s - process.window_cpu_s
        process.idle_s += process.window_s
        if used_s >= IDLE_SHARE * process.window_s:
            process.idle_s, process.helpers_cpu_s, process.helpers_at_s = 0.0, None, HELPERS_S
        process.window_s, process.window_cpu_s = 0.0, cpu_s
        process.ooms.append(_oom_kills(process.oom_file))


def _look_at_helpers(process: _Process, cpu_s: float) -> None:
    if process.helpers_cpu_s is not None and cpu_s - process.helpers_cpu_s >= IDLE_SHARE * HELPERS_S:
        process.idle_s = 0.0
    process.helpers_cpu_s, process.helpers_at_s = cpu_s, process.idle_s + HELPERS_S


def _read(pid: int) -> tuple[str, float, int] | None:
    """State, processor seconds and resident bytes of a process; None where there is none."""
    fields = _fields(pid)
    if fields is None:
        return None
    return fields[0], _seconds(fields[11:13]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _fields(pid: int | str) -> list[str] | None:
    """Of a process's stat, from its state on; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name, in parentheses, may hold blanks and parentheses


def _seconds(ticks: Iterable[str]) -> float:
    return sum(map(int, ticks)) / _TICKS


def _everybody() -> dict[int, dict[int, list[str]]]:
    """The fields of all processes, by parent and process."""
    found: dict[int, dict[int, list[str]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (fields := _fields(entry.name)) is not None:
            found.setdefault(int(fields[1]), {})[int(entry.name)] = fields
    return found


def _helpers_cpu_s(pid: int, everybody: Mapping[int, Mapping[int, Sequence[str]]]) -> float:
    """Processor time of what a process has started and of what those have, ended ones included."""
    own = _fields(pid)
    total = 0.0 if own is None else _seconds(own[13:15])  # of children that it has waited for
    looked_at = [pid]
    for parent in looked_at:
        for child, fields in everybody.get(parent, {}).items():
            total += _seconds(fields[11:15])
            looked_at.append(child)
    return total


# struct pidfd_info of linux/pidfd.h: mask, cgroup id, eleven ids of process and users, exit code.
_INFO = struct.Struct("QQ11Ii")
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3


def _ended(process: _Process, ago_s: float) -> Ended:
    code = _wait_status(process.pidfd)
    name, status = "", None
    if code is not None and os.WIFSIGNALED(code):
        name = signal.Signals(os.WTERMSIG(code)).name
    elif code is not None:
        status = os.waitstatus_to_exitcode(code)
    killed = process.out_of_memory and status is None and name in ("", "SIGKILL")
    return Ended(name, status, killed, process.resident_bytes, ago_s)


def _wait_status(pidfd: int) -> int | None:
    """What a parent's wait() would have told; None before Linux 6.15, or where the process has not been reaped."""
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(info)
    return code if mask & _INFO_EXIT else None


def _oom_file(pid: int) -> Path | None:
    """Where the kernel counts what its OOM killer ended in the cgroup of a process, or on the whole host."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
            elif not controllers:
                found.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
    found.append(Path("/proc/vmstat"))
    return next((path for path in found if path.is_file()), None)


def _oom_kills(path: Path | None) -> int:
    if path is not None:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
