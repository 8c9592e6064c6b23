"""Measurement of a cluster's links: starts an actor on each node, and measures one pair of nodes after the other.

    latency     half the shortest round trip of some small messages
    bandwidth   messages of a few MiB one after the other; the median time between two answers, which is robust against
                pauses of a machine

The cluster should be idle. Messages use the links of a run whose transport is "auto".
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.engine.messages.channel import Channel
from raypipe.errors import LinkError
from raypipe.ir.communication import LinkProbe
from raypipe.ir.schedule import Action, Op
from raypipe.runtime.transport import make_endpoint
from raypipe.runtime.transport.endpoint import Endpoint, LinkSetup

OPEN_TIMEOUT_S = 30.0
SMALL, LARGE = 16, 8
LARGE_BYTES = 4 << 20
LIMIT_S = 120.0


def places_by_node() -> dict[str, int]:
    """Return {address of a node: number of workers for which it has room}, one worker per GPU.

    A cluster without GPUs has room for one worker per CPU.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU", 0) for node in nodes) else "CPU"
    return {node["NodeManagerAddress"]: int(node["Resources"].get(kind, 0)) for node in nodes}


def probe_links(ports: tuple[int, int] | None = None, *, inside: bool = False) -> list[LinkProbe]:
    """Measure the links between all pairs of nodes of the connected cluster, in both directions.

    A cluster of one node is measured between two actors on this node.

    Args:
        ports: lowest and highest port that links may use; None leaves the choice to the system.
        inside: also measure between two actors on the first node.

    Raises:
        LinkError: two nodes do not reach each other, or a measurement takes longer than LIMIT_S.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    pairs = list(itertools.combinations(range(len(nodes)), 2))
    if inside or len(nodes) == 1:
        pairs.append((0, len(nodes)))
        nodes.append(nodes[0])
    actors = [
        ray.remote(num_cpus=0, max_restarts=0)(_Prober)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(ports)
        for node in nodes
    ]
    try:
        return _measured(actors, pairs)
    except RayError as error:
        cause = getattr(error, "cause", None)
        reason = str(cause or error).strip().splitlines()[-1].rstrip(".")
        raise LinkError(
            f"The links cannot be measured: {reason}. `raypipe doctor --address ...` shows which nodes do not reach "
            "each other; --ports keeps to ports that a firewall lets through."
        ) from None
    finally:
        for actor in actors:
            ray.kill(actor)


def _measured(actors: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[LinkProbe]:
    hosts = ray.get([actor.host.remote() for actor in actors], timeout=LIMIT_S)
    secret, probes = secrets.token_bytes(32), []
    for generation, (one, other) in enumerate(pairs):
        addresses = [hosts[one][1], hosts[other][1]]
        pair = [actors[one], actors[other]]
        opened = [actor.open.remote(side, addresses, generation, secret) for side, actor in enumerate(pair)]
        ray.get(opened, timeout=LIMIT_S)
        for source in (0, 1):
            answering = pair[1 - source].answer.remote(1 - source, source)
            latency_s, bandwidth = ray.get(pair[source].measure.remote(source), timeout=LIMIT_S)
            ray.get(answering, timeout=LIMIT_S)
            names = hosts[one][0], hosts[other][0]
            probes.append(LinkProbe(names[source], names[1 - source], latency_s, bandwidth))
        ray.get([actor.close.remote() for actor in pair], timeout=LIMIT_S)
    return probes


class _Prober:
    """Actor at one node's end of the measured link."""

    def __init__(self, ports: tuple[int, int] | None) -> None:
        torch.set_num_threads(1)
        self._host = ray.util.get_node_ip_address()
        self._endpoint: Endpoint = make_endpoint("auto", self._host, ports)
        self._channel: Channel | None = None

    def host(self) -> tuple[str, Any]:
        return self._host, self._endpoint.address

    def open(self, me: int, addresses: Sequence[Any], generation: int, secret: bytes) -> None:
        """Open the link between the ends ``me`` (0 or 1, the index of this actor's address) and 1 - ``me``."""
        peer = 1 - me
        opening = LinkSetup(
            me=me,
            addresses={peer: addresses[peer]},
            generation=generation,
            run_id="probe",
            capacity={peer: 1},
            timeout_s=OPEN_TIMEOUT_S,
            names={peer: f"{self._host} <-> {addresses[peer]}"},
            secret=secret,
        )
        self._channel = self._endpoint.open(opening)[peer]

    def measure(self, me: int) -> tuple[float, float]:
        """Measure (latency in seconds, bandwidth in bytes per second) to the other end, which runs ``answer``."""
        assert self._channel is not None, "open() comes first"
        small, large = torch.zeros(1), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        trips_s = []
        for number in range(SMALL):
            begin_s = time.monotonic()
            self._channel.send(Action(me, Op.SEND_F, number), [small])
            self._channel.recv(Action(1 - me, Op.SEND_B, number), LIMIT_S)
            trips_s.append(time.monotonic() - begin_s)
        ends_s = []
        for number in range(SMALL, SMALL + LARGE):
            self._channel.send(Action(me, Op.SEND_F, number), [large])
        for number in range(SMALL, SMALL + LARGE):
            self._channel.recv(Action(1 - me, Op.SEND_B, number), LIMIT_S)
            ends_s.append(time.monotonic())
        return min(trips_s) / 2, LARGE_BYTES / statistics.median(b - a for a, b in itertools.pairwise(ends_s))

    def answer(self, me: int, peer: int) -> None:
        """Answer every message that ``measure`` sends at the other end."""
        assert self._channel is not None, "open() comes first"
        for number in range(SMALL + LARGE):
            self._channel.recv(Action(peer, Op.SEND_F, number), LIMIT_S)
            self._channel.send(Action(me, Op.SEND_B, number), [torch.zeros(1)])

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
