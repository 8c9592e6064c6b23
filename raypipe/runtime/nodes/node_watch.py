"""Watcher of the stages on one node: reads the states of their processes from the kernel, and the cloud's notices.

LocalNodeWatch     the driver's own node: reads process states in the driver's process, on request
RemoteNodeWatch    another node: requests states from an actor on it, one request at a time; the actor requests no
                   resources of Ray, and reads states ten times a second

Three states are read from the kernel:

    stopped    state T                    stopped_s grows   by SIGSTOP, or a terminal's job control; a debugger's stop
                                                            is state t, which does not count
    idle       almost no processor time   idle_s grows      the process and its descendants, such as compilers, use less
                                                            than IDLE_SHARE of a processor
    ended      the pidfd is readable      Ended             signal or status from the pidfd (Linux 6.15); out of memory
                                                            if the kernel has counted an OOM kill

The first two come from /proc/<pid>/stat. Only time in which the reader itself was awake counts. If the reader was
starved, two readings a second apart do not show what happened in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.runtime.nodes.preemption import Announced, Notice

LOOK_S = 0.1
AWAKE_S = 3 * LOOK_S
"""Longest time in seconds that counts between two readings; if they are further apart, the reader was starved."""
IDLE_SHARE = 0.05
WINDOW_S = 1.0
HELPERS_S = 10.0
"""Interval at which the descendants of an idle process are checked; each check reads all processes of the node."""
OOM_WINDOWS = 4
REMEMBER_S = 60.0
"""Seconds after the end of a process in which ``ended`` still describes it."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """State of a running process.

    Attributes:
        stopped_s: seconds for which the process has been stopped; 0 if it is not stopped.
        idle_s: seconds for which the process and its descendants have used almost no processor time.
    """

    stopped_s: float
    idle_s: float


class Ended(NamedTuple):
    """End of a process.

    Attributes:
        signal: name of the signal that ended the process; "" if the process exited by itself, or if unknown.
        status: exit status; None if a signal ended the process, or if unknown.
        out_of_memory: True if the kernel's OOM killer killed any process of the same cgroup (or node) in the last
            seconds before, and signal and status do not contradict it.
        resident_bytes: resident memory of the process at the last reading.
        ago_s: seconds since the end was noticed.
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
    helpers_cpu_s: float | None = None  # processor time of its child processes, at the last check
    helpers_at_s: float = HELPERS_S  # idle time at which they are checked next
    ooms: deque[int] = field(default_factory=lambda: deque(maxlen=OOM_WINDOWS))
    gone_s: float | None = None
    out_of_memory: bool = False


class Processes:
    """Watched processes of one node, by process id; ``sample`` has to be called ten times a second."""

    def __init__(self) -> None:
        self._known: dict[int, _Process] = {}
        self._last_s: float | None = None

    def watch(self, pid: int) -> bool:
        """Watch this process from now on.

        Returns:
            False if the process cannot be watched: it has ended, is in another namespace, or this is not Linux.
        """
        if pid in self._known:
            return True
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # AttributeError: not Linux
            return False
        process = self._known[pid] = _Process(pidfd, _oom_file(pid))
        process.ooms.append(_oom_kills(process.oom_file))
        return True

    def __contains__(self, pid: int) -> bool:
        return pid in self._known

    def forget(self, pid: int) -> None:
        """Stop watching a process."""
        process = self._known.pop(pid, None)
        if process is not None:
            os.close(process.pidfd)

    def close(self) -> None:
        for pid in list(self._known):
            self.forget(pid)

    def sample(self, now_s: float) -> None:
        """Read the states of all watched processes once; forget processes that ended more than REMEMBER_S ago.

        Args:
            now_s: ``time.monotonic()`` of the caller.
        """
        awake_s = 0.0 if self._last_s is None else min(now_s - self._last_s, AWAKE_S)
        self._last_s = now_s
        for pid, process in list(self._known.items()):
            if process.gone_s is None:
                _look(pid, process, awake_s, now_s)
            elif now_s - process.gone_s > REMEMBER_S:
                self.forget(pid)
        idle = {pid: p for pid, p in self._known.items() if p.gone_s is None and p.idle_s >= p.helpers_at_s}
        if idle:
            stats = _stats_by_parent()
            for pid, process in idle.items():
                _look_at_helpers(process, _helpers_cpu_s(pid, stats))

    def looks(self) -> dict[int, Look]:
        """Return the states of the watched processes that are running, by process id."""
        return {
            pid: Look(process.stopped_s, process.idle_s)
            for pid, process in self._known.items()
            if process.gone_s is None
        }

    def ended(self, pid: int, now_s: float) -> Ended | None:
        """Return how a process ended; None if it is running or not watched. ``now_s`` is ``time.monotonic()`` now."""
        process = self._known.get(pid)
        if process is None:
            return None
        if process.gone_s is None:
            _look(pid, process, 0.0, now_s)
        return None if process.gone_s is None else _ended(process, now_s - process.gone_s)

    def end(self, pid: int) -> None:
        """Send SIGKILL to a watched process, even if it is stopped, but never to a later process with the same id."""
        process = self._known.get(pid)
        if process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)


