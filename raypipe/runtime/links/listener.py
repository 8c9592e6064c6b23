"""SocketListener: where the peers of one worker connect, over TCP and, on its machine, over a Unix socket.

The Unix socket has a random name: in Linux' abstract namespace, where it vanishes with its process, elsewhere
as a file in a private folder, which ``close`` removes.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.links.addresses import Address, machine

__all__ = ["SocketListener", "enlarge_buffers"]

BUFFER_BYTES = 4 << 20
_BACKLOG = 128


class SocketListener:
    """Listens for as many generations as its worker lives.

    Args:
        host: address to listen on; IPv4 or IPv6.
        port: 0 lets the system choose; see ``address``.
        ports: lowest and highest port to choose from instead, for firewalls.
        unix: also listen on a Unix socket, which peers on this machine prefer.

    Raises:
        LinkError: every port of ``ports`` is taken.
        ConfigError: both a port and a range were given.
    """

    def __init__(
        self, host: str, port: int = 0, *, ports: tuple[int, int] | None = None, unix: bool = True
    ) -> None:  # fmt: skip
        if port and ports is not None:
            raise ConfigError(f"A listener takes port={port} or ports={ports!r}, not both. Leave one of them out.")
        tcp = _listen_tcp(host, port) if ports is None else _listen_within(host, *ports)
        self._folder: Path | None = None
        self.sockets = [tcp]
        unix_name = self._listen_unix() if unix and hasattr(socket, "AF_UNIX") else ""
        own_host, own_port = tcp.getsockname()[:2]
        self._address = Address(own_host, own_port, unix_name, machine())

    @property
    def address(self) -> Address:
        """To hand to the peers."""
        return self._address

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        for sock in self.sockets:
            sock.close()
        if self._folder is not None:
            Path(self._address.unix).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._folder.rmdir()

    def __enter__(self) -> SocketListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen_unix(self) -> str:
        """Its name; "" where the system has no Unix sockets for us: then everybody takes TCP."""
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
        enlarge_buffers(sock)  # accepted sockets inherit them; later is too late for the window scale
        sock.bind((host, port))
        _start(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_within(host: str, low: int, high: int) -> socket.socket:
    """On the first free port, lowest first, so that a firewall's small range fills without gaps."""
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
    """Ask for 4 MiB each way, unless the system would cut that down: its own tuning reaches more then."""
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core") / name
        if not limit.exists() or int(limit.read_text()) >= BUFFER_BYTES:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
