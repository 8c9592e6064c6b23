"""Links through torch's process groups: two ranks for each link and direction, over gloo, or NCCL between GPUs.

    worker 0                                           worker 1
    TCPStore <------ here, and on which port ---------- client      the groups' rendezvous, in the lower of the workers
    sockets  <====== handshake, headers, ends =======>  sockets     as over "tcp", with proof of both ends
    group 0 -> 1: rank 0 ===== payloads =============>  rank 1      made in the same order on both sides,
    group 1 -> 0: rank 1 <============ payloads ======  rank 0      smaller pairs of workers first

Groups are made for one link and one opening of it, never registered with torch.distributed, and never the default
group: a link can end and be made anew while others live, in the same process.

Ends prove that they have the run's secret before a group is made. **Other programs cannot join the training, but they
can disturb it**: torch's store and gloo's ports accept any connection, and a message of a wrong size ends a process.
Use this transport on a trusted network. The groups' own ports cannot be confined to a range.

``GlooGroup`` works around the limits of gloo:

    a message of another size than its receive    it ends the process: a receive is posted for the size in the header
    an expired wait closes the pair for good      waits are very long; the inbox has the deadlines
    abort() does nothing to a wait                shutdown(2) on the group's own socket ends it at once
    it may lose a send while the peer closes      a closing end lingers a moment (channel); and see SEND_END

An NCCL communicator is made without blocking, on one named device; a thread that waits for a transfer polls an event
of its stream and the link's abort flag. On abort, a separate thread aborts the communicator, which may take a while,
and no later link waits for it. NCCL refuses two ranks on one GPU, unless their processes have different NCCL_HOSTIDs:
tests/gpu/test_nccl.py is to join two that way. **Never run on a GPU**.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from raypipe.engine.device.device import Device
from raypipe.engine.messages.channel import Channel
from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.handshake import run_digest
from raypipe.runtime.transport.listener import Address, SocketListener, choose_congestion_control
from raypipe.runtime.transport.process_group_channel import DeviceGroupChannel, PayloadGroup, ProcessGroupChannel
from raypipe.runtime.transport.socket_channel import Connections
from raypipe.runtime.transport.tcp import open_links

LEAST_NCCL = (2, 19, 1)
"""Oldest NCCL whose communicator can be aborted from another thread while it is made or waits."""
POLL_S = 50e-6
"""Pause after the first poll of a transfer; doubled after each poll, up to MOST_POLL_S."""
MOST_POLL_S = 1e-3
AWAIT_S = 0.01
NO_END = timedelta(days=365)
SEND_END = timedelta(minutes=10)
"""Deadline of one send. Without it, 1 in 300 to 1 in 25 sends while the peer ends would never finish in gloo."""
_LOOKING = threading.Lock()
"""Lock for listing this process's sockets: two threads would count each other's temporary duplicates."""


def why_no_nccl() -> str:
    """Return the reason why this process cannot make links over NCCL, with a remedy; "" if it can."""
    if not torch.distributed.is_nccl_available():
        return (
            f"torch {torch.__version__} is built without NCCL. Install one for CUDA on Linux, or take transport='tcp'."
        )
    version = torch.cuda.nccl.version()
    if version < LEAST_NCCL:
        had, least = (".".join(map(str, version)) for version in (version, LEAST_NCCL))
        return (
            f"torch has NCCL {had}, whose links cannot be aborted when a worker dies. Install a torch with NCCL "
            f"{least} or newer, or take transport='tcp'."
        )
    return ""


class _At(NamedTuple):
    """Address of an endpoint.

    Attributes:
        sockets: address of its listener.
        store: host and port of its TCPStore.
        gpu: globally unique id of its GPU; "" if it computes on the CPU.
    """

    sockets: Address
    store: tuple[str, int]
    gpu: str


class ProcessGroupEndpoint:
    """Endpoint of "collective": gloo between CPUs, NCCL between GPUs.

    Args:
        host: address under which the peers reach this endpoint.
        ports: lowest and highest port of its sockets; the ports of the groups cannot be confined.
        device: device of its stages: gloo for the CPU, NCCL for any other.

    Attributes:
        refuses_shared_gpu: False lets two workers on one GPU try, for tests; see the module.

    Raises:
        ConfigError: NCCL is needed, and missing or too old.
    """

    refuses_shared_gpu = True

    def __init__(self, host: str, ports: tuple[int, int] | None, device: Device) -> None:
        if not device.immediate and (reason := why_no_nccl()):
            raise ConfigError(f"transport='collective': {reason}")
        self._device, self._listener = device, SocketListener(host, ports=ports)
        self._store: TCPStore | None
        self._store, at = _rendezvous(host)
        gpu = "" if device.immediate else str(torch.cuda.get_device_properties(device.place).uuid)
        self.address = _At(self._listener.address, at, gpu)

    def open(self, opening: LinkSetup) -> Mapping[int, Channel]:
        """Open the links; see Endpoint.open.

        Raises:
            LinkError: see Endpoint.open; or two workers share a GPU.
            ConfigError: link_checksum="on" between GPUs.
        """
        me, peers = opening.me, {peer: _At(*address) for peer, address in opening.addresses.items()}
        gpu = self.address.gpu
        if gpu and opening.checksum == "on":
            raise ConfigError(
                "link_checksum='on' is not possible with transport='collective' between GPUs, whose payloads do "
                "not pass through a CPU. Leave it out, or take transport='tcp'."
            )
        for peer, at in peers.items():
            if gpu and at.gpu == gpu and self.refuses_shared_gpu:
                raise LinkError(
                    f"workers {me} and {peer} share a GPU, between which NCCL makes no link. Take transport='tcp', or "
                    "give each worker a GPU of its own."
                )
        deadline_s = time.monotonic() + opening.timeout_s

        def channel(peer: int, connections: Connections) -> ProcessGroupChannel:
            groups = self._groups(opening, peer, peers[peer], connections.incoming, deadline_s)
            if gpu:
                return DeviceGroupChannel(connections, groups, self._device)
            return ProcessGroupChannel(connections, groups, opening.checksum)

        sockets = {peer: at.sockets for peer, at in peers.items()}
        return open_links(self._listener, opening, sockets, make=channel)

    def close(self) -> None:
        """End the rendezvous and the listener; open links do not need them."""
        self._store = None
        self._listener.close()

    def _groups(
        self, opening: LinkSetup, peer: int, at: _At, incoming: socket.socket, deadline_s: float
    ) -> tuple[PayloadGroup, PayloadGroup]:
        """Create (group for sending, group for receiving); the peer creates them in the same order.

        Args:
            at: address of the peer's endpoint.
            incoming: connection from the peer, watched for its end.
            deadline_s: ``time.monotonic()`` by which the groups have to be made.
        """
        me, low = opening.me, min(opening.me, peer)
        host, port = self.address.store if me == low else at.store
        name = f"{run_digest(opening.run_id).hex()}/{low}-{max(me, peer)}/{opening.generation}"
        try:
            left = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
            link = PrefixStore(name, store)
            _await_peer(link, me, peer, incoming, deadline_s)
            groups = (
                self._nccl(link, me, peer, deadline_s) if self.address.gpu else self._gloo(link, me, peer, deadline_s)
            )
        except (RuntimeError, OSError) as error:
            why = str(error).splitlines()[0][:200]
            raise LinkError(f"worker {me} cannot make its process groups with worker {peer}: {why}") from error
        return groups[me], groups[peer]

    def _gloo(self, store: Any, me: int, peer: int, deadline_s: float) -> dict[int, PayloadGroup]:
        device, port = _gloo_device(self.address.store[0])
        store.set(f"port/{me}", f"{port} {self.address.store[0]}")
        theirs_port, theirs_host = store.get(f"port/{peer}").decode().split(" ", 1)
        groups: dict[int, PayloadGroup] = {}
        try:
            for sender in sorted((me, peer)):
                ends = port, (theirs_host, int(theirs_port))
                group_store = PrefixStore(f"from {sender}", store)
                groups[sender] = GlooGroup(group_store, 0 if sender == me else 1, device, ends, deadline_s)
        except BaseException:
            for group in groups.values():
                group.abort()
                group.close()
            raise
        return groups

    def _nccl(self, store: Any, me: int, peer: int, deadline_s: float) -> dict[int, PayloadGroup]:
        groups: dict[int, PayloadGroup] = {}
        with self._device.prepare_thread():
            for sender in sorted((me, peer)):
                left_s = max(deadline_s - time.monotonic(), 1.0)
                rank = 0 if sender == me else 1
                groups[sender] = NcclGroup(PrefixStore(str(sender), store), rank, self._device.place, left_s)
            for sender in sorted((me, peer)):  # one byte each way shows that both ends work
                proof = self._device.empty(1, torch.uint8).fill_(0)
                groups[sender].send(proof) if sender == me else groups[sender].recv(proof)
        return groups


class GlooGroup:
    """Group of two ranks over one connection of gloo, one of which sends; see PayloadGroup.

    Args:
        store: rendezvous of this link, generation and direction.
        rank: rank of this process; rank 0 sends.
        device: gloo's device for this end of the link.
        ends: port of ``device``; host and port of the peer's device.
        deadline_s: ``time.monotonic()`` by which the connection has to be made.
    """

    def __init__(
        self, store: Any, rank: int, device: Any, ends: tuple[int, tuple[str, int]], deadline_s: float
    ) -> None:
        with _LOOKING:
            before = {sock.inode for sock in _own_sockets()}
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = 1  # for collectives, which links do not use
        options._timeout = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._peer = 1 - rank
        self._aborted = threading.Event()
        self.sockets = _connections(*ends, before)
        try:
            if len(self.sockets) != 1:
                many = len(self.sockets)
                raise LinkError(f"gloo has {many} sockets instead of one: an unknown version of torch.")
            choose_congestion_control(self.sockets[0])
        except BaseException:
            self.abort()
            self.close()
            raise

    def send(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.send, payload, SEND_END)

    def recv(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.recv, payload, NO_END)

    def abort(self) -> None:
        self._aborted.set()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self._group = None  # its sockets and threads end with the last reference

    def _transfer(self, method: Any, payload: torch.Tensor, timeout: timedelta) -> None:
        if self._aborted.is_set():
            raise ConnectionError("it was aborted")
        try:
            method([payload], self._peer, 0).wait(timeout)
        except RuntimeError as error:  # without gloo's file names and its advice
            raise ConnectionError(str(error).partition("] ")[2].partition(". ")[0] or str(error)) from error


class NcclGroup:
    """Group of two ranks over NCCL, one of which sends; see PayloadGroup.

    Args:
        store: rendezvous of this link, generation and direction.
        rank: rank of this process; rank 0 sends.
        device: device of this rank, which must be the current device of the thread.
        timeout_s: timeout for creating the communicator.
    """

    def __init__(self, store: Any, rank: int, device: torch.device, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options: Any = ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=timeout_s)
        self._aborted = threading.Event()
        self._rank = rank
        self._group: Any = ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.send, payload)

    def recv(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.recv, payload)

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._group.abort, name="raypipe aborts NCCL", daemon=True).start()

    def close(self) -> None:
        """Do nothing: the communicator ends with the last reference to it, once its abort is over."""

    def _transfer(self, method: Any, payload: torch.Tensor) -> None:
        if self._aborted.is_set():
            raise ConnectionError("it was aborted")
        try:
            method([payload], 1 - self._rank, 0).wait()  # makes the current stream wait, not this thread
            done = torch.cuda.Event()
            done.record()
            pause_s = POLL_S
            while not done.query():
                if self._aborted.is_set():
                    raise ConnectionError("it was aborted")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_POLL_S)
        except RuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0][:200]) from error


def _await_peer(store: Any, me: int, peer: int, incoming: socket.socket, deadline_s: float) -> None:
    """Wait until the peer is about to create the groups too; the peer may fail before, in a wait for another worker.

    Args:
        store: rendezvous of the link, in which each end announces itself by its worker number, ``me`` or ``peer``.
        incoming: connection from the peer, watched for its end.
        deadline_s: ``time.monotonic()`` by which the peer has to come.

    Raises:
        ConnectionError: the peer closed its connection, or did not come in time.
    """
    store.set(f"here/{me}", "")
    while not store.check([f"here/{peer}"]):
        with contextlib.suppress(BlockingIOError):
            if not incoming.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError("it closed the link while it was opened")
        if time.monotonic() > deadline_s:
            raise ConnectionError("it did not come to the rendezvous in time")
        time.sleep(AWAIT_S)


def _rendezvous(host: str) -> tuple[TCPStore, tuple[str, int]]:
    """Create a TCPStore on a port that the system chooses; return it and its (host, port)."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        address: tuple[str, int] = listener.getsockname()[:2]
        store = TCPStore(host, address[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, address
    finally:
        listener.close()


def _gloo_device(host: str) -> tuple[Any, int]:
    """Create a gloo device; return (device, its port). The port is found in this process's list of sockets."""
    with _LOOKING:
        before = {sock.inode for sock in _own_sockets()}
        device = ProcessGroupGloo.create_device(hostname=host)
        ports = [sock.local[1] for sock in _own_sockets() if sock.listens and sock.inode not in before]
    if len(ports) != 1:
        raise LinkError(f"gloo's device opened {len(ports)} ports instead of one: an unknown version of torch.")
    return device, ports[0]


class _OwnSocket(NamedTuple):
    fd: int
    inode: int
    listens: bool
    local: tuple[str, int]
    peer: tuple[str, int] | None


def _connections(mine: int, theirs: tuple[str, int], before: set[int]) -> list[socket.socket]:
    """Duplicate this process's new connections between two gloo devices; a duplicate stays open if gloo closes its own.

    Args:
        mine: port of this end's device.
        theirs: host and port of the peer's device.
        before: inodes of the sockets that existed before the connection was made.
    """
    with _LOOKING:
        new = [s for s in _own_sockets() if s.inode not in before and s.peer is not None]
        descriptors = {s.inode: s.fd for s in new if s.local[1] == mine or s.peer == theirs}
        return [copy for fd in descriptors.values() if (copy := _duplicate(fd)) is not None]


def _own_sockets() -> list[_OwnSocket]:
    """List the TCP sockets that this process has open."""
    sockets = []
    for path in Path("/proc/self/fd").iterdir():
        fd = int(path.name)
        copy = _duplicate(fd)
        if copy is None:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                inode = os.fstat(copy.fileno()).st_ino
                listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                sockets.append(_OwnSocket(fd, inode, listens, _plain(copy.getsockname), _peer_of(copy)))
    return sockets


def _duplicate(fd: int) -> socket.socket | None:
    """Duplicate the descriptor of a socket, so that it stays open; return None if it is closed or not a socket.

    Files are not touched: closing a file's duplicate would drop all of this process's locks on it.

    Raises:
        OSError: this process has no descriptor left.
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
    except OSError:  # a kind of socket without names
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