def _look(pid: int, process: _Process, awake_s: float, now_s: float) -> None:
    # A pidfd becomes readable when its process ends, even if its id has been reused since.
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
    """Read (state, processor seconds, resident bytes) of a process; None if there is no such process."""
    fields = _fields(pid)
    if fields is None:
        return None
    return fields[0], _seconds(fields[11:13]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _fields(pid: int | str) -> list[str] | None:
    """Read the fields of /proc/<pid>/stat, beginning with the process's state; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name, in parentheses, may hold blanks and parentheses


def _seconds(ticks: Iterable[str]) -> float:
    return sum(map(int, ticks)) / _TICKS


def _stats_by_parent() -> dict[int, dict[int, list[str]]]:
    """Read the fields (see ``_fields``) of all processes on this node: {parent's process id: {process id: fields}}."""
    by_parent: dict[int, dict[int, list[str]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (fields := _fields(entry.name)) is not None:
            by_parent.setdefault(int(fields[1]), {})[int(entry.name)] = fields
    return by_parent


def _helpers_cpu_s(pid: int, stats: Mapping[int, Mapping[int, Sequence[str]]]) -> float:
    """Return the processor seconds of a process's descendants, including ended ones.

    Args:
        stats: result of ``_stats_by_parent``.
    """
    own = _fields(pid)
    total = 0.0 if own is None else _seconds(own[13:15])  # of children that it has waited for
    looked_at = [pid]
    for parent in looked_at:
        for child, fields in stats.get(parent, {}).items():
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
    """Return the wait status of an ended process; None before Linux 6.15, or until its parent has reaped it."""
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(info)
    return code if mask & _INFO_EXIT else None


def _oom_file(pid: int) -> Path | None:
    """Find the file in which the kernel counts OOM kills: of the process's cgroup, or else of the whole host."""
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
            elif not controllers:
                files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
    files.append(Path("/proc/vmstat"))
    return next((path for path in files if path.is_file()), None)


def _oom_kills(path: Path | None) -> int:
    if path is not None:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


ANSWER_S = 3.0
"""Age in seconds from which the last answer of a remote watcher is not used any more."""
ENDED_S = 1.0
"""Seconds to wait until the kernel reports how a process ended."""
AGAIN_S = 10.0


class LocalNodeWatch:
    """Watcher of this process's own node."""

    def __init__(self) -> None:
        self._processes = Processes()
        self._announced = Announced()
        self.looks: Mapping[int, Look] = {}

    @property
    def announced(self) -> tuple[Notice, ...]:
        """Newest notices of the machine's cloud, such as a preemption, in order of arrival."""
        return self._announced.notices

    def ask(self, pids: Sequence[int], now_s: float, awake_s: float) -> None:
        """Watch these processes from now on, and read the states of all watched processes into ``looks``.

        Args:
            now_s: ``time.monotonic()`` of the caller.
            awake_s: has no effect; see RemoteNodeWatch.
        """
        for pid in pids:
            self._processes.watch(pid)
        self._processes.sample(now_s)
        self.looks = self._processes.looks()

    def ended(self, pid: int) -> Ended | None:
        """Return how a process ended, after a wait of up to ENDED_S; None if it is running or not watched."""
        return _wait_ended(self._processes, pid, ENDED_S)

    def end(self, pid: int) -> None:
        self._processes.end(pid)

    def close(self) -> None:
        self._announced.close()
        self._processes.close()


class RemoteNodeWatch:
    """Watcher of another node, through an actor on it.

    Args:
        node: Ray's id of the node.

    Attributes:
        announced: notices of the machine's cloud in the last answer of the actor.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._actor = _start(node)
        self._request: Any = None
        self._looks: Mapping[int, Look] = {}
        self.announced: tuple[Notice, ...] = ()
        self._silent_s = 0.0
        self._begun_s = time.monotonic()

    @property
    def looks(self) -> Mapping[int, Look]:
        """States of running processes in the last answer; empty if that answer is older than ANSWER_S."""
        return self._looks if self._silent_s < ANSWER_S else {}

    def ask(self, pids: Sequence[int], now_s: float, awake_s: float) -> None:
        """Store the actor's answer, if it has come; request the states of these processes, unless a request is open.

        Args:
            now_s: ``time.monotonic()`` of the caller.
            awake_s: seconds in which the caller was awake since its last call; only these count for ANSWER_S.
        """
        self._silent_s += awake_s
        if self._request is not None and ray.wait([self._request], timeout=0)[0]:
            request, self._request = self._request, None
            try:
                self._looks, self.announced = ray.get(request)
                self._silent_s = 0.0
            except ActorDiedError:
                if now_s - self._begun_s > AGAIN_S:
                    self._actor, self._begun_s = _start(self._node), now_s
            except RayError:  # it cannot be reached at the moment
                pass
        if self._request is None:
            self._request = self._actor.read.remote(list(pids))

    def ended(self, pid: int) -> Ended | None:
        try:
            ended: Ended | None = ray.get(self._actor.ended.remote(pid), timeout=ENDED_S * 2)
        except RayError:
            return None
        return ended

    def end(self, pid: int) -> None:
        self._actor.end.remote(pid)

    def close(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)


def watcher_of(node: str) -> LocalNodeWatch | RemoteNodeWatch:
    """Create the watcher of the node with this Ray id: local for this process's node, else remote."""
    return LocalNodeWatch() if node == ray.get_runtime_context().get_node_id() else RemoteNodeWatch(node)


class _NodeWatch:
    """Actor of RemoteNodeWatch. Its own thread reads process states, independently of requests."""

    def __init__(self) -> None:
        self._processes, self._announced = Processes(), Announced()
        threading.Thread(target=self._run, name="raypipe node watch", daemon=True).start()

    def read(self, pids: Sequence[int]) -> tuple[dict[int, Look], tuple[Notice, ...]]:
        """Watch these processes from now on; return (states of all watched processes, notices of the cloud)."""
        for pid in pids:
            self._processes.watch(pid)
        return self._processes.looks(), self._announced.notices

    def ended(self, pid: int) -> Ended | None:
        """Return how a process ended; see LocalNodeWatch."""
        return _wait_ended(self._processes, pid, ENDED_S)

    def end(self, pid: int) -> None:
        self._processes.end(pid)

    def _run(self) -> None:
        while True:
            self._processes.sample(time.monotonic())
            time.sleep(LOOK_S)


def _wait_ended(processes: Processes, pid: int, wait_s: float) -> Ended | None:
    """Wait until the kernel reports how a process ended, which it does once the parent, Ray's raylet, has reaped it.

    Args:
        wait_s: timeout in seconds. On timeout, what is known about the end is returned; None if the process is running.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        ended = processes.ended(pid, time.monotonic())
        known = ended is not None and (ended.signal or ended.status is not None)
        if known or pid not in processes or time.monotonic() > deadline_s:
            return ended
        time.sleep(0.01)


def _start(node: str) -> Any:
    return (
        ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(_NodeWatch)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
    )
