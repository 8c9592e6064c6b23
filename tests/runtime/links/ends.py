"""Links for tests: two or more workers of this process that open their channels to each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raypipe.runtime.links.tcp import SocketChannel, SocketListener, open_channels
from tests.contract.channel import WAIT_S

HOST = "127.0.0.1"
PROMISE_S = 0.05
"""Within this time a failure is noticed. A loaded machine misses it now and then, not every time."""


def together(*calls: Callable[[], object]) -> list[object]:
    """Run calls that wait for each other; the first error is raised when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


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
