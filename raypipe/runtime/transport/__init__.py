"""Links between workers: the transports behind one channel contract (engine/messages/channel.py).

    "tcp"           connections of our own; Unix sockets on one machine     tcp.py: handshake.py, socket_channel.py
    "auto"          the same; there, large payloads in shared memory        shared_memory.py
                    between GPUs of a machine, in memory of the GPU         device_memory.py: process_group_channel.py
    "collective"    gloo groups of two; NCCL if workers compute on GPUs     process_group.py: process_group_channel.py
    "object_store"  objects in Ray's store, announced by actor calls        object_store.py

A worker has one Endpoint (endpoint.py) for its whole life, through which it opens new channels whenever it is
configured. All workers count these openings: the number of the present opening is the *generation* of the links. Why
"auto" is what it is: docs/design/0006-links.md.

    queued_channel.py    the sending thread that the channels share
    listener.py          a worker's listening sockets, and the options of its connections
    link_probe.py        a measurement of links while nothing trains
"""

from __future__ import annotations

from raypipe.engine.device.device import CPU, Device
from raypipe.errors import ConfigError
from raypipe.runtime.transport.endpoint import Endpoint

__all__ = ["make_endpoint"]


def make_endpoint(transport: str, host: str, ports: tuple[int, int] | None = None, device: Device = CPU) -> Endpoint:
    """Create the endpoint of this process's worker.

    Args:
        host: address of this node that the peers reach.
        ports: lowest and highest port of the links; None leaves the choice to the system. The object store uses none.

    Raises:
        ConfigError: there is no such transport, or it cannot be restricted to ``ports``.
    """
    if transport in ("auto", "tcp"):
        from raypipe.runtime.transport.tcp import SocketEndpoint

        return SocketEndpoint(host, ports, share_memory=transport == "auto", device=device)
    if transport == "object_store":
        from raypipe.runtime.transport.object_store import ObjectStoreEndpoint

        return ObjectStoreEndpoint()
    if transport != "collective":
        raise ConfigError(f"transport={transport!r} is not one of 'auto', 'tcp', 'object_store', 'collective'.")
    if ports is not None and device.immediate:
        raise ConfigError(
            f"link_ports={ports!r} cannot be kept by transport='collective': gloo chooses its ports itself. "
            "Leave link_ports out, or take transport='tcp'."
        )
    from raypipe.runtime.transport.process_group import ProcessGroupEndpoint

    return ProcessGroupEndpoint(host, ports, device)
