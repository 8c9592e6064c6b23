"""Links through Ray's object store: no port, no connection of our own, and so it works wherever Ray does.

    stage 0                                                   stage 1
    sending thread: header + payload = bytes, or an array
        | link_message(link, *pieces) ----------------------> group "links": copy out, inbox
        | link_asked(link, *pieces), every few messages ----> the same
        | <-------------------------------- "taken": the window has room, objects of the store have no user left
    | <-------------------------------- "again": it came damaged, on a checked link, which asks with every message
    link_notify(hello | abort) -----------------------------> group "notices", which no message can hold up
    link_watch(link), never answered while the link lives --> its failure tells that the other process died

The actors call each other; the driver has no part in it. Who may call an actor is Ray's business: a run is as private
as its cluster. Each message costs some milliseconds.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError

from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.links.addresses import machine
from raypipe.runtime.links.endpoint import Opening, is_checked
from raypipe.runtime.links.handshake import run_digest
from raypipe.runtime.links.object_store_channel import Letter, Link, ObjectStoreChannel, first_line

__all__ = ["LINK_GROUPS", "LinkedActor", "ObjectStoreEndpoint"]

LINK_GROUPS = {"links": 2, "notices": 1, "watch": 1}
"""Concurrency groups of an actor with an object-store endpoint. A watch that finds no thread free serves as well."""

RETRY_S = 0.02


class _Address(NamedTuple):
    """An actor's handle, and where it runs."""

    actor: Any
    machine: str


class ObjectStoreEndpoint:
    """The links of one LinkedActor, for as many generations as it lives."""

    def __init__(self) -> None:
        self._channels: dict[int, ObjectStoreChannel] = {}
        self._conflict = ""

    @property
    def address(self) -> _Address:
        """This actor's own handle; not kept here, because an actor that holds itself never goes out of scope."""
        return _Address(ray.get_runtime_context().current_actor, machine())

    def open(self, opening: Opening) -> dict[int, ObjectStoreChannel]:
        """See Endpoint; ``secret`` has no use here."""
        peers, timeout_s = {peer: _Address(*address) for peer, address in opening.addresses.items()}, opening.timeout_s
        run, deadline_s = run_digest(opening.run_id), time.monotonic() + timeout_s
        links = {peer: Link(run, opening.generation, opening.me, peer, opening.capacity[peer]) for peer in peers}
        self._conflict = ""
        # All ends exist before the first hello, because a peer that is welcome may send at once.
        channels = {
            peer: ObjectStoreChannel(
                opening.names[peer],
                links[peer],
                at.actor,
                checked=is_checked(opening.checksum, same_host=at.machine == machine()),
            )
            for peer, at in peers.items()
        }
        self._channels = dict(channels)
        try:
            for peer, at in peers.items():
                self._greet(links[peer], at.actor, deadline_s, timeout_s)
                channels[peer].watch()
        except BaseException:
            self._channels = {}
            for channel in channels.values():
                channel.fail(LinkError(f"{channel.name}: was never opened."))
                channel.close()
            raise
        return channels

    def message(self, packed_link: object, *pieces: object) -> str:
        """A message came: "taken" when its memory has no user here any more, "again" if it is damaged, or "gone"."""
        found = Link.unpack(packed_link)
        channel = None if found is None else self._channel(found[0])
        if found is None or channel is None or channel.shut:
            return "gone"
        return channel.receive(pieces, checked=found[1])

    def goodbye(self, letter: Letter) -> str:
        """The peer ends its side of a link: "taken", or "gone"."""
        channel = self._channel(letter.link)
        if channel is None or channel.shut:
            return "gone"
        channel.receive_goodbye(letter)
        return "taken"

    def notify(self, letter: Letter) -> str:
        """A hello or an abort came; to a hello the answer is "welcome", "wait", or why not."""
        channel = self._channel(letter.link)
        if letter.kind == "abort":
            if channel is not None:
                channel.fail(LinkAbortedError(f"{channel.name}: aborted by the peer: {letter.reason}"))
            return ""
        mine, theirs = self._channels.get(letter.link.sender), letter.link
        if mine is None or mine.link.run != theirs.run or mine.link.sender != theirs.receiver:
            return "wait"
        if mine.generation != theirs.generation:
            obsolete = f"worker {theirs.sender} opens generation {theirs.generation} while worker {theirs.receiver} "
            obsolete += f"has generation {mine.generation}, which makes the older obsolete."
            return obsolete if mine.generation > theirs.generation else "wait"
        if channel is None:
            self._conflict = (
                f"worker {theirs.sender} sends up to {theirs.max_tensors} tensors per message, worker "
                f"{theirs.receiver} expects up to {mine.max_tensors}: they do not run the same plan."
            )
            return self._conflict
        return "welcome"

    def watch(self, link: Link) -> None:
        """Return when this end of the link ends: a call that fails before then tells the caller of a death."""
        channel = self._channel(link)
        if channel is not None:
            channel.ended.wait()

    def close(self) -> None:
        """Forget the links, which their owner closes."""
        self._channels = {}

    def _channel(self, link: Link) -> ObjectStoreChannel | None:
        """The channel at this end of a link that the peer describes, None for any other."""
        found = self._channels.get(link.sender)
        same = found is not None and found.link == link._replace(sender=link.receiver, receiver=link.sender)
        return found if same else None

    def _greet(self, link: Link, peer: Any, deadline_s: float, timeout_s: float) -> None:
        while True:
            if self._conflict:
                raise LinkError(self._conflict)
            try:
                answer = ray.get(
                    peer.link_notify.remote(Letter("hello", link)), timeout=max(deadline_s - time.monotonic(), 0.001)
                )
            except GetTimeoutError:
                answer = "wait"
            except RayError as error:
                raise LinkError(
                    f"worker {link.sender} cannot reach worker {link.receiver}: {first_line(error)}"
                ) from error
            if answer == "welcome":
                return
            if answer != "wait":
                raise LinkError(answer)
            if time.monotonic() > deadline_s:
                raise LinkError(
                    f"links not open after {timeout_s:g} s: no welcome from worker {link.receiver}. It hangs, is cut "
                    "off, or belongs to another run or generation."
                )
            time.sleep(RETRY_S)


