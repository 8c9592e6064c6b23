"""A TCP flow whose receiver says how it goes, to measure what a wire lets through."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator

from tests.lab.network import Network

__all__ = ["Flow", "flow"]

WAIT_S = 30.0

# Says what it received, by its own clock, twenty times a second, as long as something comes.
_METER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    total, said_s = 0, 0.0
    while part := sock.recv(1 << 20):
        total += len(part)
        now_s = time.monotonic()
        if now_s - said_s > 0.05:
            print(now_s, total, flush=True)
            said_s = now_s
"""
_SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    sock.settimeout(None)
    while True:
        sock.sendall(bytes(1 << 16))
"""


class Flow:
    """A flow that goes on until its context ends; a thread notes what the receiver says."""

    def __init__(self, meter: subprocess.Popen[str]) -> None:
        self._meter = meter
        self._said: list[tuple[float, int]] = [(0.0, 0)]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def last(self) -> tuple[float, int]:
        """When the receiver spoke last, by the clock of ``time.monotonic``, and its bytes until then."""
        return self._said[-1]

    def after(self, moment_s: float, timeout_s: float = WAIT_S) -> tuple[float, int]:
        """Wait for the first word after a moment."""
        deadline_s = time.monotonic() + timeout_s
        while self.last[0] <= moment_s:
            assert time.monotonic() < deadline_s, "nothing comes through"
            time.sleep(0.01)
        return next(point for point in self._said if point[0] > moment_s)

    def mbit_per_s(self, seconds: float, settle_s: float = 0.5) -> float:
        """What comes through from now on, over at least so many seconds; the first ``settle_s`` are left out.

        They pass the bucket, and the queue that was filled at another rate.
        """
        begin = self.after(time.monotonic() + settle_s)
        end = self.after(begin[0] + seconds)
        return (end[1] - begin[1]) * 8e-6 / (end[0] - begin[0])

    def _read(self) -> None:
        assert self._meter.stdout is not None
        for line in self._meter.stdout:
            clock_s, received = line.split()
            self._said.append((float(clock_s), int(received)))

    def join(self) -> None:
        self._reader.join(WAIT_S)


@contextlib.contextmanager
def flow(lab: Network, a: int, b: int) -> Iterator[Flow]:
    """One TCP connection that sends from a to b as fast as it may."""
    with lab.piped(b, _METER, lab.addresses[b]) as meter:
        assert meter.stdout is not None
        port = meter.stdout.readline().strip()
        made = Flow(meter)
        try:
            with lab.piped(a, _SENDER, lab.addresses[b], port):
                yield made
        finally:
            meter.terminate()  # where the wire is cut it does not hear of the sender's end
            made.join()
