"""Transports: the ways in which a worker can be joined to its peers, and the switch between them.

    "tcp"             connections of our own; Unix sockets on one machine     runtime/links/tcp.py
    "object_store"    objects in Ray's store, announced by actor calls        runtime/links/object_store.py
    "collective"      gloo groups of two; NCCL where workers compute on GPUs  runtime/links/collective.py, nccl.py
    "ray_collective"  one group of ray.util.collective, made once             runtime/links/ray_collective.py

A worker shows its peers one Endpoint for as long as it lives, and opens its channels through it for each generation of
the plan. "auto" is "tcp"; docs/design/0007-transports.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypipe.engine.device import CPU, Device
from raypipe.engine.messages.channel import Channel
from raypipe.errors import ConfigError
from raypipe.runtime.links.endpoint import Endpoint, Opening
from raypipe.runtime.links.tcp import SocketListener, open_links

__all__ = ["TRANSPORTS", "make_endpoint"]

Ports = tuple[int, int]


class SocketEndpoint:
    """The endpoint of "tcp"."""

    def __init__(self, host: str, ports: Ports | None) -> None:
        self._listener = SocketListener(host, ports=ports)

    @property
    def address(self) -> Any:
        return self._listener.address

    def open(self, opening: Opening) -> Mapping[int, Channel]:
        return open_links(self._listener, opening)

    def close(self) -> None:
        self._listener.close()


def _sockets(host: str, ports: Ports | None, device: Device) -> Endpoint:
    return SocketEndpoint(host, ports)


def _object_store(host: str, ports: Ports | None, device: Device) -> Endpoint:
    from raypipe.runtime.links.object_store import ObjectStoreEndpoint

    return ObjectStoreEndpoint()


def _collective(host: str, ports: Ports | None, device: Device) -> Endpoint:
    if not device.immediate:
        from raypipe.runtime.links.nccl import NcclEndpoint

        return NcclEndpoint(host, ports, device)
    from raypipe.runtime.links.collective import CollectiveEndpoint

    if ports is not None:
        raise ConfigError(
            f"link_ports={ports!r} cannot be kept by transport='collective': gloo chooses its ports itself. "
            "Leave link_ports out, or take transport='tcp'."
        )
    return CollectiveEndpoint(host)


def _ray_collective(host: str, ports: Ports | None, device: Device) -> Endpoint:
    from raypipe.runtime.links.ray_collective import RayCollectiveEndpoint

    if ports is not None:
        raise ConfigError(
            f"link_ports={ports!r} cannot be kept by transport='ray_collective': gloo chooses its ports itself. "
            "Leave link_ports out, or take transport='tcp'."
        )
    return RayCollectiveEndpoint(host, device)


TRANSPORTS: Mapping[str, Callable[[str, Ports | None, Device], Endpoint]] = {
    "tcp": _sockets,
    "object_store": _object_store,
    "collective": _collective,
    "ray_collective": _ray_collective,
}


def make_endpoint(transport: str, host: str, ports: Ports | None = None, device: Device = CPU) -> Endpoint:
    """The endpoint of this process's worker.

    Args:
        transport: a name in TRANSPORTS, or "auto".
        host: address of this node that the peers reach.
        ports: lowest and highest port that the links may use; None leaves it to the system. The object store uses none.
        device: that the worker computes on.

    Raises:
        ConfigError: there is no such transport, or it cannot keep to ``ports``.
    """
    name = "tcp" if transport == "auto" else transport
    if name not in TRANSPORTS:
        raise ConfigError(f"transport={transport!r} is not one of {', '.join(map(repr, ('auto', *TRANSPORTS)))}.")
    return TRANSPORTS[name](host, ports, device)
