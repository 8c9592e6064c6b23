"""Collective links: the contract, and what is gloo's own. Needs no Ray."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import ConfigError, LinkAbortedError, LinkError
from raypipe.runtime.links import collective
from raypipe.runtime.links.collective import CollectiveEndpoint
from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.handshake import Hello
from raypipe.runtime.links.opening import make_endpoint
from tests.contract.channel import WAIT_S, WAKE_S, ChannelContract, Failing, Pair, b, f, wait_until
from tests.runtime.links.ends import HOST, close, together

ROOT = Path(__file__).parents[3]


def opening(
    me: int, peers: dict[int, Any], generation: int = 3, capacity: int = 4, timeout_s: float = WAIT_S, **more: Any
) -> Opening:
    names = {peer: f"stage {me} <-> stage {peer}" for peer in peers}
    return Opening(me, peers, generation, "run", dict.fromkeys(peers, capacity), timeout_s, names, **more)


@contextmanager
def endpoints(count: int) -> Iterator[list[CollectiveEndpoint]]:
    made = [CollectiveEndpoint(HOST) for _ in range(count)]
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


class TestCollectiveChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, checksum="on")


def system_threads() -> int:
    """All threads of this process, gloo's included."""
    return len(list(Path("/proc/self/task").iterdir()))


def settled(count: Any, wanted: int) -> int:
    """``count()`` when it has come down to ``wanted``, or after a while."""
    deadline_s = time.monotonic() + WAIT_S
    while (now := count()) > wanted and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return now


def test_threads_and_descriptors_are_bounded_and_gone_after_close() -> None:
    descriptors = Path("/proc/self/fd")
    close(dict(enumerate(open_link())))  # torch has threads of its own from the first use on
    threads, files = system_threads(), len(list(descriptors.iterdir()))
    links = [open_link() for _ in range(4)]
    assert settled(system_threads, threads + 8 * 5) <= threads + 8 * 5, (
        "at each end two of ours, one per group and one for gloo's sockets"
    )
    for i, (a, z) in enumerate(links):
        a.send(f(0), (torch.ones(3),))
        z.recv(f(0), WAIT_S)  # gloo may lose a send that meets the end of the link, and its thread stays for minutes
        if i % 2:
            a.abort("test")
        z.close()
        a.close()
    del links, a, z
    assert settled(system_threads, threads) <= threads
    assert settled(lambda: len(list(descriptors.iterdir())), files) <= files


@pytest.mark.parametrize("before_bytes", [0, 999, 1000, 1001])
def test_a_damaged_header_ends_the_link_and_not_the_process(before_bytes: int) -> None:
    """Also where the size of the message before leaves room for the payload in the first transfer."""
    a, z = open_link()
    a.send(f(1), (torch.ones(before_bytes, dtype=torch.uint8),))
    z.recv(f(1), WAIT_S)
    nonsense: Any = frame.Frame(bytes(frame.header_bytes(4)), [memoryview(bytes(1000))], 1000)
    Failing(lambda: a.transmit(nonsense))  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="Not a raypipe frame"):
        z.recv(f(0), WAIT_S)
    with pytest.raises(LinkError, match="Not a raypipe frame"):
        a.recv(b(0), WAIT_S)
    close({0: a}, {0: z})


class Damaging:
    """A group of whose transfers one leaves with a bit turned over."""

    def __init__(self, group: Any, transfer: int, byte: int) -> None:
        self._group, self._transfer, self._byte = group, transfer, byte

    def send(self, tensor: torch.Tensor, *more: Any) -> None:
        if self._transfer == 0:
            tensor = tensor.clone()
            tensor[self._byte] ^= 4
        self._transfer -= 1
        self._group.send(tensor, *more)


HEADER = -frame.header_bytes(4) - checked_frame.SEAL_BYTES
"""Where it begins, from the end of an envelope of 4 tensors: longer than any reason."""


@pytest.mark.parametrize(("transfer", "byte", "named"), [
    (2, 5, r"0SEND_F1 \(micro-batch 1\) came damaged"),
    (1, 5, r"0SEND_F0 \(micro-batch 0\) came damaged"),
    (2, HEADER + 38, r"message 1, by its damaged header 0SEND_F1 \(micro-batch 1\), came damaged"),
    (2, HEADER + 30, r"message 1 with a damaged header"),
])  # fmt: skip
def test_a_damaged_message_ends_the_link_by_name_and_not_the_process(transfer: int, byte: int, named: str) -> None:
    """The first payload has a transfer of its own, the second one lies in the slot that the first made both expect."""
    a, z = open_link(checksum="on")
    a._out = Damaging(a._out, transfer, byte)  # type: ignore[attr-defined]
    with contextlib.suppress(LinkAbortedError):  # the first message may have ended the link by now
        for m in range(2):
            a.send(f(m), (torch.full((100,), float(m)),))
    with pytest.raises(LinkError, match=rf"stage 1 <-> stage 0: .*{named}.*the collective transport cannot ask"):
        z.recv(f(2), WAIT_S)
    with pytest.raises(LinkError, match="came damaged"):
        a.recv(b(0), WAIT_S)
    close({0: a}, {0: z})


def test_links_within_a_host_are_checked_only_where_it_is_asked() -> None:
    for checksum, checked in (("auto", False), ("on", True), ("off", False)):
        a, z = open_link(checksum=checksum)
        assert (a._checked, z._checked) == (checked, checked)  # type: ignore[attr-defined]
        close({0: a}, {0: z})


