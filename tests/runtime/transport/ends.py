"""Links for tests: two or more workers of this process that open their channels to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.listener import SocketListener
from raypipe.runtime.transport.socket_channel import Connections, SocketChannel
from raypipe.runtime.transport.tcp import open_links
from tests.contract.channel import WAIT_S, f

HOST = "127.0.0.1"


def opening(
    me: int, peers: dict[int, Any], generation: int = 3, capacity: int = 4, timeout_s: float = WAIT_S, **more: Any
) -> LinkSetup:
    """Make the settings of one worker's links; each end calls the link "stage ME <-> stage PEER"."""
    names = {peer: f"stage {me} <-> stage {peer}" for peer in peers}
    return LinkSetup(me, peers, generation, "run", dict.fromkeys(peers, capacity), timeout_s, names, **more)


def together(*calls: Callable[[], object]) -> list[object]:
    """Run calls that wait for each other; the first error is raised when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


def open_channels(
    listener: SocketListener,
    me: int,
    peers: Mapping[int, Any],
    generation: int,
    run_id: str,
    max_tensors: int | Mapping[int, int],
    timeout_s: float,
    names: Mapping[int, str] | None = None,
    *,
    make: Callable[[int, Connections], Any] | None = None,
    **known: Any,
) -> dict[int, Any]:
    """``open_links`` of a worker that is told no more than a test is about; the rest is as in LinkSetup."""
    limits = max_tensors if isinstance(max_tensors, Mapping) else dict.fromkeys(peers, max_tensors)
    called = names or {peer: f"worker {me} <-> worker {peer}" for peer in peers}
    opening = LinkSetup(me, peers, generation, run_id, limits, timeout_s, called, **known)
    return open_links(listener, opening, make=make)


def open_both(
    first: SocketListener, second: SocketListener, generation: int = 3, max_tensors: int = 4, **known: Any
) -> tuple[Any, Any]:
    """Open the link between workers 0 and 1, which listen there; return both ends."""
    a, z = together(
        lambda: open_channels(first, 0, {1: second.address}, generation, "run", max_tensors, WAIT_S, **known),
        lambda: open_channels(second, 1, {0: first.address}, generation, "run", max_tensors, WAIT_S, **known),
    )
    return a[1], z[0]  # type: ignore[index]


def open_link(
    max_tensors: int = 4, *, kind: str = "unix", secret: bytes = b"secret", checksum: str = "auto",
    channel: type[SocketChannel] = SocketChannel,
) -> tuple[Any, Any]:  # fmt: skip
    """Open a link of such channels over "tcp" or "unix"; return both ends."""
    with SocketListener(HOST, unix=kind == "unix") as first, SocketListener(HOST, unix=kind == "unix") as second:
        a, z = open_both(
            first, second, max_tensors=max_tensors, secret=secret, make=lambda _, ends: channel(ends, checksum)
        )
    assert a.kinds == z.kinds == (kind, kind)
    return a, z


def exchanged(a: Any, z: Any) -> bool:
    """Send one message from worker 0 to worker 1, and close the link; return True if it arrives."""
    a.send(f(0), (torch.ones(1),))
    (value,) = z.recv(f(0), WAIT_S)
    a.close()
    z.close()
    return torch.equal(value, torch.ones(1))


def close(*found: object) -> None:
    """Close what ``open_channels`` returned."""
    for channels in found:
        for channel in channels.values():  # type: ignore[attr-defined]
            channel.close()


def use_and_close(links: list[Any]) -> None:
    """Send a message over each link, and close both ends; every second link is aborted first.

    The message is received: gloo may lose a send that meets the end of the link, and its thread stays for minutes.
    """
    for number, (a, z) in enumerate(links):
        a.send(f(0), (torch.ones(3),))
        z.recv(f(0), WAIT_S)
        if number % 2:
            a.abort("test")
        z.close()
        a.close()
