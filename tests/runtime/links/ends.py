"""Links for tests: two or more workers of this process that open their channels to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.tcp import Opened, SocketChannel, SocketListener, open_links
from tests.contract.channel import WAIT_S

HOST = "127.0.0.1"
PROMISE_S = 0.05
"""Within this time a failure is noticed. A loaded machine misses it now and then, not every time."""


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
    make: Callable[[int, Opened], Any] | None = None,
    **known: Any,
) -> dict[int, Any]:
    """``open_links`` of a worker that is told no more than a test is about; the rest is as in Opening."""
    limits = max_tensors if isinstance(max_tensors, Mapping) else dict.fromkeys(peers, max_tensors)
    called = names or {peer: f"worker {me} <-> worker {peer}" for peer in peers}
    opening = Opening(me, peers, generation, run_id, limits, timeout_s, called, **known)
    return open_links(listener, opening, make=make)


def open_link(
    max_tensors: int = 4,
    generation: int = 3,
    *,
    kind: str = "unix",
    secret: bytes = b"secret",
    checksum: str = "auto",
) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of a link over "tcp" or "unix"."""
    unix = kind == "unix"
    known: dict[str, Any] = {"secret": secret, "checksum": checksum}
    with SocketListener(HOST, unix=unix) as first, SocketListener(HOST, unix=unix) as second:
        a, z = together(
            lambda: open_channels(first, 0, {1: second.address}, generation, "run", max_tensors, WAIT_S, **known),
            lambda: open_channels(second, 1, {0: first.address}, generation, "run", max_tensors, WAIT_S, **known),
        )
    assert a[1].kinds == z[0].kinds == (kind, kind)  # type: ignore[index]
    return a[1], z[0]  # type: ignore[index]


def close(*found: object) -> None:
    """Close what ``open_channels`` returned."""
    for channels in found:
        for channel in channels.values():  # type: ignore[attr-defined]
            channel.close()
