"""SocketListener: the sockets to which peers of a worker connect, over TCP and, on its machine, over a Unix socket.

On Linux the Unix socket has a random name in the abstract namespace, where it vanishes with its process. Elsewhere it
is a file in a private folder, which ``close`` removes.

Two workers share a *machine* here if they share a network namespace, to which both loopback addresses and abstract Unix
sockets belong. A hostname identifies less: two containers may have one name and no common network, or one network and
two names.

Connections do not use BBR if the system has another congestion control and none is configured:

    out   ======#########======>     BBR limits data in flight to twice what fits into the shortest round trip;
    back  <=ack===########======     a pipeline's link is full both ways, so acknowledgements queue after messages

BBR then pauses in the middle of a message until they arrive, and every ten seconds for 200 ms to measure the round trip
again. CUBIC reacts to losses instead, and fills the link (docs/design/0006 compares both). BBR suits one long flow over
a path that loses packets; for stages connected by such a path, ``RAYPIPE_CONGESTION`` in their environment selects the
algorithm. Each end selects it for the data that it sends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import platform
import secrets
import socket
import struct
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from raypipe.errors import LinkError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Address(NamedTuple):
    """Address of a listener: a plain value that may be sent to the peers.

    Attributes:
        host, port: TCP address.
        unix: address of the Unix socket: path of a file, or "@name" in the abstract namespace; "" without a socket.
        machine: result of ``machine()`` in the listener's process; "" if unknown.
    """

    host: str
    port: int
    unix: str = ""
    machine: str = ""

    def unix_path(self) -> str:
        """Return the Unix address in the form that system calls take."""
        return "\0" + self.unix[1:] if self.unix.startswith("@") else self.unix


@functools.cache
def machine() -> str:
    """Return an id of this machine: boot id and network namespace on Linux, else host name and hardware address.

    Two machines with equal ids do no harm (a copied virtual machine may have a copied boot id): connecting to the
    Unix socket fails, and TCP is used.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode():012x}"


def same_machine(one: Address, other: Address) -> bool:
    """Return True if both addresses are known to belong to one machine."""
    return one.machine != "" and one.machine == other.machine


def check_reachable(me: int, mine: Address, peers: Mapping[int, Address]) -> None:
    """Raise LinkError if this worker or a peer listens at a loopback address, but the two are on different machines.

    The message has the workers' numbers, usable addresses, and how to configure Ray with such an address.

    Args:
        me, mine: number of this worker, and address of its listener.
        peers: addresses of the peers' listeners, by worker number.
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
    """List names and addresses of this machine's network interfaces, first IPv4, then IPv6 that is not link-local."""
    pairs = []
    with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        import fcntl

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                pairs.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                pairs.append((name, str(address)))
    return pairs


def _is_local(host: str) -> bool:
    """Return True if ``host`` is a loopback or wildcard address, by which a peer would reach only its own machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


BUFFER_BYTES = 4 << 20
_BACKLOG = 128


class SocketListener(contextlib.AbstractContextManager["SocketListener"]):
    """Listening sockets of one worker, which all links of the worker use until it ends.

    Args:
        host: address to listen on; IPv4 or IPv6.
        ports: lowest and highest port to choose from, for firewalls; None lets the system choose.
        unix: also listen on a Unix socket, which peers on this machine prefer.

    Attributes:
        address: address for the peers.

    Raises:
        LinkError: every port of ``ports`` is taken.
    """

    def __init__(self, host: str, *, ports: tuple[int, int] | None = None, unix: bool = True) -> None:
        tcp = _listen_tcp(host, 0) if ports is None else _listen_within(host, *ports)
        self._folder: Path | None = None
        self.sockets = [tcp]
        unix_name = self._listen_unix() if unix and hasattr(socket, "AF_UNIX") else ""
        own_host, own_port = tcp.getsockname()[:2]
        self.address = Address(own_host, own_port, unix_name, machine())

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        for sock in self.sockets:
            sock.close()
        if self._folder is not None:
            Path(self.address.unix).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._folder.rmdir()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _listen_unix(self) -> str:
        """Listen on a Unix socket; return its name, or "" if that fails, so that all peers use TCP."""
        if sys.platform == "linux":
            name = f"@raypipe-{secrets.token_hex(16)}"
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="raypipe-"))
            name = str(self._folder / "link")
        sock = socket.socket(socket.AF_UNIX)
        try:
            enlarge_buffers(sock)
            sock.bind(Address("", 0, name).unix_path())
            _start(sock)
        except OSError:
            sock.close()
            if self._folder is not None:
                Path(name).unlink(missing_ok=True)
                self._folder.rmdir()
                self._folder = None
            return ""
        self.sockets.append(sock)
        return name


def _listen_tcp(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enlarge_buffers(sock)  # accepted sockets inherit them; the window scale is fixed when they connect
        sock.bind((host, port))
        _start(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_within(host: str, low: int, high: int) -> socket.socket:
    """Listen on the lowest free port of a range, so that a firewall's small range is used without gaps."""
    for port in range(low, high + 1):
        try:
            return _listen_tcp(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise LinkError(
        f"every port from {low} to {high} of {host} is taken: each worker on a host needs one of its own. "
        "Widen link_ports, or end what occupies them (ss -ltnp shows it)."
    )


def _start(sock: socket.socket) -> None:
    sock.listen(_BACKLOG)
    sock.setblocking(False)


def enlarge_buffers(sock: socket.socket) -> None:
    """Request send and receive buffers of BUFFER_BYTES, unless the system's limit is lower.

    With a lower limit no buffers are requested, because the system's autotuning then reaches larger ones.
    """
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core") / name
        if not limit.exists() or int(limit.read_text()) >= BUFFER_BYTES:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


CONGESTION_VARIABLE = "RAYPIPE_CONGESTION"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


def choose_congestion_control(sock: socket.socket, environment: Mapping[str, str] | None = None) -> str:
    """Set the congestion control of a TCP connection to RAYPIPE_CONGESTION; if not set, replace BBR if possible.

    Args:
        environment: environment variables; None for os.environ.

    Returns:
        Name of the algorithm in use; "" for a socket that is not TCP, or if the system does not report it.

    Raises:
        LinkError: RAYPIPE_CONGESTION names an algorithm that this system lacks, or does not permit.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    option = getattr(socket, "TCP_CONGESTION", None)
    wanted = (os.environ if environment is None else environment).get(CONGESTION_VARIABLE, "")
    if wanted:
        if option is None or not _take(sock, option, wanted):
            raise LinkError(
                f"{CONGESTION_VARIABLE}={wanted} is not possible on host {socket.gethostname()}: its system does not "
                "have it, or not without rights (sysctl net.ipv4.tcp_allowed_congestion_control lists the "
                "permitted ones). Without the variable links take the system's own, or CUBIC instead of BBR."
            )
    elif option is not None and _in_use(sock, option).startswith("bbr") and not _take(sock, option, "cubic"):
        _take(sock, option, "reno")  # if that needs root too, BBR stays
    return "" if option is None else _in_use(sock, option)


def _take(sock: socket.socket, option: int, name: str) -> bool:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
    except OSError:
        return False
    return True


def _in_use(sock: socket.socket, option: int) -> str:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, _NAME_BYTES).rstrip(b"\0").decode()
    except OSError:
        return ""
