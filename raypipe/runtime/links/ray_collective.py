"""Links through the groups of ray.util.collective: one gloo group of all workers of a run, made once.

    worker 0             worker 1             worker 2
    rank 0 == payloads == rank 1 == payloads == rank 2        Ray's group, whose ranks are the workers' numbers
       <== handshake, headers, ends ==>  <== ... ==>          sockets, as over "tcp", which prove who is there

Payloads are sent and received in the threads of the links, and a header says before how large one is. What Ray's
groups cannot do (docs/design/0070-groups-of-ray.md):

    a wait in them cannot be ended      who waits for a link is told at once; the thread behind it stays until the peer
                                        sends, dies or the process ends
    a process joins one group, once     links are opened once: no recovery, no resize, no other number of workers
    GPUs                                refused; transport='collective' is NCCL with ways to give it up

A process that joins also has torch.distributed's default group from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raypipe.engine.device import CPU, Device
from raypipe.engine.messages.channel import Channel
from raypipe.errors import ConfigError, LinkError
from raypipe.runtime.links.device_channel import DeviceChannel
from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.handshake import run_digest
from raypipe.runtime.links.listener import SocketListener
from raypipe.runtime.links.tcp import Opened, open_links

__all__ = ["RayCollectiveEndpoint", "RayGroup"]


class RayGroup:
    """Payloads to or from one peer; see PayloadGroup. ``abort`` ends no wait that has begun.

    Args:
        name: of the group, which this process has joined.
        peer: its rank.
    """

    def __init__(self, name: str, peer: int) -> None:
        self._name, self._peer = name, peer
        self._given_up = threading.Event()

    def send(self, payload: torch.Tensor) -> None:
        from ray.util import collective

        self._transfer(collective.send, payload)

    def recv(self, payload: torch.Tensor) -> None:
        from ray.util import collective

        self._transfer(collective.recv, payload)

    def abort(self) -> None:
        self._given_up.set()

    def _transfer(self, method: Callable[[torch.Tensor, int, str], None], payload: torch.Tensor) -> None:
        if self._given_up.is_set():
            raise ConnectionError("it was given up")
        try:
            method(payload, self._peer, self._name)
        except RuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0][:200]) from error


class RayCollectiveEndpoint:
    """What a worker, which is a Ray actor, shows its peers; it opens its links once.

    Args:
        host: address under which the peers reach it.
        device: that its stages compute on.

    Raises:
        ConfigError: it computes on a GPU, or Ray has no gloo groups here.
    """

    def __init__(self, host: str, device: Device) -> None:
        from ray.util import collective

        if not device.immediate:
            raise ConfigError(
                "transport='ray_collective' is not possible on GPUs: a transfer of Ray's NCCL groups cannot be given "
                "up, and says that it is over only to who waits for the whole device. Take transport='collective', "
                "which is NCCL too, or 'tcp'."
            )
        if not collective.gloo_available():
            raise ConfigError(
                "transport='ray_collective': this release of Ray has no gloo groups, or torch has no gloo. Take "
                "transport='tcp'."
            )
        self._listener = SocketListener(host)
        self._opened = False

    @property
    def address(self) -> Any:
        return self._listener.address

    def open(self, opening: Opening) -> Mapping[int, Channel]:
        """See Endpoint.

        Raises:
            LinkError: also where this process has joined a group before.
        """
        name = f"raypipe-{run_digest(opening.run_id).hex()}-{opening.generation}"
        begin_s = time.monotonic()
        if opening.workers > 1:
            self._join(name, opening)
        left_s = max(1.0, opening.timeout_s - (time.monotonic() - begin_s))

        def channel(peer: int, found: Opened) -> DeviceChannel:
            return DeviceChannel(*found, CPU, (RayGroup(name, peer), RayGroup(name, peer)))

        return open_links(self._listener, opening, timeout_s=left_s, make=channel)

    def close(self) -> None:
        """Take no more peers; the group stays as long as the process."""
        self._listener.close()

    def _join(self, name: str, opening: Opening) -> None:
        """Join the group of all workers, who all come here."""
        if self._opened or torch.distributed.is_initialized():
            raise LinkError(
                f"worker {opening.me} cannot open its links again: this process has a group of torch.distributed "
                "already, and Ray makes none beside it. With transport='ray_collective' links are opened once; take "
                "transport='tcp' for runs whose workers change, and for models that use torch.distributed themselves."
            )
        self._opened = True
        failed: list[BaseException] = []
        thread = threading.Thread(
            target=_joined, args=(name, opening, failed), name="raypipe joins a group of Ray", daemon=True
        )
        thread.start()
        thread.join(opening.timeout_s)  # torch waits half an hour by itself
        if thread.is_alive() or failed:
            why = str(failed[0]).splitlines()[0][:200] if failed else "nobody else came"
            raise LinkError(
                f"worker {opening.me} cannot join Ray's group of {opening.workers} workers within "
                f"{opening.timeout_s:g} s: {why}."
            )


def _joined(name: str, opening: Opening, failed: list[BaseException]) -> None:
    from ray.util import collective

    try:
        timeout_ms = max(1, int(1e3 * opening.timeout_s))
        collective.init_collective_group(opening.workers, opening.me, "gloo", name, timeout_ms)
    except BaseException as error:  # noqa: BLE001  (told where the worker waits for it)
        failed.append(error)
