"""Two hosts of our own with a wire between them that has a rate: network namespaces, one raylet with a token on each.

The lab is that of the tests (tests/lab), and it needs what they need: root, iproute2, Linux. A benchmark's driver runs
inside the first namespace, as do the processes of a peer: ``python(host, script, arguments)`` starts one and gives
what it printed last.
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
    """The two hosts, 0 and 1."""

    lab: Network
    home: Home

    def rate(self, mbit: float | None) -> None:
        """Of the wire, both ways; None is as fast as the machine."""
        self.lab.rate(0, 1, mbit)

    def start(self, host: int, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A script, named from jobs/, on a host; its standard output is read by ``answer``."""
        given = {**os.environ, **TOKEN, "PYTHONPATH": str(ROOT), "RAY_HEAD": self.home.address, **environment}
        command = [str(ROOT / "jobs" / script), *arguments]
        return self.lab.python(host, *command, env=given, stdout=subprocess.PIPE, text=True)

    def answer(
        self, process: subprocess.Popen[str], limit_s: float, on_line: Callable[[str], None] = lambda line: None
    ) -> Any:
        """The JSON of its last line; RuntimeError where it failed, or took longer than ``limit_s``.

        Args:
            on_line: called with every line as it comes.
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
    """The hosts with a raylet on each; nothing is left of them afterwards.

    Args:
        store_bytes: of each raylet's object store.

    Raises:
        RuntimeError: no network can be made here; says why.
    """
    if reason := missing():
        raise RuntimeError(f"This benchmark needs network namespaces: {reason}")
    quiet = {"PYTHONPATH": str(ROOT), **TOKEN}
    with network() as lab, private_cluster(lab.addresses[0]) as home:
        for host, address in enumerate(lab.addresses):
            home.start(*lab.prefix(host), at=address, cpus=cpus, store_bytes=store_bytes, environment=quiet)
        yield Rig(lab, home)
