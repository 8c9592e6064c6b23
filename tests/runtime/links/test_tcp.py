"""Opening links: in any order, past strangers and liars, over the right socket, on the right port. Needs no Ray."""

from __future__ import annotations

import contextlib
import errno
import os
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
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.links import addresses, listener
from raypipe.runtime.links import tcp as sockets
from raypipe.runtime.links.tcp import Address, SocketChannel, SocketListener, open_channels
from tests.contract.channel import WAIT_S, WAKE_S, Failing, b, f
from tests.runtime.links.ends import HOST, close, together

ROOT = Path(__file__).parents[3]


def test_three_workers_open_all_links_and_names_are_kept() -> None:
    listeners = [SocketListener(HOST) for _ in range(3)]

    def enter(me: int) -> dict[int, SocketChannel]:
        peers = {p: listeners[p].address for p in range(3) if p != me}
        names = {p: f"{me}-{p}" for p in peers}
        limits = {p: 1 + p + me for p in peers}
        return open_channels(listeners[me], me, peers, 0, b"run", limits, WAIT_S, names)

    channels = together(*(partial(enter, me) for me in range(3)))
    for me in range(3):
        for peer in set(range(3)) - {me}:
            assert channels[me][peer].name == f"{me}-{peer}"  # type: ignore[index]
            channels[me][peer].send(f(me), (torch.tensor(float(me)),))  # type: ignore[index]
    for me in range(3):
        for peer in set(range(3)) - {me}:
            assert channels[me][peer].recv(f(peer), WAIT_S)[0].item() == peer  # type: ignore[index]
    for me in range(3):
        for channel in channels[me].values():  # type: ignore[attr-defined]
            channel.close()
        listeners[me].close()


def test_strangers_do_not_disturb() -> None:
    """Somebody silent, somebody who talks, another run, and this run's past."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        silent = socket.create_connection(first.address[:2], timeout=WAIT_S)
        talker = socket.create_connection(first.address[:2], timeout=WAIT_S)
        talker.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: text/html\r\n\r\n")
        with pytest.raises(LinkError, match="no welcome"):
            open_channels(second, 1, {0: first.address}, 3, "other run", 4, 0.05)
        with pytest.raises(LinkError, match="no welcome"):
            open_channels(second, 1, {0: first.address}, 2, "run", 4, 0.05)
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, 3, "run", 4, WAIT_S),
        )
        ends[0][1].send(f(0), (torch.ones(1),))  # type: ignore[index]
        assert len(ends[1][0].recv(f(0), WAIT_S)) == 1  # type: ignore[index]
        with contextlib.suppress(ConnectionResetError):  # if it was closed while words of it were unread
            assert talker.recv(1) == b""
        for sock in (silent, talker):
            sock.close()
        ends[0][1].close()  # type: ignore[index]
        ends[1][0].close()  # type: ignore[index]


def test_workers_may_enter_a_generation_in_any_order() -> None:
    """Worker 0 is still in generation 3 when worker 1 opens 4: told so, it follows at once."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:

        def enter_late() -> dict[int, SocketChannel]:
            with pytest.raises(LinkError, match=r"opens generation 4 .* generation 3, which is obsolete"):
                open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S)
            return open_channels(first, 0, {1: second.address}, 4, "run", 4, WAIT_S)

        a, z = together(enter_late, lambda: open_channels(second, 1, {0: first.address}, 4, "run", 4, WAIT_S))
        z[0].send(b(0), (torch.ones(1),))  # type: ignore[index]
        assert len(a[1].recv(b(0), WAIT_S)) == 1  # type: ignore[index]
        a[1].close()  # type: ignore[index]
        z[0].close()  # type: ignore[index]


def test_another_plan_of_the_same_generation_is_an_error_on_both_sides() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        ends = (
            Failing(lambda: open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S)),
            Failing(lambda: open_channels(second, 1, {0: first.address}, 3, "run", 5, WAIT_S)),
        )
        for end in ends:
            assert "do not run the same plan" in str(end.result())


def test_an_absent_peer_is_named_at_the_deadline() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as mute, pytest.raises(LinkError) as caught:
        open_channels(first, 0, {6: mute.address}, 0, "run", 1, 0.05)
    assert "0.05 s: no connection from workers [6], no welcome from workers [6]" in str(caught.value)


def test_a_dead_peer_is_named_at_once() -> None:
    gone = SocketListener(HOST)
    address = gone.address
    gone.close()
    start_s = time.monotonic()
    with SocketListener(HOST) as first, pytest.raises(LinkError, match="cannot connect to worker 1"):
        open_channels(first, 0, {1: address}, 0, "run", 1, WAIT_S)
    assert time.monotonic() - start_s < WAKE_S


# Which socket.


