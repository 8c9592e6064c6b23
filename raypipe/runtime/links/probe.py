"""Measuring the links of a cluster while nothing trains: an actor per node, and one pair of them at a time.

    latency     the quickest of some small messages there and back, halved
    bandwidth   messages of a few MiB one behind the other; the median time between two answers, which a pause of a
                machine does not move

They go over the run's own "tcp" links, so what is measured is what a run gets.
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
from raypipe.ir.action import Action, Op
from raypipe.ir.links import LinkProbe
from raypipe.runtime.links.endpoint import Endpoint, Opening
from raypipe.runtime.links.opening import make_endpoint

__all__ = ["places_by_node", "probe_links"]

OPEN_TIMEOUT_S = 30.0
SMALL, LARGE = 16, 8
LARGE_BYTES = 4 << 20
LIMIT_S = 120.0


def places_by_node() -> dict[str, int]:
    """Workers that every node of the connected cluster has room for, by its address: one per GPU, else one per CPU."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU", 0) for node in nodes) else "CPU"
    return {node["NodeManagerAddress"]: int(node["Resources"].get(kind, 0)) for node in nodes}


def probe_links(
    ports: tuple[int, int] | None = None, large_bytes: int = LARGE_BYTES, *, inside: bool = False
) -> list[LinkProbe]:
    """Measure every pair of nodes of the connected cluster, both ways; a lone node to itself.

    Args:
        ports: lowest and highest that links may use.
        large_bytes: of the messages that the bandwidth is measured with.
        inside: the first of several nodes is measured to itself too.

    Raises:
        LinkError: two nodes do not reach each other, or take longer than two minutes.
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
        return _measured(actors, pairs, large_bytes)
    except RayError as error:
        cause = getattr(error, "cause", None)
        reason = str(cause or error).strip().splitlines()[-1].rstrip(".")
        raise LinkError(
            f"The links cannot be measured: {reason}. `raypipe doctor --address ...` says which nodes do not reach "
            "each other; --ports keeps to ports that a firewall lets through."
        ) from None
    finally:
        for actor in actors:
            ray.kill(actor)


def _measured(actors: Sequence[Any], pairs: Sequence[tuple[int, int]], large_bytes: int) -> list[LinkProbe]:
    hosts = ray.get([actor.host.remote() for actor in actors], timeout=LIMIT_S)
    secret, found = secrets.token_bytes(32), []
    for generation, (one, other) in enumerate(pairs):
        addresses = [hosts[one][1], hosts[other][1]]
        pair = [actors[one], actors[other]]
        opened = [actor.open.remote(side, addresses, generation, secret) for side, actor in enumerate(pair)]
        ray.get(opened, timeout=LIMIT_S)
        for source in (0, 1):
            answering = pair[1 - source].answer.remote(1 - source, source)
            latency_s, bandwidth = ray.get(pair[source].ask.remote(source, large_bytes), timeout=LIMIT_S)
            ray.get(answering, timeout=LIMIT_S)
            names = hosts[one][0], hosts[other][0]
            found.append(LinkProbe(names[source], names[1 - source], latency_s, bandwidth))
        ray.get([actor.close.remote() for actor in pair], timeout=LIMIT_S)
    return found


class _Prober:
    """One node's end."""

    def __init__(self, ports: tuple[int, int] | None) -> None:
        torch.set_num_threads(1)
        self._host = ray.util.get_node_ip_address()
        self._endpoint: Endpoint = make_endpoint("tcp", self._host, ports)
        self._channel: Channel | None = None

    def host(self) -> tuple[str, Any]:
        return self._host, self._endpoint.address

    def open(self, me: int, addresses: Sequence[Any], generation: int, secret: bytes) -> None:
        """Open the link to the other end; sides are 0 and 1."""
        peer = 1 - me
        opening = Opening(
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

    def ask(self, me: int, large_bytes: int) -> tuple[float, float]:
        """(seconds one way, bytes per second) to the other end, which answers."""
        assert self._channel is not None, "open() comes first"
        small, large = torch.zeros(1), torch.zeros(large_bytes, dtype=torch.uint8)
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
        return min(trips_s) / 2, large_bytes / statistics.median(b - a for a, b in itertools.pairwise(ends_s))

    def answer(self, me: int, peer: int) -> None:
        """Answer every message of the other end."""
        assert self._channel is not None, "open() comes first"
        for number in range(SMALL + LARGE):
            self._channel.recv(Action(peer, Op.SEND_F, number), LIMIT_S)
            self._channel.send(Action(me, Op.SEND_B, number), [torch.zeros(1)])

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
