"""The listener: strangers, silent callers, crowds and noise do not disturb it."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import LinkError
from raypipe.runtime.links import listener
from raypipe.runtime.links import tcp as sockets
from raypipe.runtime.links.tcp import SocketListener
from tests.contract.channel import WAIT_S, Failing, b, f
from tests.runtime.links.ends import HOST, close, open_channels, together


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
