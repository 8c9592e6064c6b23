"""Which congestion control a link's connections end up with, asked of real ones."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from raypipe.errors import LinkError
from raypipe.runtime.congestion import ASKED, choose_congestion_control
from tests.runtime.links import open_link

OPTION = getattr(socket, "TCP_CONGESTION", None)
pytestmark = pytest.mark.skipif(OPTION is None, reason="only Linux and FreeBSD have TCP_CONGESTION")


def in_use(sock: socket.socket) -> str:
    assert OPTION is not None
    return sock.getsockopt(socket.IPPROTO_TCP, OPTION, 16).rstrip(b"\0").decode()


def take(sock: socket.socket, name: str) -> None:
    assert OPTION is not None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, OPTION, name.encode())
    except OSError:
        pytest.skip(f"this system has no {name}, or not for us")


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET) as sock:
        yield sock


def test_bbr_gives_way(tcp: socket.socket) -> None:
    take(tcp, "bbr")
    assert choose_congestion_control(tcp, {}) == in_use(tcp)
    assert in_use(tcp) in ("cubic", "reno")


@pytest.mark.parametrize("name", ["reno", "cubic"])
def test_any_other_stays(tcp: socket.socket, name: str) -> None:
    take(tcp, name)
    assert choose_congestion_control(tcp, {}) == name
    assert in_use(tcp) == name


@pytest.mark.parametrize("name", ["reno", "bbr"])
def test_what_is_asked_for_is_taken(tcp: socket.socket, name: str) -> None:
    with socket.socket(socket.AF_INET) as other:
        take(other, name)
    assert choose_congestion_control(tcp, {ASKED: name}) == name
    assert in_use(tcp) == name


def test_what_does_not_exist_is_refused_by_its_name(tcp: socket.socket) -> None:
    with pytest.raises(LinkError, match=re.escape(f"{ASKED}=nonesuch is not possible here")):
        choose_congestion_control(tcp, {ASKED: "nonesuch"})


def test_sockets_that_are_not_tcp_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert choose_congestion_control(one, {ASKED: "nonesuch"}) == ""


@pytest.mark.parametrize("asked", ["", "reno"])
def test_both_ends_of_a_link_take_it(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(ASKED, asked)
    ends = open_link(kind="tcp")
    try:
        found = {in_use(channel._out) for channel in ends}
        assert len(found) == 1
        assert found == {asked} if asked else "bbr" not in found
    finally:
        for channel in ends:
            channel.close()
