"""Listeners: their addresses, and strangers, crowds and liars who do not disturb them. Needs no Ray."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from jobs.lib.strangers import KINDS, Strangers
from raypipe.errors import LinkError
from raypipe.runtime.transport import listener
from raypipe.runtime.transport import tcp as sockets
from raypipe.runtime.transport.handshake import LinkIdentity, call, run_digest
from raypipe.runtime.transport.listener import Address, SocketListener
from tests.contract.channel import WAIT_S, Failing, b, f
from tests.runtime.transport.ends import HOST, close, exchanged, open_both, open_channels, together
from tests.waiting import wait_until


def test_a_listener_without_abstract_names_uses_a_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener.sys, "platform", "other")
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        path = Path(first.address.unix)
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o077 == 0, "nobody else may look inside"
        a, z = open_both(first, second)
        assert a.kinds == ("unix", "unix")
        assert exchanged(a, z)
    assert not path.parent.exists()
    first.close()


@pytest.mark.slow
def test_a_wrong_secret_opens_nothing_and_disturbs_nobody() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as second, SocketListener(HOST) as third:
        liar = Failing(lambda: open_channels(third, 1, {0: first.address}, 3, "run", 4, 1.5, secret=b"guess"))
        newer = Failing(lambda: open_channels(third, 1, {0: first.address}, 9, "run", 4, 1.5, secret=b"guess"))
        with pytest.raises(LinkError, match=r"greeted as workers \[1\] without this run's secret"):
            open_channels(first, 0, {1: third.address}, 3, "run", 4, 0.7, secret=b"truth")
        assert exchanged(*open_both(first, second, secret=b"truth"))
        for stranger in (liar, newer):
            assert "no connection from workers [0]" in str(stranger.result())


def expect_closed(callers: list[socket.socket]) -> None:
    for caller in callers:
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        caller.close()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["number", "time"])
def test_silent_callers_are_bounded(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd ahead of everybody else in the listener's queue: the oldest make room, or their time runs out."""
    monkeypatch.setattr(sockets, "GUESTS", 8 if by == "number" else 1000)
    monkeypatch.setattr(sockets, "GUEST_S", WAIT_S if by == "number" else 0.05)
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        crowd = [socket.create_connection(first.address[:2], timeout=WAIT_S) for _ in range(100)]
        wait = Failing(lambda: open_channels(first, 0, {7: second.address}, 3, "run", 1, WAIT_S))
        room = 8 + 1 if by == "number" else 0
        expect_closed(crowd[: 100 - room])
        for caller in crowd[100 - room :]:
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
            caller.close()
        assert wait.error is None, "the opening goes on"
        with pytest.raises(LinkError):
            open_channels(second, 7, {0: first.address}, 4, "run", 1, 1.0)
        assert "obsolete" in str(wait.result())


ROOT = Path(__file__).parents[3]


def test_loopback_is_refused_on_both_sides_when_a_peer_is_on_another_machine() -> None:
    """On each side before it connects; a wildcard is no better."""
    for host in (HOST, "0.0.0.0"):
        with SocketListener(host) as first:
            other = Address("192.0.2.7", 4000, "", "another")
            with pytest.raises(LinkError) as caught:
                open_channels(first, 0, {3: other, 4: first.address}, 0, "run", 1, WAIT_S)
            assert f"worker 0 listens at {host}" in str(caught.value)
            assert "workers [3]" in str(caught.value)
            assert "lo 127.0.0.1" in str(caught.value)
            assert "ray start --node-ip-address" in str(caught.value)
    with pytest.raises(LinkError, match=r"worker 5 listens at 127.0.0.1.*worker 2 is on another.*--node-ip-address"):
        listener.check_reachable(2, other, {5: Address(HOST, 1, "", "this")})
    listener.check_reachable(2, Address(HOST, 1), {5: other})  # nobody knows where worker 2 is
    listener.check_reachable(2, Address("::1", 1, "", "this"), {5: Address("::1", 2, "", "this")})


