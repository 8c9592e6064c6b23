"""Endpoint: protocol of the object through which a worker opens its links, and the settings of these links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypipe.engine.messages.channel import Channel
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram


def is_checked(checksum: str, *, same_host: bool) -> bool:
    """Return True if messages of a link carry checksums; both ends of the link must call this with equal arguments.

    Args:
        checksum: see PipelineConfig.link_checksum.
        same_host: True if both ends of the link are on one host.
    """
    return checksum == "on" or (checksum == "auto" and not same_host)


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """Settings for one opening of a worker's links; every ``StageActor.configure`` opens new links.

    Attributes:
        me: number of this worker in the plan.
        addresses: addresses of the peers' endpoints, by worker number.
        generation: number of times that links were opened before. Messages of a lower generation are dropped; a message
            of a higher generation is an error.
        run_id: unique id of the run, equal on all its workers.
        capacity: maximum number of tensors per message, by peer; equal on both ends.
        timeout_s: timeout for opening all links together.
        names: names of the channels, by peer, for errors.
        secret: known to the workers of this run only, for transports that authenticate peers.
        checksum: see PipelineConfig.link_checksum; equal on all workers of a run.
    """

    me: int
    addresses: Mapping[int, Any]
    generation: int
    run_id: str
    capacity: Mapping[int, int]
    timeout_s: float
    names: Mapping[int, str]
    secret: bytes = b""
    checksum: str = "auto"

    @classmethod
    def of(
        cls, run: RunSetup, placement: Placement, programs: Sequence[StageProgram], addresses: Sequence[Any],
        generation: int,
    ) -> LinkSetup:  # fmt: skip
        """Create the settings of the links between a worker and its neighbours.

        Args:
            placement: assignment of stages to workers, with the worker's number and neighbours.
            programs: stage programs of the plan, from which the sizes of messages follow.
            addresses: addresses of the endpoints of all workers, by worker number.
            generation: see LinkSetup.
        """
        me, peers = placement.worker, placement.neighbours(programs)
        return cls(
            me=me,
            addresses={peer: addresses[peer] for peer in peers},
            generation=generation,
            run_id=run.run_id,
            capacity={peer: placement.message_capacity(programs, peer) for peer in peers},
            timeout_s=run.open_timeout_s,
            names={peer: f"{placement.name_of(me)} <-> {placement.name_of(peer)}" for peer in peers},
            secret=run.secret,
            checksum=run.link_checksum,
        )


class Endpoint(Protocol):
    """Endpoint of a worker: lives as long as the worker, and opens new links whenever the worker is configured."""

    @property
    def address(self) -> Any:
        """Address of this endpoint: a plain value that can be sent to the peers through Ray."""

    def open(self, opening: LinkSetup) -> Mapping[int, Channel]:
        """Open the links to all peers, while each peer does the same; return one channel per peer, by worker number.

        Raises:
            LinkError: a peer did not open in time, died, or has another plan or a newer generation; no link stays open.
        """

    def close(self) -> None:
        """Stop accepting connections of peers; channels stay open until their owners close them."""
