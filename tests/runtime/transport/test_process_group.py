"""Links over process groups of gloo: the contract, and what is gloo's own. Needs no Ray."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.engine.device.device import CPU
from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.transport import make_endpoint, process_group
from raypipe.runtime.transport.process_group import ProcessGroupEndpoint
from tests.contract.channel import WAIT_S, WAKE_S, ChannelContract, Failing, Pair, b, f
from tests.runtime.transport.ends import HOST, close, opening, together, use_and_close
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


@contextmanager
def endpoints(count: int) -> Iterator[list[ProcessGroupEndpoint]]:
    made = [ProcessGroupEndpoint(HOST, None, CPU) for _ in range(count)]
    yield made
    for endpoint in made:
        endpoint.close()


def open_link(max_tensors: int = 4, checksum: str = "auto") -> Pair:
    known: dict[str, Any] = {"capacity": max_tensors, "secret": b"secret", "checksum": checksum}
    with endpoints(2) as (first, second):
        a, z = together(
            lambda: first.open(opening(0, {1: second.address}, **known)),
            lambda: second.open(opening(1, {0: first.address}, **known)),
        )
    return a[1], z[0]  # type: ignore[index]


class TestGloo(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, checksum="on")


def system_threads() -> int:
    """All threads of this process, gloo's included."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_and_descriptors_are_bounded_and_gone_after_close() -> None:
    descriptors = Path("/proc/self/fd")
    close(dict(enumerate(open_link())))  # torch has threads of its own from the first use on
    threads, files = system_threads(), len(list(descriptors.iterdir()))
    links = [open_link() for _ in range(4)]
    # At each end two of ours, one per group and one for gloo's sockets.
    wait_until(lambda: system_threads() <= threads + 8 * 5)
    use_and_close(links)
    del links
    wait_until(lambda: system_threads() <= threads)
    wait_until(lambda: len(list(descriptors.iterdir())) <= files)


