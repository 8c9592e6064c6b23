"""Clusters for tests that need real ones: raylets of our own on loopback or in network namespaces, and their end.

with private_cluster() as home:                    a folder of its own, a port of its own, nothing shared
    home.start()                                   the head
    home.start(PYTHONPATH="stub")                  a second node
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import processes

__all__ = ["TOKEN", "Home", "namespaces", "private_cluster"]

RAY = str(Path(sys.executable).parent / "ray")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
"""For the environment of clusters that live as long as one test, in namespaces or on loopback."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


@dataclass
class Home:
    """Where the raylets of one test live.

    Attributes:
        folder: short, because Unix sockets lie in it.
        port: of the head.
        started: processes that end their raylets with them.
    """

    folder: Path
    port: int
    head: str = "127.0.0.1"
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"

    def start(
        self,
        *before: str,
        at: str = "",
        cpus: int = 1,
        shm_bytes: int = 0,
        environment: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        """Start a node and wait until Ray says that it runs; the first one is the head.

        Args:
            before: words in front of the command, such as ip netns exec NAME.
            at: address of the node.
            shm_bytes: gives it a /dev/shm of its own of this size.
            environment, more: variables of its environment.
        """
        head = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        where = [f"--address={self.address}"] if self.started else head
        command = [
            RAY, "start", "--block", *where, f"--node-ip-address={at or self.head}", f"--num-cpus={cpus}",
            "--disable-usage-stats", "--object-store-memory=80000000",
            f"--temp-dir={self.folder}",
        ]  # fmt: skip
        if shm_bytes:
            mount = f'mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
        log = self.folder / f"start-{len(self.started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*before, *command],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **(environment or {}), **more},
            )
        self.started.append(process)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while b"will now block forever" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)

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


@contextlib.contextmanager
def private_cluster(head: str = "127.0.0.1") -> Iterator[Home]:
    """Room for a cluster that shares neither port nor folder with any other; all of it is gone afterwards."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    home = Home(Path(tempfile.mkdtemp(prefix="rp", dir="/tmp")), port, head)
    try:
        yield home
    finally:
        home.stop()
        shutil.rmtree(home.folder, ignore_errors=True)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces that reach each other at 10.77.N.1 and 10.77.N.2 with N of their names' last part."""
    number = os.getpid() % 250
    one, two = f"rp{os.getpid()}-1", f"rp{os.getpid()}-2"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=10, capture_output=True)

    try:
        for name in (one, two):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "veth0", "netns", one, "type", "veth", "peer", "name", "veth0", "netns", two)
        for name, last in ((one, 1), (two, 2)):
            ip("-n", name, "address", "add", f"10.77.{number}.{last}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
        yield one, two
    finally:
        for name in (one, two):
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=10).stdout
            for pid in left.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], timeout=10, capture_output=True, check=False)
