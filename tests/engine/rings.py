"""A stage program of nothing but parameters, for tests of what holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
