"""An endpoint: what a worker shows its peers, and what it must know to open its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypipe.engine.messages.channel import Channel
from raypipe.engine.placement import Placement
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage import StageProgram

__all__ = ["Endpoint", "Opening", "is_checked"]


def is_checked(checksum: str, *, same_host: bool) -> bool:
    """Whether messages of a link carry checksums; both ends must come to the same answer.

    Args:
        checksum: see PipelineConfig.link_checksum.
        same_host: the link does not leave its host.
    """
    return checksum == "on" or (checksum == "auto" and not same_host)


@dataclass(frozen=True, slots=True)
class Opening:
    """What one worker needs to know to open its links in one generation of a plan.

    Attributes:
        me: number of this worker in the plan.
        addresses: of the peers' endpoints, by worker.
        generation: of the plan.
        run_id: equal on all workers of a run, and of no other run.
        capacity: most tensors per message, by peer; both ends must say the same.
        timeout_s: deadline for all links together.
        names: of the channels, by peer, for messages to people.
        secret: known to the workers of this run only; for transports that prove who connects.
        checksum: see PipelineConfig.link_checksum; the same on all workers of a run.
        workers: of the plan, numbered from 0.
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
    workers: int = 2

    @classmethod
    def of(
        cls, run: RunSetup, placement: Placement, programs: Sequence[StageProgram], addresses: Sequence[Any],
        generation: int,
    ) -> Opening:  # fmt: skip
        """Of the worker that a placement is about, to its neighbours.

        Args:
            addresses: of the endpoints of all workers.
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
            workers=len(addresses),
        )


class Endpoint(Protocol):
    """What a worker shows its peers, for as many generations as it lives."""

    @property
    def address(self) -> Any:
        """A plain value that may travel to the peers through Ray."""

    def open(self, opening: Opening) -> Mapping[int, Channel]:
        """Open the links to all peers, by peer; each of them does the same.

        Raises:
            LinkError: a peer did not open in time, died, has another plan, or is in a newer generation; no link is
                left open.
        """

    def close(self) -> None:
        """Take no more peers. Open channels have owners, who close them."""
