"""Links through torch's collective library: two unregistered gloo groups per link and generation, one per direction.

    worker 0                                   worker 1
    TCPStore <----- here, and on which port -- client           rendezvous, in the lower of the two workers
    group 0 -> 1: rank 0 ===================== rank 1           made in the same order on both sides,
    group 1 -> 0: rank 1 ===================== rank 0           smaller pairs of workers first
        handshake.py, each way <============> and back          on the links themselves

Groups are made for one link, never registered with torch.distributed, and never the default group: a link can end and
be made anew while others live. Nothing here asks on which device a tensor lies but the channel behind it.

On each of the two groups both ends prove that they know the run's secret, as over "tcp"; who does not gets no tensor,
and the opening ends. **That keeps strangers out of the training, but they can still disturb it**: torch's store and
gloo's ports take any connection, and a message of a wrong size ends a process. Use this transport on a network that
you trust. gloo chooses its ports itself: they cannot be confined to a range.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from raypipe.errors import LinkError
from raypipe.runtime.links.addresses import machine
from raypipe.runtime.links.collective_channel import NOTICE, CollectiveChannel, Group, Groups, notice_of
from raypipe.runtime.links.congestion import choose_congestion_control
from raypipe.runtime.links.endpoint import Opening, is_checked
from raypipe.runtime.links.handshake import Conversation, Hello, Turn, answer, call, run_digest

__all__ = ["CollectiveEndpoint", "connect", "rendezvous"]

POLL_S = 0.01
_LOOKING = threading.Lock()
"""Held by whoever looks at this process's sockets: others would take the duplicates of that moment for sockets too."""


class CollectiveEndpoint:
    """The rendezvous of one worker, for as many generations as it lives.

    Args:
        host: address under which the peers reach this worker.
    """

    def __init__(self, host: str) -> None:
        self._store: TCPStore | None
        self._store, self.address = rendezvous(host)

    def open(self, opening: Opening) -> dict[int, CollectiveChannel]:
        """See Endpoint."""
        me, peers, timeout_s = opening.me, opening.addresses, opening.timeout_s
        run = run_digest(opening.run_id)
        deadline_s = time.monotonic() + timeout_s
        channels: dict[int, CollectiveChannel] = {}
        try:
            # Making a group waits for the peer, so all workers go through their pairs in one order.
            for peer in sorted(peers, key=lambda p: (min(me, p), max(me, p))):
                hello = Hello(run, opening.generation, me, peer, opening.capacity[peer])
                host, port = self.address if me < peer else peers[peer]
                try:
                    store = connect(host, port, deadline_s)
                    link = PrefixStore(f"{run.hex()}/{min(me, peer)}-{max(me, peer)}", store)
                    channels[peer] = _Opening(hello, link, deadline_s).run(self.address[0], opening)
                except (RuntimeError, OSError) as error:
                    why = str(error).splitlines()[0][:200]
                    raise LinkError(
                        f"worker {me} cannot open its link to worker {peer} at {host} within {timeout_s:g} s: {why}. "
                        "It died or hangs, a firewall is between them, or it belongs to another run or generation."
                    ) from error
        except BaseException:
            for channel in channels.values():
                channel.abort("another link could not be opened")
                channel.close()
            raise
        return channels

    def close(self) -> None:
        """End the rendezvous; open links go on without it."""
        self._store = None


