"""TCP links: opens the links of one worker over TCP and Unix sockets; both ends prove that they have the run's secret.

Each direction has its own connection, opened by its sender to the receiver's listener, over the Unix
socket if both are on one machine and over TCP otherwise:

    sender                             receiver
      | connect --------------------------> |   (the kernel accepts; the worker need not be ready)
      | <-- handshake (handshake.py) -----> |   connections without the secret are closed
      | messages =========================> |

The listener stays open when links are opened again, which counts as a new generation. A connection with a greeting of
an older generation, of another run or of no run is closed without effect on others. Its caller tries again until its
own deadline, so workers may begin to open in any order. A proven greeting of a *newer* generation ends this opening.

If a connection is reset before the caller has read the welcome, the answerer, which sent it, still assumes an open
link. So the answerer checks its connections before it returns, and waits for another one if one was reset. If the reset
comes later, the answerer accepts no further connection. Therefore an end that saw a reset after the caller's proof
waits only DOUBT_S for the peer, and then reports the link as lost: all links are opened again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from raypipe.engine.device.device import CPU, Device
from raypipe.engine.messages.channel import Channel
from raypipe.engine.messages.frame import FrameFormat
from raypipe.errors import LinkError
from raypipe.runtime.transport.device_memory import share_slots
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.handshake import Answer, Conversation, LinkIdentity, answer, call, run_digest
from raypipe.runtime.transport.listener import (
    Address,
    SocketListener,
    check_reachable,
    choose_congestion_control,
    enlarge_buffers,
    same_machine,
)
from raypipe.runtime.transport.process_group_channel import DeviceGroupChannel
from raypipe.runtime.transport.shared_memory import SharedMemoryChannel
from raypipe.runtime.transport.socket_channel import Connections, SocketChannel

RETRY_S = 0.02

CONNECT_AGAIN_S = 0.25
"""Seconds after which a connection that was not accepted is retried, doubled each time: a listener whose queue is full
drops connections, and the system itself retries only after 1, 3 and 7 s."""

ACCEPTED_AT_ONCE = 16

GUEST_S = 5.0
"""Time limit for a caller to prove that it has the secret."""

DOUBT_S = 5.0
"""Time limit for a peer to connect or answer again after a reset."""

GUESTS = 64
"""Maximum number of unproven incoming connections, in addition to one for each peer. If there is one more, the oldest
that has not sent a peer's greeting is closed, or the oldest of all if every one has sent a greeting."""

_PENDING = (0, errno.EINPROGRESS, errno.EINTR)


def open_links(
    listener: SocketListener,
    opening: LinkSetup,
    peers: Mapping[int, Address | tuple[str, int]] | None = None,
    *,
    make: Callable[[int, Connections], Any] | None = None,
) -> dict[int, Any]:
    """Open the links of one worker to all its peers, while each peer does the same.

    Messages themselves are neither encrypted nor authenticated.

    Args:
        listener: this worker's listener; stays open.
        opening: settings of the links; its secret has 16 random bytes or more.
        peers: ``SocketListener.address`` of each peer; None for ``opening.addresses``. (host, port) suffices for TCP
            alone.
        make: called with (peer, connections) to create a channel, which owns these; None creates a SocketChannel.

    Returns:
        The channels, by worker number of the peer.

    Raises:
        LinkError: a peer could not be reached in time, is gone, has a newer generation or another plan, or has an
            address by which other machines cannot reach it; no connection is left open.
    """
    me, generation, limits = opening.me, opening.generation, opening.capacity
    places = {peer: Address(*address) for peer, address in (opening.addresses if peers is None else peers).items()}
    check_reachable(me, listener.address, places)
    hellos = {peer: LinkIdentity(run_digest(opening.run_id), generation, me, peer, limits[peer]) for peer in places}
    way = _LinkOpener(listener, places, hellos, opening.secret, opening.timeout_s)
    channels: dict[int, Any] = {}
    try:
        way.run()
        for peer in sorted(places, key=lambda peer: (min(me, peer), max(me, peer))):  # all workers in one order
            form, out, into = FrameFormat(generation, limits[peer]), way.outgoing[peer], way.incoming[peer]
            connections = Connections(opening.names[peer], form, _ready(out), _ready(into))
            channels[peer] = SocketChannel(connections, opening.checksum) if make is None else make(peer, connections)
            del way.outgoing[peer], way.incoming[peer]  # the channel owns them
        return {peer: channels[peer] for peer in places}
    except BaseException:
        for channel in channels.values():
            channel.abort("another link could not be opened")
            channel.close()
        raise
    finally:
        way.close()


