"""Links between GPUs through NCCL: torch's ProcessGroupNCCL, two ranks for each link and direction.

    worker 0                                           worker 1
    TCPStore <------ here, and on which port ---------- client      NCCL's rendezvous, in the lower of the two workers
    sockets  <====== handshake, headers, ends =======>  sockets     as over "tcp", which proves who is there
    group 0 -> 1: rank 0 ===== payloads =============>  rank 1      each with a communicator and a stream of its own
    group 1 -> 0: rank 1 <============ payloads ======  rank 0

A communicator is made without blocking, on one device that is named; whoever waits for a transfer looks at an event of
its stream, and at whether the link was given up. Then a thread of its own aborts the communicator, which may take a
while, and no later link waits for it: each generation has new groups under new names, in the same process.

NCCL refuses two ranks on one GPU. **No GPU has run this**; ``device_channel`` around it was tested over pipes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, TCPStore

from raypipe.engine.device import Device
from raypipe.engine.messages.channel import Channel
from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.links.collective import connect, rendezvous
from raypipe.runtime.links.device_channel import DeviceChannel
from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.handshake import run_digest
from raypipe.runtime.links.listener import SocketListener
from raypipe.runtime.links.tcp import Address, Opened, open_links

__all__ = ["LEAST_NCCL", "NcclEndpoint", "NcclGroup", "why_no_nccl"]

LEAST_NCCL = (2, 19, 1)
"""From which on a communicator can be aborted from another thread while it is made or waits."""
POLL_S = 50e-6
"""Between two looks at a transfer, at first; then twice as long every time, up to MOST_POLL_S."""
MOST_POLL_S = 1e-3


def why_no_nccl() -> str:
    """Why this process cannot make links over NCCL, with the cure; "" where it can."""
    if not torch.distributed.is_nccl_available():
        return (
            f"torch {torch.__version__} is built without NCCL. Install one for CUDA on Linux, or take transport='tcp'."
        )
    found = torch.cuda.nccl.version()
    if found < LEAST_NCCL:
        had, least = (".".join(map(str, version)) for version in (found, LEAST_NCCL))
        return (
            f"torch has NCCL {had}, whose links cannot be given up when a worker dies. Install a torch with NCCL "
            f"{least} or newer, or take transport='tcp'."
        )
    return ""


class _At(NamedTuple):
    """Address of an endpoint.

    Attributes:
        sockets: of its listener.
        store: host and port.
        gpu: which it computes on, of all in the world.
    """

    sockets: Address
    store: tuple[str, int]
    gpu: str


class NcclGroup:
    """Two ranks, one of which sends; see PayloadGroup.

    Args:
        store: of this link, generation and direction.
        rank: 0 sends.
        device: of this rank, the current one.
        timeout_s: for the communicator to be made.
    """

    def __init__(self, store: Any, rank: int, device: torch.device, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options: Any = ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=timeout_s)
        self._given_up = threading.Event()
        self._rank = rank
        self._group: Any = ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.send, payload)

    def recv(self, payload: torch.Tensor) -> None:
        self._transfer(self._group.recv, payload)

    def abort(self) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            threading.Thread(target=self._group.abort, name="raypipe gives up NCCL", daemon=True).start()

    def _transfer(self, method: Any, payload: torch.Tensor) -> None:
        if self._given_up.is_set():
            raise ConnectionError("it was given up")
        try:
            method([payload], 1 - self._rank, 0).wait()  # which has the current stream wait, not this thread
            done = torch.cuda.Event()
            done.record()
            pause_s = POLL_S
            while not done.query():
                if self._given_up.is_set():
                    raise ConnectionError("it was given up")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_POLL_S)
        except RuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0][:200]) from error


class NcclEndpoint:
    """What a worker on a GPU shows its peers, for as many generations as it lives.

    Args:
        host: address under which the peers reach it.
        ports: lowest and highest port of its sockets; NCCL's own cannot be confined.
        device: that its stages compute on, which is not the CPU.

    Raises:
        ConfigError: there is no NCCL here, or one that is too old.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None, device: Device) -> None:
        if reason := why_no_nccl():
            raise ConfigError(f"transport='collective': {reason}")
        self._device, self._listener = device, SocketListener(host, ports=ports)
        self._store: TCPStore | None
        self._store, at = rendezvous(host)
        gpu = str(torch.cuda.get_device_properties(device.place).uuid)
        self.address = _At(Address(*self._listener.address), at, gpu)

    def open(self, opening: Opening) -> Mapping[int, Channel]:
        """See Endpoint."""
        me, peers = opening.me, {peer: _At(*address) for peer, address in opening.addresses.items()}
        if opening.checksum == "on":
            raise ConfigError(
                "link_checksum='on' is not possible with transport='collective' between GPUs, whose payloads no "
                "processor sees. Leave it out, or take transport='tcp'."
            )
        for peer, at in peers.items():
            if at.gpu == self.address.gpu:
                raise LinkError(
                    f"workers {me} and {peer} share a GPU, between which NCCL makes no link. Take transport='tcp', or "
                    "give each worker a GPU of its own."
                )
        deadline_s = time.monotonic() + opening.timeout_s
        made: list[DeviceChannel] = []

        def channel(peer: int, found: Opened) -> DeviceChannel:
            groups = self._groups(opening, peer, peers[peer], deadline_s)
            made.append(DeviceChannel(*found, self._device, groups))
            return made[-1]

        try:
            sockets = {peer: at.sockets for peer, at in peers.items()}
            return open_links(self._listener, opening, sockets, make=channel)
        except BaseException:
            for one in made:
                one.abort("another link could not be opened")
                one.close()
            raise

    def close(self) -> None:
        """End the rendezvous and the listener; open links go on without them."""
        self._store = None
        self._listener.close()

    def _groups(self, opening: Opening, peer: int, at: _At, deadline_s: float) -> tuple[NcclGroup, NcclGroup]:
        """In which this worker sends, and receives; the peer makes them in the same order."""
        me, low = opening.me, min(opening.me, peer)
        host, port = self.address.store if me == low else at.store
        name = f"{run_digest(opening.run_id).hex()}/{low}-{max(me, peer)}/{opening.generation}"
        try:
            store = connect(host, port, deadline_s)
            found = {}
            with self._device.prepare_thread():
                for sender in sorted((me, peer)):
                    left_s = max(deadline_s - time.monotonic(), 1.0)
                    rank = 0 if sender == me else 1
                    found[sender] = NcclGroup(PrefixStore(f"{name}/{sender}", store), rank, self._device.place, left_s)
                for sender in sorted((me, peer)):  # one byte each way shows that both ends are there
                    proof = self._device.empty(1, torch.uint8).fill_(0)
                    found[sender].send(proof) if sender == me else found[sender].recv(proof)
        except (RuntimeError, OSError) as error:
            why = str(error).splitlines()[0][:200]
            raise LinkError(f"worker {me} cannot make its NCCL link to worker {peer}: {why}") from error
        return found[me], found[peer]
