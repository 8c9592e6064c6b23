"""A stage program of nothing but parameters, and exchanges between its replicas, for tests of what holds gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.messages.channel import InMemoryChannel
from raypipe.engine.optim.all_reduce import AllReduce
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import Site, StageProgram
from raypipe.ir.schedule import Action


@dataclass
class _Function:
    """The part of a StageFunction that says what it needs."""

    sites: tuple[Site, ...]
    buffers: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    num_inputs: int = 0
    num_outputs: int = 0

    def __call__(self, *_: Any) -> tuple[torch.Tensor, ...]:
        raise AssertionError("these tests run no stage")


@dataclass
class Replicas:
    """Link to the other replicas of a stage; see ``all_reduce.ReplicaLink``."""

    send: Callable[[int, Action, Any, int], None]
    recv: Callable[[int, Action, int], Any]

    def waited(self, seconds: float) -> None:
        assert seconds >= 0


def exchanges_of(
    sinks: Sequence[GradientSink], lanes: int, codec: str = "none", sent: Callable[[int, Any], None] | None = None
) -> tuple[list[AllReduce], dict[tuple[int, int], InMemoryChannel]]:
    """(exchange of each replica, channels by own and other replica).

    Args:
        sent: is called with the replica and the tensors of each message.
    """
    homes = (tuple(range(len(sinks))),)
    ends: dict[tuple[int, int], InMemoryChannel] = {}
    for a, b in itertools.combinations(homes[0], 2):
        ends[a, b], ends[b, a] = InMemoryChannel.pair(f"{a} <-> {b}", 0, 1 + lanes)

    def exchange(me: int) -> AllReduce:
        def send(peer: int, action: Action, tensors: Any, _: int) -> None:
            if sent is not None:
                sent(me, tensors)
            ends[me, peer].send(action, tensors)

        link = Replicas(send, lambda peer, action, _: ends[me, peer].recv(action, 60.0))
        return AllReduce(Placement(homes, me, lanes), sinks[me], link, codec)

    return [exchange(me) for me in homes[0]], ends


def program_of(
    sites: tuple[Site, ...], parameters: Mapping[str, torch.nn.Parameter], *, index: int = 0, first_trainable: int = 0
) -> StageProgram:
    """A program that uses ``parameters`` at ``sites``."""
    function = _Function(sites)
    return StageProgram(
        index=index,
        num_stages=index + 2,
        train=function,
        eval=function,
        parameters=tuple(parameters),
        buffers=(),
        trainable=frozenset(name for name, p in parameters.items() if p.requires_grad),
        shared_with={},
        num_sites={name: sum(site.parameter == name for site in sites) for name in parameters},
        order={name: i for i, name in enumerate(parameters)},
        loss=None,
        targets=(),
        first_trainable=first_trainable,
    )