class SocketEndpoint:
    """Endpoint of "tcp", and with ``share_memory`` of "auto"; all workers of a run have the same one.

    Args:
        share_memory: share the host's memory, and that of devices, with peers of the same host.
        device: device of the stages; all workers of a run have the same kind.
    """

    def __init__(
        self, host: str, ports: tuple[int, int] | None, *, share_memory: bool = False, device: Device = CPU
    ) -> None:
        self._listener = SocketListener(host, ports=ports)
        self.address = self._listener.address
        self._shares, self._device = share_memory, device

    def open(self, opening: LinkSetup) -> Mapping[int, Channel]:
        def make(_: int, ends: Connections) -> Channel:
            if not self._shares:
                return SocketChannel(ends, opening.checksum)
            local = all(sock.family == socket.AF_UNIX for sock in (ends.outgoing, ends.incoming))
            if local and not self._device.immediate and opening.checksum != "on":
                groups = share_slots(ends, self._device, opening.timeout_s)
                if groups is not None:
                    return DeviceGroupChannel(ends, groups, self._device)
            return SharedMemoryChannel(ends, opening.checksum)

        return open_links(self._listener, opening, make=make)

    def close(self) -> None:
        self._listener.close()


class _Handshake:
    """Connection during its handshake.

    Args:
        steps: this end's side of the conversation.
        peer: worker to which the connection was opened; None for an incoming connection.
        until_s: ``time.monotonic()`` by which the handshake has to make progress.
    """

    def __init__(self, sock: socket.socket, steps: Conversation, peer: int | None, until_s: float) -> None:
        self.sock, self.steps, self.peer, self.until_s = sock, steps, peer, until_s
        self.turns, self.received, self.wanted_bytes = 0, b"", 0

    @property
    def greeted(self) -> bool:
        """True once an incoming connection has sent the greeting of a peer."""
        return self.turns > 1

    def step(self) -> Answer | None:
        """Continue the conversation with the bytes read, and send its next message.

        Returns the Answer at the end of the conversation, else None.

        Raises:
            OSError: the connection broke, or does not accept even the few bytes of a handshake.
        """
        received = self.received
        while True:
            try:
                turn = self.steps.send(received) if self.turns else next(self.steps)
            except StopIteration as end:
                return end.value
            self.turns += 1
            if turn.message and self.sock.send(turn.message) != len(turn.message):
                raise BlockingIOError
            if turn.wanted_bytes:
                self.received, self.wanted_bytes = b"", turn.wanted_bytes
                return None
            received = b""

    def read(self) -> Answer | None:
        """Read available bytes; continue the conversation once all the bytes that it needs have come.

        Returns the Answer at the end of the conversation, else None.

        Raises:
            OSError: the connection ended or broke.
        """
        with contextlib.suppress(BlockingIOError):
            part = self.sock.recv(self.wanted_bytes - len(self.received))
            if not part:
                raise ConnectionError
            self.received += part
        return self.step() if len(self.received) == self.wanted_bytes else None