def rendezvous(host: str) -> tuple[TCPStore, tuple[str, int]]:
    """A store on a port that the system chooses, and its address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        address: tuple[str, int] = listener.getsockname()[:2]
        store = TCPStore(host, address[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, address
    finally:
        listener.close()


class _Opening:
    """One link's way from a store to a channel."""

    def __init__(self, hello: Hello, store: Any, deadline_s: float) -> None:
        self.hello, self.store, self.deadline_s = hello, store, deadline_s
        self.mine = PrefixStore(str(hello.generation), store)

    def run(self, host: str, opening: Opening) -> CollectiveChannel:
        _, generation, me, peer, max_tensors = self.hello
        name = opening.names[peer]
        device, port = _make_device(host)
        self.mine.set(f"port/{me}", f"{port} {host} {machine()}")
        self._await_peer()
        theirs_port, theirs_host, theirs_machine = self.mine.get(f"port/{peer}").decode().split(" ", 2)
        with _LOOKING:
            before = {found.inode for found in _own_sockets()}
        groups = [self._group(device, sender) for sender in sorted((me, peer))]
        outgoing, incoming = groups if me < peer else groups[::-1]
        sockets = _connections(port, (theirs_host, int(theirs_port)), before)
        try:
            for sock in sockets:
                choose_congestion_control(sock)
            # The peer's words follow its receive for my notice on the same connection, so both stand after them.
            notice = notice_of()
            work = outgoing.post_recv(notice, NOTICE)
            self._prove(outgoing, incoming, opening.secret)
            if len(sockets) != 2:
                raise LinkError(f"{name}: gloo has {len(sockets)} sockets instead of two: an unknown version of torch.")
            checked = is_checked(opening.checksum, same_host=theirs_machine == machine())
            found = Groups(outgoing, incoming, sockets, notice, work)
            return CollectiveChannel(name, generation, max_tensors, found, checked=checked)
        except BaseException:
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # the peer need not wait for its deadline
                sock.close()
            raise

    def _await_peer(self) -> None:
        """Wait until the peer is in this generation too; a newer one makes this opening obsolete."""
        _, generation, me, peer, _ = self.hello
        # A key for each worker: of one that both raise, the slower writer would undo what the other one said.
        self.store.set(f"newest/{me}", str(generation))
        theirs = f"newest/{peer}"
        while not self.mine.check([f"port/{peer}"]):
            if self.store.check([theirs]) and int(self.store.get(theirs)) > generation:
                raise LinkError(
                    f"worker {peer} opens a newer generation than generation {generation} of worker {me}, "
                    "which is obsolete."
                )
            if time.monotonic() > self.deadline_s:
                raise ConnectionError("nobody came to the rendezvous")
            time.sleep(POLL_S)

    def _group(self, device: Any, sender: int) -> Group:
        """The group of one direction, its sender rank 0. Waits for the peer to make it too."""
        rank = 0 if self.hello.sender == sender else 1
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = 1  # for collectives, of which there are none
        options._timeout = self._left()
        return Group(ProcessGroupGloo(PrefixStore(f"from {sender}", self.mine), rank, 2, options), rank)

    def _prove(self, outgoing: Group, incoming: Group, secret: bytes) -> None:
        """Both handshakes of the link, turn by turn: this end calls where it sends, and answers where it receives.

        Raises:
            LinkError: the peer does not know the secret, or has another plan.
        """
        calling, answering = call(self.hello, secret), answer({self.hello.receiver: self.hello}, secret)
        asked, heard = next(calling), next(answering)
        replied = self._next(answering, self._swap(asked, outgoing, heard, incoming))
        proof = self._next(calling, self._swap(replied, incoming, asked, outgoing))
        welcome = self._next(answering, self._swap(proof, outgoing, replied, incoming))
        said = self._swap(welcome, incoming, proof, outgoing)
        for conversation, last in ((answering, b""), (calling, said)):
            try:
                conversation.send(last)
            except StopIteration as end:
                if not end.value.proven:
                    raise self._stranger() from None

    def _next(self, conversation: Conversation, heard: bytes) -> Turn:
        try:
            return conversation.send(heard)
        except StopIteration:
            raise self._stranger() from None

    def _swap(self, said: Turn, into: Group, wanted: Turn, source: Group) -> bytes:
        """Say what is next in one group and hear as much as is wanted in the other; the peer does the same."""
        words = torch.frombuffer(bytearray(said.say), dtype=torch.uint8)
        work, heard = into.post_send(words), torch.zeros(wanted.wanted_bytes, dtype=torch.uint8)
        source.recv(heard, self._left())
        work.wait(self._left())
        return heard.numpy().tobytes()

    def _stranger(self) -> LinkError:
        return LinkError(
            f"somebody calls itself worker {self.hello.receiver} at worker {self.hello.sender} without knowing this "
            "run's secret."
        )

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self.deadline_s - time.monotonic(), 0.001))


def connect(host: str, port: int, deadline_s: float) -> TCPStore:
    left = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)


def _make_device(host: str) -> tuple[Any, int]:
    """A gloo device and the port it listens on, which only this process's list of sockets tells."""
    with _LOOKING:
        before = {found.inode for found in _own_sockets()}
        device = ProcessGroupGloo.create_device(hostname=host)
        ports = [found.local[1] for found in _own_sockets() if found.listens and found.inode not in before]
    if len(ports) != 1:
        raise LinkError(f"gloo's device opened {len(ports)} ports instead of one: an unknown version of torch.")
    return device, ports[0]


class _Found(NamedTuple):
    fd: int
    inode: int
    listens: bool
    local: tuple[str, int]
    peer: tuple[str, int] | None


def _connections(mine: int, theirs: tuple[str, int], before: set[int]) -> list[socket.socket]:
    """Duplicates of this process's new connections between two devices: a plain number may pass to another socket."""
    with _LOOKING:
        new = [s for s in _own_sockets() if s.inode not in before and s.peer is not None]
        found = {s.inode: s.fd for s in new if s.local[1] == mine or s.peer == theirs}
        return [copy for fd in found.values() if (copy := _duplicate(fd)) is not None]


def _own_sockets() -> list[_Found]:
    """All TCP sockets that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        fd = int(path.name)
        copy = _duplicate(fd)
        if copy is None:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                inode = os.fstat(copy.fileno()).st_ino
                listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                found.append(_Found(fd, inode, listens, _plain(copy.getsockname), _peer_of(copy)))
    return found


def _duplicate(fd: int) -> socket.socket | None:
    """Another number for a socket, which nobody closes meanwhile; None for anything else and for what has been closed.

    Files are not touched: closing a file's duplicate would drop all of this process's locks on it.

    Raises:
        OSError: this process has no number left.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = os.dup(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    try:
        return socket.socket(fileno=copy)
    except OSError:  # of a kind that has no names
        os.close(copy)
        return None


def _peer_of(sock: socket.socket) -> tuple[str, int] | None:
    try:
        return _plain(sock.getpeername)
    except OSError:
        return None


def _plain(name: Callable[[], Any]) -> tuple[str, int]:
    host, port = name()[:2]
    return host.removeprefix("::ffff:"), port
