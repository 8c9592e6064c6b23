"""Addresses: where a worker listens, on which machine, and whether the others can get there.

Two workers share a *machine* here when they share a network namespace, which is what both loopback and
abstract Unix sockets belong to. A hostname says less: two containers may have one name and no common
network, or one network and two names.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import platform
import socket
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from raypipe.errors import LinkError

__all__ = ["Address", "check_reachable", "interfaces", "machine", "same_machine"]

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Address(NamedTuple):
    """Where a listener listens; a plain value that may travel to the peers.

    Attributes:
        host, port: over TCP.
        unix: over a Unix socket: the path of a file, or "@name" in the abstract namespace; "" without one.
        machine: ``machine()`` of the listener's process; "" if not known.
    """

    host: str
    port: int
    unix: str = ""
    machine: str = ""

    def unix_path(self) -> str:
        """What the system calls take."""
        return "\0" + self.unix[1:] if self.unix.startswith("@") else self.unix


@functools.cache
def machine() -> str:
    """Boot and network namespace of this process; elsewhere than on Linux, name and hardware address.

    Equal text on two machines does no harm (a copied virtual machine may have a copied boot id): their Unix
    sockets do not meet, and TCP is taken.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode():012x}"


def same_machine(one: Address, other: Address) -> bool:
    """Whether both are known to share a network namespace."""
    return one.machine != "" and one.machine == other.machine


def check_reachable(me: int, mine: Address, peers: Mapping[int, Address]) -> None:
    """Refuse addresses that mean "this machine" when they were given to another one.

    Raises:
        LinkError: names the workers, the addresses that would do, and how to have Ray use one.
    """
    elsewhere = {peer: at for peer, at in peers.items() if at.machine and mine.machine and at.machine != mine.machine}
    if elsewhere and _is_local(mine.host):
        here = interfaces()
        listed = ", ".join(f"{name} {address}" for name, address in here)
        usable = next((address for _, address in here if not _is_local(address)), "ADDRESS")
        raise LinkError(
            f"worker {me} listens at {mine.host}, which reaches no other machine, but workers {sorted(elsewhere)} are "
            f"on others. Interfaces here: {listed or 'none with an address'}. Start Ray on this node with an address "
            f"that they reach: ray start --node-ip-address {usable} ..."
        )
    for peer, at in sorted(elsewhere.items()):
        if _is_local(at.host):
            raise LinkError(
                f"worker {peer} listens at {at.host}, which reaches no other machine, but worker {me} is on another. "
                f"Start Ray on worker {peer}'s node with an address that worker {me} reaches: "
                "ray start --node-ip-address ADDRESS ..."
            )


def interfaces() -> list[tuple[str, str]]:
    """Names and addresses of this machine's network interfaces, first IPv4, then IPv6 that is not link-local."""
    found = []
    with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        import fcntl

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                found.append((name, str(address)))
    return found


def _is_local(host: str) -> bool:
    """Loopback, or the wildcard, which a peer would take for its own loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