class _LinkOpener:
    """State of one ``open_links``, in one thread with one selector. Connections without the secret delay nothing."""

    def __init__(
        self,
        listener: SocketListener,
        peers: Mapping[int, Address],
        hellos: Mapping[int, LinkIdentity],
        secret: bytes,
        timeout_s: float,
    ) -> None:
        self.peers, self.hellos, self.secret, self.timeout_s = peers, hellos, secret, timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.calls: dict[int, _Handshake] = {}  # by peer
        self.guests: dict[_Handshake, None] = {}  # oldest first
        self.unproven: set[int] = set()  # peers whose number a caller without the secret used
        self.doubts_until_s: dict[tuple[int, int], float] = {}  # by sender and receiver, of links that were reset
        self.unix = {peer for peer, at in peers.items() if at.unix and same_machine(at, listener.address)}
        self.retry_at_s = dict.fromkeys(peers, 0.0)
        self.patience_s = dict.fromkeys(peers, CONNECT_AGAIN_S)
        self.selector = selectors.DefaultSelector()
        for sock in listener.sockets:
            self.selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        while not self._open():
            now_s = time.monotonic()
            if now_s >= self.deadline_s:
                self._raise_late()
            for ends in (ends for ends, until_s in self.doubts_until_s.items() if now_s >= until_s):
                self._raise_reset(*ends)
            for guest in [guest for guest in self.guests if now_s >= guest.until_s]:
                self._drop(guest)
            for talk in [talk for talk in self.calls.values() if now_s >= talk.until_s]:
                self._call_again(talk)
            for peer, at_s in list(self.retry_at_s.items()):
                if now_s >= at_s:
                    self._connect(peer)
            talks = (*self.guests, *self.calls.values())
            times_s = (*self.retry_at_s.values(), *self.doubts_until_s.values(), *(talk.until_s for talk in talks))
            next_s = min([self.deadline_s, *times_s])
            for key, _ in self.selector.select(max(next_s - time.monotonic(), 0.0)):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data in self.guests or self.calls.get(key.data.peer) is key.data:  # else dropped just now
                    self._go_on(key.data, connecting=bool(key.events & selectors.EVENT_WRITE))

    def _open(self) -> bool:
        """Return True if all links are open; drop incoming connections that were reset since their handshake."""
        if len(self.outgoing) < len(self.peers) or len(self.incoming) < len(self.peers):
            return False
        for peer, sock in list(self.incoming.items()):
            try:
                sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError:
                self.incoming.pop(peer).close()
                self._doubt(self._ends(peer, outgoing=False))
        return len(self.incoming) == len(self.peers)

    def close(self) -> None:
        self.selector.close()
        talks = (*self.calls.values(), *self.guests)
        for sock in (*(talk.sock for talk in talks), *self.outgoing.values(), *self.incoming.values()):
            sock.close()

    def _connect(self, peer: int) -> None:
        """Begin to connect to a peer; the selector reports the result."""
        del self.retry_at_s[peer]
        at, over_unix = self.peers[peer], peer in self.unix
        family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
        sock = socket.socket(socket.AF_UNIX if over_unix else family)
        sock.setblocking(False)
        enlarge_buffers(sock)
        until_s = time.monotonic() + self.patience_s[peer]
        self.calls[peer] = talk = _Handshake(sock, call(self.hellos[peer], self.secret), peer, until_s)
        choose_congestion_control(sock)
        try:
            code = sock.connect_ex(at.unix_path() if over_unix else (at.host, at.port))
        except OSError as error:  # a name that has no address
            code = error.errno or errno.EADDRNOTAVAIL
        if code in _PENDING:
            self.selector.register(sock, selectors.EVENT_WRITE, talk)
        else:
            self._cannot_connect(talk, code)

    def _call_again(self, talk: _Handshake) -> None:
        """Retry a connection that was not accepted."""
        assert talk.peer is not None
        self.patience_s[talk.peer] *= 2
        self.retry_at_s[talk.peer] = 0.0
        self._drop(talk)

    def _cannot_connect(self, talk: _Handshake, code: int) -> None:
        peer = talk.peer
        assert peer is not None
        self._drop(talk)
        if peer in self.unix:
            self.unix.remove(peer)
            self.retry_at_s[peer] = 0.0
            return
        at = self.peers[peer]
        raise LinkError(
            f"worker {self.hellos[peer].sender} cannot connect to worker {peer} at {at.host}:{at.port}: "
            f"{os.strerror(code)}. It died, or a firewall is between them."
        )

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTED_AT_ONCE):
                sock, _ = listener.accept()
                sock.setblocking(False)
                guest = _Handshake(sock, answer(self.hellos, self.secret), None, time.monotonic() + GUEST_S)
                guest.step()
                self.guests[guest] = None
                self.selector.register(sock, selectors.EVENT_READ, guest)
                if len(self.guests) > GUESTS + len(self.peers):
                    silent = (other for other in self.guests if not other.greeted)
                    self._drop(next(silent, next(iter(self.guests))))

    def _go_on(self, talk: _Handshake, *, connecting: bool) -> None:
        try:
            if connecting:
                if code := talk.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._cannot_connect(talk, code)
                    return
                talk.until_s = self.deadline_s
                self.selector.modify(talk.sock, selectors.EVENT_READ, talk)
                done = talk.step()
            else:
                done = talk.read()
        except OSError as error:  # the peer is still in another generation, or gone; the next connect shows which
            if (
                isinstance(error, ConnectionResetError) and talk.peer is not None and talk.turns > 1
            ):  # a peer that refuses closes in order
                self._doubt(self._ends(talk.peer, outgoing=True))
            done = Answer(None, False)
        if done is None:
            return
        if done.proven and done.sender is not None:
            self._keep(talk, done.sender)
            return
        if done.sender is not None:
            self.unproven.add(done.sender)
        self._drop(talk)
        if talk.peer is not None:
            self.retry_at_s[talk.peer] = time.monotonic() + RETRY_S

    def _keep(self, talk: _Handshake, peer: int) -> None:
        self._forget(talk)
        kept = self.incoming if talk.peer is None else self.outgoing
        if peer in kept:  # the peer connected again, so the first connection is dead
            kept.pop(peer).close()
        kept[peer] = talk.sock
        self.doubts_until_s.pop(self._ends(peer, outgoing=talk.peer is not None), None)

    def _drop(self, talk: _Handshake) -> None:
        self._forget(talk)
        talk.sock.close()

    def _forget(self, talk: _Handshake) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(talk.sock)
        if talk.peer is None:
            del self.guests[talk]
        else:
            del self.calls[talk.peer]

    def _ends(self, peer: int, *, outgoing: bool) -> tuple[int, int]:
        me = self.hellos[peer].sender
        return (me, peer) if outgoing else (peer, me)

    def _doubt(self, ends: tuple[int, int]) -> None:
        self.doubts_until_s.setdefault(ends, time.monotonic() + DOUBT_S)

    def _raise_reset(self, sender: int, receiver: int) -> None:
        raise LinkError(
            f"the connection from worker {sender} to worker {receiver} was reset in the middle of its handshake, and "
            f"did not come back within {DOUBT_S:g} s: one end considers it open, or hangs. Open all links again."
        )

    def _raise_late(self) -> None:
        silent = sorted(set(self.peers) - self.incoming.keys())
        deaf = sorted(set(self.peers) - self.outgoing.keys())
        liars = sorted(self.unproven - (self.incoming.keys() & self.outgoing.keys()))
        raise LinkError(
            f"links not open after {self.timeout_s:g} s: no connection from workers {silent}, "
            f"no welcome from workers {deaf}. They hang, are cut off, or belong to another run or generation."
            + (f" Strangers greeted as workers {liars} without this run's secret." if liars else "")
        )


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