NEIGHBOUR = """
import socket, sys
from raypipe.runtime.transport.listener import Address, machine
print(machine())
print(socket.socket(socket.AF_UNIX).connect_ex(Address("", 0, sys.argv[1]).unix_path()))
"""


@pytest.mark.net
@pytest.mark.slow
def test_another_network_namespace_is_another_machine_though_the_hostname_is_the_same() -> None:
    """And loopback and abstract names of the two do not meet."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1)")
    with SocketListener(HOST) as first:
        results = []
        for prefix in ((), ("unshare", "--net")):
            command = [*prefix, sys.executable, "-c", NEIGHBOUR, first.address.unix]
            results.append(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT))
    here, there = (result.stdout.splitlines() for result in results)
    assert here == [listener.machine(), "0"]
    assert there[0] != listener.machine()
    assert there[1] == str(errno.ECONNREFUSED)


SECRET = b"secret"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_links_open_and_carry_messages_through_2000_strangers() -> None:
    """They come faster than they can be sent away, also while nobody opens a link and the listeners' queues fill."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    before = descriptors()
    with SocketListener(HOST, unix=False) as first, SocketListener(HOST, unix=False) as second:
        ports = [each.address[:2] for each in (first, second)]
        hellos = [LinkIdentity(run_digest("run"), g, me, 1 - me, 4) for g in range(8) for me in (0, 1)]
        strangers = Strangers(ports, hellos, SECRET, seed)
        over = threading.Event()

        def crowd() -> None:
            while sum(strangers.tried.values()) < 2000 or not over.is_set():
                strangers.visit(1)

        thread = threading.Thread(target=crowd, daemon=True)
        thread.start()
        most = 0
        for generation in range(6):
            begin_s = time.monotonic()
            known = (generation, "run", 4, WAIT_S)
            a, z = together(
                partial(open_channels, first, 0, {1: second.address}, *known, secret=SECRET),
                partial(open_channels, second, 1, {0: first.address}, *known, secret=SECRET),
            )
            print(f"generation {generation} opened after {time.monotonic() - begin_s:.3f} s")
            for m in range(20):
                a[1].send(f(m), (torch.full((100,), float(m)),))  # type: ignore[index]
                z[0].send(b(m), (torch.full((100,), float(m)),))  # type: ignore[index]
                assert z[0].recv(f(m), WAIT_S)[0][0].item() == m  # type: ignore[index]
                assert a[1].recv(b(m), WAIT_S)[0][0].item() == m  # type: ignore[index]
            most = max(most, descriptors())
            close(a, z)
        over.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        print(f"{dict(strangers.tried)}, of which {strangers.connected} connected; most descriptors {most - before}")
        assert set(strangers.tried) == set(KINDS)
        strangers.leave()
    wait_until(lambda: descriptors() <= before)


def test_who_greets_like_a_peer_is_not_sent_away_for_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is far away takes long to prove itself, and others connect meanwhile."""
    monkeypatch.setattr(sockets, "GUESTS", 8)
    with SocketListener(HOST, unix=False) as first, SocketListener(HOST, unix=False) as mute:
        opening = Failing(lambda: open_channels(first, 0, {1: mute.address}, 0, "run", 4, WAIT_S, secret=SECRET))
        far = socket.create_connection(first.address[:2], timeout=WAIT_S)
        conversation = call(LinkIdentity(run_digest("run"), 0, 1, 0, 4), SECRET)
        far.sendall(next(conversation).message)
        challenge = far.recv(16)
        silent = [socket.create_connection(first.address[:2], timeout=WAIT_S) for _ in range(40)]
        assert silent[0].recv(1) == b"", "the oldest silent one had to go"
        far.sendall(conversation.send(challenge).message)
        assert len(far.recv(32)) == 32, "a welcome"
        with pytest.raises(LinkError):
            open_channels(mute, 1, {0: first.address}, 1, "run", 4, 1.0, secret=SECRET)
        assert "obsolete" in str(opening.result())
        for sock in (far, *silent):
            sock.close()