@pytest.mark.parametrize("liar", [0, 1])
def test_who_does_not_know_the_secret_gets_no_link(liar: int) -> None:
    with endpoints(2) as (first, second):
        secrets = [b"truth", b"truth"]
        secrets[liar] = b"guess"
        other = Failing(lambda: second.open(opening(1, {0: first.address}, secret=secrets[1])))
        with pytest.raises(
            LinkError, match="somebody calls itself worker 1 at worker 0 without knowing this run's secret"
        ):
            first.open(opening(0, {1: second.address}, secret=secrets[0]))
        other.result()


def test_three_workers_open_all_links_again_and_again() -> None:
    with endpoints(3) as ends:
        for generation in (3, 4):

            def enter(me: int, generation: int) -> Any:
                peers = {p: ends[p].address for p in range(3) if p != me}
                return ends[me].open(opening(me, peers, generation))

            channels: list[Any] = together(*(partial(enter, me, generation) for me in range(3)))
            for me in range(3):
                for peer in channels[me]:
                    channels[me][peer].send(f(me), (torch.tensor(float(me + generation)),))
            for me in range(3):
                for peer in channels[me]:
                    assert channels[me][peer].recv(f(peer), WAIT_S)[0].item() == peer + generation
            close(*channels)


def test_an_obsolete_opening_ends_and_the_worker_follows() -> None:
    with endpoints(2) as (first, second):

        def enter_late() -> Any:
            with pytest.raises(LinkError, match="newer generation than generation 3"):
                first.open(opening(0, {1: second.address}, 3))
            return first.open(opening(0, {1: second.address}, 4))

        found = together(enter_late, lambda: second.open(opening(1, {0: first.address}, 4)))
        close(*found)


class Late:
    """A store whose user writes after another one has written, and had looked before that."""

    def __init__(self, store: Any, looked: threading.Event, written: threading.Event, *, last: bool) -> None:
        self._store, self._looked, self._written, self._last = store, looked, written, last

    def set(self, key: str, value: str) -> None:
        if self._last:
            self._looked.set()
            assert self._written.wait(WAIT_S)
            self._store.set(key, value)
        else:
            assert self._looked.wait(WAIT_S)
            self._store.set(key, value)
            self._written.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_slow_writer_of_an_older_generation_hides_no_newer_one() -> None:
    store, looked, written = torch.distributed.HashStore(), threading.Event(), threading.Event()
    deadline_s = time.monotonic() + WAIT_S

    def announce(generation: int, me: int) -> None:
        hello = Hello(bytes(16), generation, me, 1 - me, 4)
        waiting = collective._Opening(hello, store, deadline_s)
        waiting.store = Late(store, looked, written, last=me == 0)
        waiting._await_peer()

    with ThreadPoolExecutor(1) as pool:
        newer = pool.submit(announce, 4, 1)
        with pytest.raises(LinkError, match="newer generation than generation 3"):
            announce(3, 0)
        store.set("4/port/0", "0")
        newer.result(WAIT_S)


def test_another_plan_is_an_error_on_both_sides() -> None:
    with endpoints(2) as (first, second):
        other = Failing(lambda: second.open(opening(1, {0: first.address}, capacity=5)))
        with pytest.raises(LinkError, match=r"up to 5 tensors.*up to 4"):
            first.open(opening(0, {1: second.address}, capacity=4))
        assert "up to 4 tensors" in str(other.result())


@pytest.mark.parametrize("me", [0, 1])
def test_an_absent_peer_is_named_at_the_deadline(me: int) -> None:
    with endpoints(2) as (first, mute):
        start_s = time.monotonic()
        with pytest.raises(LinkError, match=rf"worker {me} cannot open its link to worker {1 - me}.* within 0.3 s"):
            first.open(opening(me, {1 - me: mute.address}, timeout_s=0.3))
        mute.close()
        with pytest.raises(LinkError, match=rf"worker {me} cannot open its link to worker {1 - me}.* within 0.3 s"):
            first.open(opening(me, {1 - me: mute.address}, timeout_s=0.3))
        assert time.monotonic() - start_s < WAIT_S


def test_strangers_do_not_disturb_the_rendezvous() -> None:
    with endpoints(2) as (first, second):
        strangers = [socket.create_connection(first.address, timeout=WAIT_S) for _ in range(2)]
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
import sys, time
from raypipe.runtime.links.collective import CollectiveEndpoint
from tests.contract.channel import b, f
from tests.runtime.links.test_collective import opening
import torch
endpoint = CollectiveEndpoint("127.0.0.1")
print(endpoint.address[1], flush=True)
channel = endpoint.open(opening(1, {0: ("127.0.0.1", int(sys.argv[1]))}, timeout_s=60.0))[0]
channel.recv(f(0), 60.0)
channel.send(b(0), (torch.ones(1 << 20),))
time.sleep(120)
"""


@pytest.fixture
def distant() -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A channel to another process, after a message each way, and that process."""
    with endpoints(1) as (endpoint,):
        command = [sys.executable, "-c", PEER, str(endpoint.address[1])]
        peer = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            address = (HOST, int(peer.stdout.readline()))
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
def test_a_killed_peer_is_noticed(distant: tuple[Any, subprocess.Popen[bytes]]) -> None:
    channel, peer = distant
    wait = Failing(lambda: channel.recv(b(1), WAIT_S))
    time.sleep(0.05)
    start_s = time.monotonic()
    peer.send_signal(signal.SIGKILL)
    error = wait.result()
    print(f"SIGKILL noticed after {(wait.ended_s - start_s) * 1e3:.2f} ms: {error}")
    assert wait.ended_s - start_s < WAKE_S
    assert "the peer died or the link broke" in str(error)
    assert "1SEND_B1" in str(error)
    channel.close()


@pytest.mark.slow
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
        collective._own_sockets()
        tried = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, timeout=WAIT_S)
    assert b"BlockingIOError" in tried.stderr