class LinkedActor:
    """What an actor inherits to have links through the object store; it needs the concurrency groups LINK_GROUPS."""

    _endpoint: Any = None
    """Of whatever transport. Without an object-store endpoint nobody calls these methods but late peers."""

    @ray.method(concurrency_group="links", enable_task_events=False, num_returns=0)
    def link_message(self, packed_link: bytes, *pieces: object) -> None:
        """See ObjectStoreEndpoint.message. Ray's list of tasks is spared hundreds of these per second."""
        if isinstance(self._endpoint, ObjectStoreEndpoint):
            self._endpoint.message(packed_link, *pieces)

    @ray.method(concurrency_group="links", enable_task_events=False)
    def link_asked(self, packed_link: bytes, *pieces: object) -> str:
        """The same, with an answer."""
        endpoint = self._endpoint
        return endpoint.message(packed_link, *pieces) if isinstance(endpoint, ObjectStoreEndpoint) else "gone"

    @ray.method(concurrency_group="links")
    def link_goodbye(self, letter: Letter) -> str:
        """See ObjectStoreEndpoint.goodbye."""
        endpoint = self._endpoint
        return endpoint.goodbye(letter) if isinstance(endpoint, ObjectStoreEndpoint) else "gone"

    @ray.method(concurrency_group="notices")
    def link_notify(self, letter: Letter) -> str:
        """See ObjectStoreEndpoint.notify."""
        endpoint = self._endpoint
        return endpoint.notify(letter) if isinstance(endpoint, ObjectStoreEndpoint) else "wait"

    @ray.method(concurrency_group="watch")
    def link_watch(self, link: Link) -> None:
        """See ObjectStoreEndpoint.watch."""
        endpoint = self._endpoint
        if isinstance(endpoint, ObjectStoreEndpoint):
            endpoint.watch(link)
