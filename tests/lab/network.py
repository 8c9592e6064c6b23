"""A network in this machine: two or three hosts that are network namespaces, and wires between them that have a rate.

       host 0  10.78.0.1                   10.78.0.2  host 1          each wire is a veth pair of its own, so each
          to1 [tbf]=====================[tbf] to0                     direction of each pair of hosts has its own rate
          to2 [tbf]====== host 2 =======[tbf] to2

    with network(hosts=2, rate_mbit=50) as lab:
        lab.python(0, "-m", "something")       a process inside; lab.prefix(0) goes in front of any command
        lab.rate(0, 1, 200)                    while traffic flows; None: as fast as the machine
        with lab.competing(0, 1): ...          another TCP flow through the same wire
        lab.cut(0, 1); lab.heal(0, 1)

A host has one address, on its loopback, and a route to each other host over the wire to it: so a raylet, which has one
address too, reaches the others over different wires. A wire's queue is a token bucket filter with 200 ms of buffer, as
in a home router; it counts whole Ethernet frames, so TCP gets 95 % of the rate. Delay cannot be added: netem would do
that, which not every kernel has. All of it ends with the context: processes, wires, namespaces, and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "SINK", "Network", "missing", "network"]

ROOT = Path(__file__).parents[2]
COMMAND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
QUEUE_MS = 200
BUCKET_BYTES = 80_000
"""The kernel hands over up to 64 KiB of a flow as one packet. Such a one, queued when the bucket shrinks to less, would
wait for ever and the wire with it; so all rates have the same bucket, which is 13 ms of 50 Mbit/s."""
_numbers = itertools.count()

# Sends until it is ended; the address to connect to is the only argument. Zeros: nobody reads them.
_SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    print("flowing", flush=True)
    while True:
        sock.sendall(bytes(1 << 16))
"""
SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    while sock.recv(1 << 20):
        pass
"""


class Network:
    """What ``network`` gives. Hosts are numbered from 0."""

    def __init__(self, hosts: int) -> None:
        unique = f"rplab{os.getpid()}-{next(_numbers)}"
        self.names = tuple(f"{unique}-{host}" for host in range(hosts))
        self.addresses = tuple(f"10.78.0.{host + 1}" for host in range(hosts))
        self._started: list[subprocess.Popen[Any]] = []
        self._rates: dict[tuple[int, int], float] = {}

    # Hosts and what runs on them.

    def prefix(self, host: int) -> tuple[str, ...]:
        """Words that put a command into this host."""
        return ("ip", "netns", "exec", self.names[host])

    def start(self, host: int, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """A process on this host, which ends with the network; options are Popen's."""
        process = subprocess.Popen([*self.prefix(host), *command], **options)
        self._started.append(process)
        return process

    def python(self, host: int, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """This Python on this host, with the repository in front of its path."""
        given = dict(options.pop("env", os.environ))
        paths = [str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
        given["PYTHONPATH"] = os.pathsep.join(paths)
        return self.start(host, sys.executable, *arguments, env=given, **options)

    # Wires.

    def rate(self, a: int, b: int, mbit: float | None, *, back: bool = True) -> None:
        """Let this many Mbit/s through from a to b, and back unless ``back`` is False; None takes the limit away."""
        for source, target in ((a, b), (b, a)) if back else ((a, b),):
            limited = (source, target) in self._rates
            if mbit is None:
                if limited:
                    _tool("tc", "-n", self.names[source], "qdisc", "delete", "dev", _wire(target), "root")
                    del self._rates[source, target]
                continue
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", str(BUCKET_BYTES), "latency", f"{QUEUE_MS}ms"]
            verb = "change" if limited else "add"
            _tool("tc", "-n", self.names[source], "qdisc", verb, "dev", _wire(target), "root", *shape)
            self._rates[source, target] = mbit

    def address(self, host: int, to: int, address: str) -> None:
        """Give a host's end of the wire to another an address of its own, for what asks interfaces for theirs."""
        _tool("ip", "-n", self.names[host], "address", "add", address, "dev", _wire(to))

    def carried_bytes(self, a: int, b: int) -> int:
        """Bytes that went through the wire from a to b so far, headers of all layers included."""
        shown = _tool("ip", "-n", self.names[a], "-s", "link", "show", "dev", _wire(b))
        found = re.search(r"TX:[^\n]*\n\s*(\d+)", shown)
        assert found is not None, shown
        return int(found[1])

    def cut(self, a: int, b: int) -> None:
        """Nothing passes between a and b from now on. Connections are not told; they wait."""
        for host, other in ((a, b), (b, a)):
            _tool("ip", "-n", self.names[host], "link", "set", _wire(other), "down")

    def heal(self, a: int, b: int) -> None:
        """As before the cut, with the rates that the wire has. TCP finds out when it tries again, which may take as
        long as the cut did."""
        for host, other in ((a, b), (b, a)):
            self._raise(host, other)

    @contextlib.contextmanager
    def competing(self, a: int, b: int) -> Iterator[None]:
        """Another TCP flow from a to b, as fast as the wire lets it."""
        with contextlib.ExitStack() as ends:
            sink = ends.enter_context(self.piped(b, SINK, self.addresses[b]))
            sender = ends.enter_context(self.piped(a, _SENDER, self.addresses[b], _line(sink)))
            _line(sender)
            yield

    @contextlib.contextmanager
    def piped(self, host: int, program: str, *arguments: str) -> Iterator[subprocess.Popen[Any]]:
        """A Python program on this host whose output is read here."""
        process = self.python(host, "-c", program, *arguments, stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            self._end(process)

    def _end(self, process: subprocess.Popen[Any]) -> None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._started.remove(process)

    def _raise(self, host: int, other: int) -> None:
        _tool("ip", "-n", self.names[host], "link", "set", _wire(other), "up")
        # Routes over a wire go when it does.
        route = [self.addresses[other], "dev", _wire(other), "src", self.addresses[host]]
        _tool("ip", "-n", self.names[host], "route", "replace", *route)

    # The whole.

    def build(self) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            _tool("ip", "netns", "add", name)
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            _tool("ip", "-n", name, "address", "add", f"{address}/32", "dev", "lo")
        for a, b in itertools.combinations(range(len(self.names)), 2):
            one, two = ("netns", self.names[a]), ("netns", self.names[b])
            _tool("ip", "link", "add", _wire(b), *one, "type", "veth", "peer", "name", _wire(a), *two)
            self.heal(a, b)

    def remove(self) -> None:
        """End what was started here and what that left in the namespaces, then the namespaces, and so their wires."""
        for process in tuple(self._started):
            self._end(process)
        for name in self.names:
            left = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
            )
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)


@contextlib.contextmanager
def network(hosts: int = 2, rate_mbit: float | None = None) -> Iterator[Network]:
    """Hosts that all reach each other; each wire lets ``rate_mbit`` through each way."""
    made = Network(hosts)
    try:
        made.build()
        for a, b in itertools.combinations(range(hosts), 2):
            made.rate(a, b, rate_mbit)
        yield made
    finally:
        made.remove()


def missing() -> str:
    """Why no network can be made here, "" where one can. It is tried: in a container being root is not enough."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt-get install iproute2)"
    try:
        with network(rate_mbit=100):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()} (it takes root, and in a container --privileged)"


def _wire(to: int) -> str:
    return f"to{to}"


def _line(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"{process.args!r} ended"
    return line


def _tool(*words: str) -> str:
    return subprocess.run(words, check=True, timeout=COMMAND_TIMEOUT_S, capture_output=True, text=True).stdout
