"""Clusters for tests that need real ones: raylets of our own on loopback or in network namespaces, and their end.

with private_cluster() as home:                    a folder of its own, a port of its own, nothing shared
    home.start()                                   the head
    home.start(PYTHONPATH="stub")                  a second node
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import processes

__all__ = ["PATIENCE", "RAY", "TOKEN", "Home", "free_port", "private_cluster"]

RAY = str(Path(sys.executable).parent / "ray")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
"""For the environment of clusters that live as long as one test, in namespaces or on loopback."""
PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
}
"""For the environment of every process where many nodes start on one machine. A node needs longer then than Ray waits,
and ends where one of its agents is late; the head is so slow to answer that whoever asks it takes it for dead."""
EAGER = {"RAY_worker_niceness": "0"}
"""Ray's workers are otherwise so nice that on a busy machine they wait for everybody else, as stages would not where
raypipe starts Ray itself."""
START_TIMEOUT_S = 240.0
GAVE_UP = b"timed out during startup"
"""What ``ray start`` says after 30 s, which nothing can prolong; a machine that others use may need more."""
STOP_TIMEOUT_S = 10.0


@dataclass
class Home:
    """Where the raylets of one test live.

    Attributes:
        folder: short, because Unix sockets lie in it.
        port: of the head.
        head: its address.
        started: processes that end their raylets with them.
        dashboard_port: where the head takes jobs; 0 where it does not.
    """

    folder: Path
    port: int
    head: str = "127.0.0.1"
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    dashboard_port: int = 0

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"

    def start(
        self,
        *before: str,
        at: str = "",
        cpus: int = 1,
        shm_bytes: int = 0,
        store_bytes: int = 80_000_000,
        dashboard: bool = False,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        """Start a node and wait until Ray says that it runs; the first one is the head.

        Args:
            before: words in front of the command, such as ip netns exec NAME.
            at: address of the node.
            shm_bytes: gives it a /dev/shm of its own of this size.
            store_bytes: of its object store.
            dashboard: the head shall take jobs, at ``dashboard_port``.
            options: further ones of ``ray start``.
            environment, more: variables of its environment.
        """
        page = ["--include-dashboard=false"]
        if dashboard:
            self.dashboard_port = free_port()
            page = [
                f"--dashboard-host={self.head}", f"--dashboard-port={self.dashboard_port}",
                f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}",
                f"--metrics-export-port={free_port()}",
            ]  # fmt: skip
        head = ["--head", f"--port={self.port}", *page]
        where = [f"--address={self.address}"] if self.started else head
        command = [
            RAY, "start", "--block", *where, f"--node-ip-address={at or self.head}", f"--num-cpus={cpus}",
            "--disable-usage-stats", f"--object-store-memory={store_bytes}",
            f"--temp-dir={self.folder}", *options,
        ]  # fmt: skip
        if shm_bytes:
            mount = f'mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
        deadline_s = time.monotonic() + START_TIMEOUT_S
        known = set(processes.descendants(os.getpid()))
        while not self._runs([*before, *command], {**os.environ, **EAGER, **(environment or {}), **more}, deadline_s):
            processes.end(processes.survivors(os.getpid(), known, STOP_TIMEOUT_S))

    def _runs(self, command: list[str], environment: dict[str, str], deadline_s: float) -> bool:
        """Start one node; False where Ray gave up waiting for it."""
        log = self.folder / f"start-{len(self.started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
        self.started.append(process)
        while b"will now block forever" not in log.read_bytes():
            assert time.monotonic() < deadline_s, log.read_text()
            if process.poll() is not None:
                assert GAVE_UP in log.read_bytes(), log.read_text()
                self.started.remove(process)
                return False
            time.sleep(0.1)
        return True

    def stop(self) -> None:
        """End all nodes, and what hangs on them: a detached actor outlives its raylet for a while."""
        below: dict[int, str] = {}
        for process in reversed(self.started):
            below |= processes.descendants(process.pid)
            process.terminate()
        for process in reversed(self.started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()
            process.wait()
        running = processes.descendants(os.getpid())
        processes.end({pid: command for pid, command in below.items() if pid in running})


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def private_cluster(head: str = "127.0.0.1") -> Iterator[Home]:
    """Room for a cluster that shares neither port nor folder with any other; all of it is gone afterwards."""
    home = Home(Path(tempfile.mkdtemp(prefix="rp", dir="/tmp")), free_port(), head)
    try:
        yield home
    finally:
        home.stop()
        shutil.rmtree(home.folder, ignore_errors=True)
