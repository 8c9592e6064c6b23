"""Which congestion control a link's connections end up with: rules on a system of our own, and real connections."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from raypipe.errors import LinkError
from raypipe.runtime.transport.listener import CONGESTION_VARIABLE, choose_congestion_control
from tests.contract.channel import Pair
from tests.runtime.transport.ends import open_link
from tests.runtime.transport.test_process_group import open_link as open_collective

OPTION = getattr(socket, "TCP_CONGESTION", None)
pytestmark = pytest.mark.skipif(OPTION is None, reason="only Linux and FreeBSD have TCP_CONGESTION")


class System:
    """A socket of a system that allows some and has one to begin with."""

    family = socket.AF_INET

    def __init__(self, default: str, allowed: set[str]) -> None:
        self.used, self.allowed = default, allowed

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, OPTION)
        if value.decode() not in self.allowed:
            raise PermissionError(1, "Operation not permitted")
        self.used = value.decode()

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, OPTION)
        return self.used.encode().ljust(size, b"\0")


@pytest.mark.parametrize(
    ("default", "allowed", "expected"),
    [
        ("bbr", {"bbr", "cubic", "reno"}, "cubic"),
        ("bbr", {"bbr", "reno"}, "reno"),
        ("bbr", {"bbr"}, "bbr"),
        ("bbr2", {"cubic"}, "cubic"),
        ("dctcp", {"cubic", "reno"}, "dctcp"),
        ("reno", {"cubic", "reno"}, "reno"),
    ],
)
def test_bbr_gives_way_and_any_other_stays(default: str, allowed: set[str], expected: str) -> None:
    system: Any = System(default, allowed)
    assert choose_congestion_control(system, {}) == expected
    assert system.used == expected


def test_what_is_asked_for_is_taken() -> None:
    system: Any = System("cubic", {"bbr"})
    assert choose_congestion_control(system, {CONGESTION_VARIABLE: "bbr"}) == system.used == "bbr"


def test_what_is_not_there_is_refused_by_name_and_host() -> None:
    refused = re.escape(f"{CONGESTION_VARIABLE}=nonesuch is not possible on host {socket.gethostname()}")
    with socket.socket(socket.AF_INET) as sock, pytest.raises(LinkError, match=refused):
        choose_congestion_control(sock, {CONGESTION_VARIABLE: "nonesuch"})


def in_use(sock: socket.socket) -> str:
    assert OPTION is not None
    return sock.getsockopt(socket.IPPROTO_TCP, OPTION, 16).rstrip(b"\0").decode()


@pytest.fixture
def other() -> str:
    """One that this system lets us take and that is not its default."""
    for name in ("reno", "cubic"):
        with socket.socket(socket.AF_INET) as sock, contextlib.suppress(OSError):
            default = in_use(sock)
            sock.setsockopt(socket.IPPROTO_TCP, OPTION or 0, name.encode())
            if default != name:
                return name
    pytest.skip("this system lets us take none but its default")


def tcp_senders(ends: Pair) -> list[socket.socket]:
    return [channel._out for channel in ends]  # type: ignore[attr-defined]


def gloo_sockets(ends: Pair) -> list[socket.socket]:
    return [sock for channel in ends for group in (channel._group_out, channel._group_in) for sock in group.sockets]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("opened", "sockets"), [(lambda: open_link(kind="tcp"), tcp_senders), (open_collective, gloo_sockets)]
)
def test_links_take_it(
    monkeypatch: pytest.MonkeyPatch,
    other: str,
    opened: Callable[[], Pair],
    sockets: Callable[[Pair], list[socket.socket]],
) -> None:
    monkeypatch.setenv(CONGESTION_VARIABLE, other)
    ends = opened()
    try:
        found = sockets(ends)
        assert len(found) in (2, 4)
        assert {in_use(sock) for sock in found} == {other}
    finally:
        for channel in ends:
            channel.close()
