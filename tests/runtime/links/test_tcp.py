"""Opening links: in any order, past strangers and liars, over the right socket, on the right port. Needs no Ray."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.links.tcp import SocketChannel, SocketListener
from tests.contract.channel import WAIT_S, WAKE_S, Failing, b, f
from tests.runtime.links.ends import HOST, close, open_channels, together

ROOT = Path(__file__).parents[3]


def test_three_workers_open_all_links_and_names_are_kept() -> None:
    listeners = [SocketListener(HOST) for _ in range(3)]

    def enter(me: int) -> dict[int, SocketChannel]:
        peers = {p: listeners[p].address for p in range(3) if p != me}
        names = {p: f"{me}-{p}" for p in peers}
        limits = {p: 1 + p + me for p in peers}
        return open_channels(listeners[me], me, peers, 0, "run", limits, WAIT_S, names)

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
