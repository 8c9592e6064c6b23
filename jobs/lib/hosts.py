"""Emulated hosts that can be lost: network namespaces with a raylet each, and wires between them that can be cut.

    host 0            the head: Ray's GCS, without CPUs for a stage; this process is there while the context lasts
    hosts 1, 2, ...   a raylet each, with places for stages; killed, emptied and started again

    with hosts(3) as lab:
        lab.kill_raylet(1)          Ray's processes there end by themselves, and Ray reports it after seconds
        lab.clear(1)                the machine is gone: kill its remaining processes
        lab.start(1)                another machine at the same address
        lab.cut(1, 2); lab.heal(1, 2, reset=True)

It needs root and iproute2, as the networks of tests/lab do. All of it is removed afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.network import ROOT, Network, missing, network
from tests.processes import outlive
from tests.runtime.raylets import RAY, TOKEN, Home, private_cluster

__all__ = ["HEALTH", "Hosts", "hosts", "missing"]

START_TIMEOUT_S = 300.0
GONE_S = 15.0
# As recommended for spot machines (docs/cluster.md): a dead node is known after about five seconds.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
_NEWNET = 0x40000000


class Hosts:
    """Hosts that ``hosts`` yields."""

    def __init__(self, lab: Network, home: Home, cpus: int) -> None:
        self._lab, self._home, self._cpus = lab, home, cpus
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}  # what runs `ray start --block`, by host
        self._starts = 0

    @property
    def workers(self) -> range:
        """Hosts that can be lost."""
        return range(1, len(self._lab.names))

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return self._home.address

    def host_at(self, address: str) -> int:
        """Return the number of the host that has this address."""
        return self._lab.addresses.index(address)

    def build(self) -> None:
        """Start the head, and then all others at once."""
        self.start(0)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, self.workers))

    def start(self, host: int) -> None:
        """Start the raylet of a host, and wait until it runs.

        Raises:
            RuntimeError: it did not start within START_TIMEOUT_S.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._runs(host):
            self.clear(host)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"The raylet of host {host} did not start within {START_TIMEOUT_S:g} s.")

    def kill_raylet(self, host: int) -> None:
        """Send SIGKILL to the raylet; the other processes of that host have to detect it."""
        for pid in self.processes(host, rb"/raylet/raylet "):
            os.kill(pid, signal.SIGKILL)

    def clear(self, host: int) -> int:
        """Kill all processes on a host, except this one; return their number."""
        left = self.processes(host, rb"")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outlive(dict.fromkeys(left, ""), GONE_S)
        if (process := self._raylets.pop(host, None)) is not None:
            process.kill()
            process.wait()
        return len(left)

    def processes(self, host: int, pattern: bytes) -> list[int]:
        """List processes on a host, except this one, whose command line matches."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._lab.names[host]], capture_output=True, text=True, timeout=60, check=False
        )
        return [pid for pid in map(int, found.stdout.split()) if pid != os.getpid() and _matches(pid, pattern)]

    def cut(self, a: int, b: int) -> None:
        """Drop everything between two hosts, silently."""
        self._lab.cut(a, b)

    def heal(self, a: int, b: int, *, reset: bool) -> None:
        """Undo ``cut``; with ``reset`` open connections are lost, as after a router that forgot them."""
        if reset:
            for host, other in ((a, b), (b, a)):
                command = [*self._lab.prefix(host), "ss", "-K", "dst", self._lab.addresses[other]]
                subprocess.run(command, capture_output=True, timeout=60, check=False)
        self._lab.heal(a, b)

    @contextlib.contextmanager
    def saturated(self, a: int, b: int, mbit: float) -> Iterator[None]:
        """Limit the wire to this rate, and saturate it with one flow each way."""
        self._lab.rate(a, b, mbit)
        try:
            with self._lab.competing(a, b), self._lab.competing(b, a):
                yield
        finally:
            self._lab.rate(a, b, None)

    def close(self) -> None:
        """End all raylets."""
        for host in reversed(range(len(self._lab.names))):
            self.clear(host)

    def _runs(self, host: int) -> bool:
        """Start one host; False if Ray's wait for it timed out, as after 30 s on a busy machine."""
        where = ["--head", f"--port={self._home.port}", "--include-dashboard=false", "--num-cpus=0"]
        if host:
            where = [f"--address={self.address}", f"--num-cpus={self._cpus}"]
        command = [
            *self._lab.prefix(host), RAY, "start", "--block", *where, f"--node-ip-address={self._lab.addresses[host]}",
            "--disable-usage-stats", "--object-store-memory=80000000", f"--temp-dir={self._home.folder}",
        ]  # fmt: skip
        self._starts += 1
        log = self._home.folder / f"start-{self._starts}.log"
        environment = {**os.environ, **TOKEN, **HEALTH, "PYTHONPATH": str(ROOT)}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
        self._raylets[host] = process
        while b"will now block forever" not in log.read_bytes():
            if process.poll() is not None:
                return False
            time.sleep(0.05)
        return True


@contextlib.contextmanager
def hosts(count: int, cpus: int = 1) -> Iterator[Hosts]:
    """Start a head and ``count`` other hosts.

    Raises:
        RuntimeError: no network can be made here, with the reason.
    """
    if reason := missing():
        raise RuntimeError(f"This needs network namespaces: {reason}")
    with network(count + 1) as lab, private_cluster(lab.addresses[0]) as home:
        made = Hosts(lab, home, cpus)
        try:
            with _inside(lab.names[0]):
                made.build()
                yield made
        finally:
            made.close()


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Enter a network namespace with this thread, and with the threads and processes that it starts."""
    with Path("/proc/self/ns/net").open() as before, Path(f"/var/run/netns/{name}").open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _matches(pid: int, pattern: bytes) -> bool:
    try:
        return re.search(pattern, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")) is not None
    except OSError:
        return False