def test_a_peer_elsewhere_is_reached_over_tcp_and_so_is_one_without_its_unix_socket() -> None:
    """One direction finds nobody at the name it was given, the other was told of another machine."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        assert first.address.unix != second.address.unix
        gone = first.address._replace(unix="@raypipe-nobody")
        elsewhere = second.address._replace(machine="")
        ends = together(
            lambda: open_channels(first, 0, {1: elsewhere}, 0, "run", 1, WAIT_S),
            lambda: open_channels(second, 1, {0: gone}, 0, "run", 1, WAIT_S),
        )
    assert ends[0][1].kinds == ends[1][0].kinds == ("tcp", "tcp")  # type: ignore[index]
    ends[0][1].send(f(0), (torch.ones(1),))  # type: ignore[index]
    assert len(ends[1][0].recv(f(0), WAIT_S)) == 1  # type: ignore[index]
    close(*ends)


def test_a_listener_without_abstract_names_uses_a_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener.sys, "platform", "other")
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        path = Path(first.address.unix)
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o077 == 0, "nobody else may look inside"
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 0, "run", 1, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, 0, "run", 1, WAIT_S),
        )
        assert ends[0][1].kinds == ("unix", "unix")  # type: ignore[index]
        close(*ends)
    assert not path.parent.exists()
    first.close()


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
        addresses.check_reachable(2, other, {5: Address(HOST, 1, "", "this")})
    addresses.check_reachable(2, Address(HOST, 1), {5: other})  # nobody knows where worker 2 is
    addresses.check_reachable(2, Address("::1", 1, "", "this"), {5: Address("::1", 2, "", "this")})


NEIGHBOUR = """
import socket, sys
from raypipe.runtime.links.addresses import Address, machine
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
    assert here == [addresses.machine(), "0"]
    assert there[0] != addresses.machine()
    assert there[1] == str(errno.ECONNREFUSED)


def test_the_interfaces_are_those_that_can_be_listened_on() -> None:
    found = addresses.interfaces()
    assert ("lo", HOST) in found
    for name, address in found:
        with SocketListener(address) as made:
            assert made.address.host == address, name


# Which port.


def test_ports_of_a_range_are_taken_until_none_is_left() -> None:
    with SocketListener(HOST) as probe:
        low = probe.address.port
    made: list[SocketListener] = []

    def take_all() -> None:
        for _ in range(4):  # somebody else may hold one of them
            made.append(SocketListener(HOST, ports=(low, low + 2)))

    try:
        with pytest.raises(LinkError) as caught:
            take_all()
        taken = [each.address.port for each in made]
        assert set(taken) <= {low, low + 1, low + 2}
        assert taken
        assert f"{low} to {low + 2}" in str(caught.value)
        assert "link_ports" in str(caught.value)
        made.pop().close()
        made.append(SocketListener(HOST, ports=(low, low + 2)))
        assert made[-1].address.port == taken[-1]
    finally:
        for each in made:
            each.close()
    with pytest.raises(ConfigError, match="not both"):
        SocketListener(HOST, low, ports=(low, low))


# Who knows the secret.


@pytest.mark.slow
def test_a_wrong_secret_opens_nothing_and_disturbs_nobody() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as second, SocketListener(HOST) as third:
        liar = Failing(lambda: open_channels(third, 1, {0: first.address}, 3, "run", 4, 0.3, secret=b"guess"))
        newer = Failing(lambda: open_channels(third, 1, {0: first.address}, 9, "run", 4, 0.3, secret=b"guess"))
        with pytest.raises(LinkError, match=r"called itself workers \[1\] without knowing this run's secret"):
            open_channels(first, 0, {1: third.address}, 3, "run", 4, 0.1, secret=b"truth")
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S, secret=b"truth"),
            lambda: open_channels(second, 1, {0: first.address}, 3, "run", 4, WAIT_S, secret=b"truth"),
        )
        ends[0][1].send(f(0), (torch.ones(1),))  # type: ignore[index]
        assert len(ends[1][0].recv(f(0), WAIT_S)) == 1  # type: ignore[index]
        for stranger in (liar, newer):
            assert "no connection from workers [0]" in str(stranger.result())
        close(*ends)


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
            open_channels(second, 7, {0: first.address}, 4, "run", 1, 0.2)
        assert "obsolete" in str(wait.result())


def test_a_link_opens_through_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "GUESTS", 8)
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        crowd = [socket.create_connection(first.address[:2], timeout=WAIT_S) for _ in range(100)]
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 5, "run", 4, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, 5, "run", 4, WAIT_S),
        )
        close(*ends)
        for caller in crowd:
            caller.close()


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=8), st.booleans())
def test_noise_on_the_listener_does_not_disturb(noises: list[bytes], over_unix: bool) -> None:
    threads = threading.active_count()
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        callers = []
        for noise in noises:
            caller = socket.socket(socket.AF_UNIX if over_unix else socket.AF_INET)
            caller.settimeout(WAIT_S)
            caller.connect(first.address.unix_path() if over_unix else first.address[:2])
            caller.sendall(noise)
            callers.append(caller)
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, 3, "run", 4, WAIT_S),
        )
        ends[1][0].send(b(0), (torch.ones(1),))  # type: ignore[index]
        assert len(ends[0][1].recv(b(0), WAIT_S)) == 1  # type: ignore[index]
        close(*ends)
        for caller in callers:
            caller.close()
    assert threading.active_count() == threads
