"""Two emulated hosts with a wire of a given rate between them: network namespaces with one raylet each.

The network is that of tests/lab, and needs root, iproute2 and Linux. The processes of a benchmark run inside the
namespaces: ``Rig.start`` starts a script on a host, and ``Rig.answer`` returns the JSON in its last line of output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.network import Network, missing, network
from tests.runtime.raylets import TOKEN, Home, private_cluster

__all__ = ["Rig", "rig"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Rig:
    """The two hosts, with the numbers 0 and 1."""

    lab: Network
    home: Home

    def rate(self, mbit: float | None) -> None:
        """Set the rate of the wire, both ways; None is as fast as the machine."""
        self.lab.rate(0, 1, mbit)

    def start(self, host: int, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script, named from jobs/, on a host; ``answer`` reads its standard output."""
        given = {**os.environ, **TOKEN, "PYTHONPATH": str(ROOT), "RAY_HEAD": self.home.address, **environment}
        command = [str(ROOT / "jobs" / script), *arguments]
        return self.lab.python(host, *command, env=given, stdout=subprocess.PIPE, text=True)

    def answer(
        self, process: subprocess.Popen[str], limit_s: float, on_line: Callable[[str], None] = lambda line: None
    ) -> Any:
        """Wait for a process, and return the JSON in its last line of output.

        Args:
            on_line: called with every line of output as soon as it is there.

        Raises:
            RuntimeError: the process failed, printed nothing, or took longer than ``limit_s``.
        """
        assert process.stdout is not None
        last = ""
        end = threading.Timer(limit_s, process.kill)
        end.start()
        try:
            for line in process.stdout:
                on_line(line)
                last = line.strip() or last
        finally:
            end.cancel()
        if process.wait(limit_s) != 0 or not last:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        return json.loads(last)


@contextlib.contextmanager
def rig(cpus: int = 1, store_bytes: int = 80_000_000) -> Iterator[Rig]:
    """Start the hosts with a raylet on each; everything is removed afterwards.

    Args:
        store_bytes: bytes of each raylet's object store.

    Raises:
        RuntimeError: no network can be made here, with the reason.
    """
    if reason := missing():
        raise RuntimeError(f"This benchmark needs network namespaces: {reason}")
    quiet = {"PYTHONPATH": str(ROOT), **TOKEN}
    with network() as lab, private_cluster(lab.addresses[0]) as home:
        for host, address in enumerate(lab.addresses):
            home.start(*lab.prefix(host), at=address, cpus=cpus, store_bytes=store_bytes, environment=quiet)
        yield Rig(lab, home)
