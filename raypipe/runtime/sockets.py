"""Opening the links of one worker over TCP: who connects to whom, and how both ends make sure of it.

Every direction has a connection of its own, opened by its sender to the receiver's listener:

    sender                          receiver
      | connect ---------------------> |   (the kernel accepts; nobody has to be ready)
      | hello: run, generation,        |
      |   from, to, max_tensors -----> |   checked; a stranger is closed and forgotten
      | <------------------ one byte   |   welcome: both know that the link stands

The listener outlives generations. A hello of an older generation, of another run or of no run at
all is closed without disturbing anybody; whoever was closed and is alive tries again until its own
deadline, so workers may enter a generation in any order. A hello of a *newer* generation says that
this opening is obsolete and ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from raypipe.errors import LinkError
from raypipe.runtime.socket_channel import SocketChannel

__all__ = ["SocketChannel", "SocketListener", "open_channels"]

BUFFER_BYTES = 4 << 20
RETRY_S = 0.02

_HELLO = struct.Struct("<4sH16sIIIH")  # magic, version, run, generation, from, to, max_tensors
_MAGIC, _VERSION, _WELCOME = b"RPHI", 1, b"\1"


class SocketListener:
    """Where the peers of one worker connect, for as many generations as the worker lives.

    Args:
        host: address to listen on; IPv4 or IPv6.
        port: 0 lets the system choose; see ``address``.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _enlarge_buffers(self.socket)  # accepted sockets inherit them; later is too late for the window scale
            self.socket.bind((host, port))
            self.socket.listen(128)
            self.socket.setblocking(False)
        except OSError:
            self.socket.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to hand to the peers."""
        host, port = self.socket.getsockname()[:2]
        return host, port

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> SocketListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_channels(
    listener: SocketListener,
    me: int,
    peers: Mapping[int, tuple[str, int]],
    generation: int,
    run_id: str | bytes,
    max_tensors: int | Mapping[int, int],
    timeout_s: float,
    names: Mapping[int, str] | None = None,
) -> dict[int, SocketChannel]:
    """Open the links of worker ``me`` to all its peers; each of them does the same.

    Args:
        listener: of this worker; stays open.
        me: number of this worker in the plan.
        peers: listener address of each peer, by worker number.
        generation: of the plan.
        run_id: equal on all workers of a run, and of no other run.
        max_tensors: most tensors per message, for all peers or by peer; both ends must say the same.
        timeout_s: deadline for all links together.
        names: of the channels, by peer.

    Raises:
        LinkError: a peer could not be reached in time, is gone, or has a newer generation; no
            connection is left open.
    """
    limits = max_tensors if isinstance(max_tensors, Mapping) else dict.fromkeys(peers, max_tensors)
    run = hashlib.blake2b(run_id if isinstance(run_id, bytes) else run_id.encode(), digest_size=16).digest()
    hellos = {peer: _Hello(run, generation, me, peer, limits[peer]) for peer in peers}
    opening = _Opening(listener, peers, hellos, time.monotonic() + timeout_s)
    try:
        opening.run(timeout_s)
        return {
            peer: SocketChannel(
                (names or {}).get(peer, f"worker {me} <-> worker {peer}"),
                generation,
                limits[peer],
                _ready(opening.outgoing.pop(peer)),
                _ready(opening.incoming.pop(peer)),
            )
            for peer in peers
        }
    finally:
        opening.close()


class _Hello(NamedTuple):
    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, _VERSION, *self)


class _Opening:
    """The state of one ``open_channels``: one thread, one selector, nothing that a stranger can hold up."""

    def __init__(
        self,
        listener: SocketListener,
        peers: Mapping[int, tuple[str, int]],
        hellos: Mapping[int, _Hello],
        deadline_s: float,
    ) -> None:
        self.peers, self.hellos, self.deadline_s = peers, hellos, deadline_s
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.strangers: dict[socket.socket, bytes] = {}  # accepted, with the part of their hello that came
        self.welcomed: set[int] = set()
        self.retry_at_s = dict.fromkeys(peers, 0.0)
        self.listener = listener.socket
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def run(self, timeout_s: float) -> None:
        while len(self.welcomed) < len(self.peers) or len(self.incoming) < len(self.peers):
            now_s = time.monotonic()
            if now_s >= self.deadline_s:
                self._raise_late(timeout_s)
            for peer, at_s in list(self.retry_at_s.items()):
                if now_s >= at_s:
                    self._connect(peer)
            wait_s = min([self.deadline_s, *self.retry_at_s.values()]) - time.monotonic()
            for key, _ in self.selector.select(max(wait_s, 0.0)):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.data is None:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._await_welcome(key.data)

    def close(self) -> None:
        self.selector.close()
        for sock in (*self.strangers, *self.outgoing.values(), *self.incoming.values()):
            sock.close()

    def _connect(self, peer: int) -> None:
        """Connect and say hello; the welcome comes later, so that two workers do not wait for each other."""
        host, port = self.peers[peer]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            _enlarge_buffers(sock)
            sock.settimeout(max(self.deadline_s - time.monotonic(), 0.001))
            sock.connect((host, port))
            sock.sendall(self.hellos[peer].pack())
        except OSError as error:
            sock.close()
            raise LinkError(
                f"worker {self.hellos[peer].sender} cannot connect to worker {peer} at {host}:{port}: {error}. "
                "It died, or a firewall is between them."
            ) from error
        del self.retry_at_s[peer]
        self.outgoing[peer] = sock
        self.selector.register(sock, selectors.EVENT_READ, peer)

    def _await_welcome(self, peer: int) -> None:
        sock = self.outgoing[peer]
        self.selector.unregister(sock)
        with contextlib.suppress(OSError):
            if sock.recv(1) == _WELCOME:
                self.welcomed.add(peer)
                return
        # Closed: the peer is in another generation still, or gone, which the next connect will tell.
        self.outgoing.pop(peer).close()
        self.retry_at_s[peer] = time.monotonic() + RETRY_S

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            sock.setblocking(False)
            self.strangers[sock] = b""
            self.selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        """Read what there is of a hello; when it is whole, welcome its sender or close it."""
        try:
            part = sock.recv(_HELLO.size - len(self.strangers[sock]))
        except OSError:
            part = b""
        said = self.strangers[sock] + part
        if part and len(said) < _HELLO.size:
            self.strangers[sock] = said
            return
        del self.strangers[sock]
        self.selector.unregister(sock)
        hello = _Hello(*_HELLO.unpack(said)[2:]) if len(said) == _HELLO.size else None
        if hello is None or not said.startswith(struct.pack("<4sH", _MAGIC, _VERSION)) or not self._expected(hello):
            sock.close()
            return
        try:
            sock.send(_WELCOME)
        except OSError:
            sock.close()
            return
        if hello.sender in self.incoming:  # it tried again, so the first connection is dead
            self.incoming.pop(hello.sender).close()
        self.incoming[hello.sender] = sock

    def _expected(self, hello: _Hello) -> bool:
        mine = self.hellos.get(hello.sender)
        if mine is None or hello.run != mine.run or hello.receiver != mine.sender:
            return False
        if hello.generation > mine.generation:
            raise LinkError(
                f"worker {hello.sender} opens generation {hello.generation} while worker {mine.sender} "
                f"opens generation {mine.generation}, which is obsolete."
            )
        if hello.generation == mine.generation and hello.max_tensors != mine.max_tensors:
            raise LinkError(
                f"worker {hello.sender} sends up to {hello.max_tensors} tensors per message, "
                f"worker {mine.sender} expects up to {mine.max_tensors}: they do not run the same plan."
            )
        return hello.generation == mine.generation

    def _raise_late(self, timeout_s: float) -> None:
        silent = sorted(set(self.peers) - self.incoming.keys())
        deaf = sorted(set(self.peers) - self.welcomed)
        raise LinkError(
            f"links not open after {timeout_s:g} s: no connection from workers {silent}, "
            f"no welcome from workers {deaf}. They hang, are cut off, or belong to another run or generation."
        )


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _enlarge_buffers(sock: socket.socket) -> None:
    """Ask for 4 MiB each way, unless the system would cut that down: its own tuning reaches more then."""
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core") / name
        if not limit.exists() or int(limit.read_text()) >= BUFFER_BYTES:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