class Damaging:
    """A group whose payloads leave with a bit turned over."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, payload: torch.Tensor) -> None:
        damaged = payload.clone()
        damaged[5] ^= 4
        self._group.send(damaged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def test_a_damaged_payload_ends_the_link_by_name_and_not_the_process() -> None:
    """Headers take the same way as over "tcp": test_damage.py."""
    a, z = open_link(checksum="on")
    a._group_out = Damaging(a._group_out)  # type: ignore[attr-defined]
    a.send(f(0), (torch.full((100,), 1.0),))
    with pytest.raises(LinkError, match=r"stage 1 <-> stage 0: 0SEND_F0 .*arrived damaged: its payload.*FailureConfig"):
        z.recv(f(0), WAIT_S)
    with pytest.raises(LinkError, match=r"aborted by the peer: .*arrived damaged"):
        a.recv(b(0), WAIT_S)
    close({0: a}, {0: z})


@pytest.mark.parametrize("liar", [0, 1])
def test_who_does_not_know_the_secret_gets_no_link(liar: int) -> None:
    with endpoints(2) as (first, second):
        secrets = [b"truth", b"truth"]
        secrets[liar] = b"guess"
        other = Failing(lambda: second.open(opening(1, {0: first.address}, timeout_s=1.5, secret=secrets[1])))
        with pytest.raises(LinkError, match="without this run's secret"):
            first.open(opening(0, {1: second.address}, timeout_s=1.5, secret=secrets[0]))
        other.result()


def test_an_obsolete_opening_ends_and_the_worker_follows() -> None:
    with endpoints(2) as (first, second):

        def enter_late() -> Any:
            with pytest.raises(LinkError, match="generation 3, which is obsolete"):
                first.open(opening(0, {1: second.address}, 3))
            return first.open(opening(0, {1: second.address}, 4))

        found = together(enter_late, lambda: second.open(opening(1, {0: first.address}, 4)))
        close(*found)


class Absent:
    """A peer that proves itself and then makes no group."""

    def __init__(self, endpoint: ProcessGroupEndpoint) -> None:
        self._endpoint = endpoint
        endpoint._groups = self._groups  # type: ignore[method-assign]

    def _groups(self, *_: Any) -> Any:
        raise LinkError("it makes none")


@pytest.mark.parametrize("me", [0, 1])
def test_a_peer_that_gives_up_its_opening_is_not_waited_for(me: int) -> None:
    """It may have failed at another peer of its own; the deadline is far away."""
    with endpoints(2) as ends:
        Absent(ends[1 - me])
        other = Failing(lambda: ends[1 - me].open(opening(1 - me, {me: ends[me].address})))
        mine = Failing(lambda: ends[me].open(opening(me, {1 - me: ends[1 - me].address}, timeout_s=10 * WAIT_S)))
        assert f"worker {me} cannot make its process groups with worker {1 - me}: it closed the link" in str(
            mine.result()
        )
        assert "it makes none" in str(other.result())


def test_strangers_do_not_disturb_the_rendezvous() -> None:
    with endpoints(2) as (first, second):
        strangers = [socket.create_connection(first.address.store, timeout=WAIT_S) for _ in range(2)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
        found = together(
            lambda: first.open(opening(0, {1: second.address})), lambda: second.open(opening(1, {0: first.address}))
        )
        close(*found)
        for sock in strangers:
            sock.close()


def test_ports_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="gloo chooses its ports itself"):
        make_endpoint("collective", HOST, (5000, 5009))
    with pytest.raises(ConfigError, match="'pigeon' is not one of 'auto', 'tcp'"):
        make_endpoint("pigeon", HOST)


PEER = """
import json, sys, time
from raypipe.runtime.transport import make_endpoint
from tests.contract.channel import b, f
from tests.runtime.transport.ends import opening
import torch
endpoint = make_endpoint(sys.argv[2], "127.0.0.1")
print(json.dumps(endpoint.address), flush=True)
channel = endpoint.open(opening(1, {0: json.loads(sys.argv[1])}, timeout_s=60.0))[0]
channel.recv(f(0), 60.0)
channel.send(b(0), (torch.ones(1 << 20),))
time.sleep(120)
"""


@pytest.fixture
def distant(request: pytest.FixtureRequest) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A channel to another process over a transport, after a message each way, and that process."""
    with contextlib.closing(make_endpoint(request.param, HOST)) as endpoint:
        command = [sys.executable, "-c", PEER, json.dumps(endpoint.address), request.param]
        peer = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            address = json.loads(peer.stdout.readline())
            channel = endpoint.open(opening(0, {1: address}, timeout_s=WAIT_S))[1]
            channel.send(f(0), (torch.ones(1 << 20),))
            assert len(channel.recv(b(0), WAIT_S)) == 1
            yield channel, peer
        finally:
            peer.kill()
            peer.wait(WAIT_S)
            if peer.stdout is not None:
                peer.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("distant", ["tcp", "collective"], indirect=True)
def test_a_killed_peer_is_noticed(distant: tuple[Any, subprocess.Popen[bytes]]) -> None:
    channel, peer = distant
    wait = Failing(lambda: channel.recv(b(1), WAIT_S))
    time.sleep(0.05)
    start_s = time.monotonic()
    peer.send_signal(signal.SIGKILL)
    error = wait.result()
    print(f"SIGKILL noticed after {(wait.ended_s - start_s) * 1e3:.2f} ms: {error}")
    assert wait.ended_s - start_s < WAKE_S
    assert "broke" in str(error) or "died" in str(error)
    assert "1SEND_B1" in str(error)
    channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("distant", ["collective"], indirect=True)
def test_an_abort_ends_every_thread_though_the_peer_is_stopped(distant: tuple[Any, subprocess.Popen[bytes]]) -> None:
    """No call of gloo would end these waits; closing its sockets does."""
    channel, peer = distant
    mine = set(threading.enumerate()) - {threading.current_thread()}
    peer.send_signal(signal.SIGSTOP)
    for m in range(1, 5):
        channel.send(f(m), (torch.ones(4 << 20),))
    wait = Failing(lambda: channel.recv(b(1), WAIT_S))
    time.sleep(0.1)
    start_s = time.monotonic()
    channel.abort("enough")
    wait.result()
    assert wait.ended_s - start_s < WAKE_S
    channel.close()
    assert time.monotonic() - start_s < WAKE_S
    wait_until(lambda: not [thread for thread in mine if channel.name in thread.name and thread.is_alive()])


def test_looking_for_sockets_keeps_the_locks_of_this_process(tmp_path: Path) -> None:
    """POSIX drops all locks on a file when any descriptor of it is closed."""
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        process_group._own_sockets()
        tried = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, timeout=WAIT_S)
    assert b"BlockingIOError" in tried.stderr
