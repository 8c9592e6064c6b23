"""Outputs of a last stage that is an actor, on their way to whoever asked for them."""

from __future__ import annotations

from typing import Any

import ray
import torch

from raypipe.runtime.run.forwards import ListOutputs

__all__ = ["ActorOutputs"]

HAND_OVER_TIMEOUT_S = 300.0


class ActorOutputs:
    """Outputs of stages that are actors: an actor of its own keeps them, and they travel when all is done."""

    def __init__(self) -> None:
        self._actor: Any = ray.remote(num_cpus=0, max_restarts=0)(ListOutputs).remote()
        self.give = _Giver(self._actor)

    def take(self) -> list[Any]:
        found: list[Any] = ray.get(self._actor.take.remote(), timeout=HAND_OVER_TIMEOUT_S)
        return found

    def close(self) -> None:
        ray.kill(self._actor, no_restart=True)


class _Giver:
    """What travels to the last stage."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self, output: Any) -> torch.Tensor:
        # One at a time, so that no more than one waits in memory and they arrive in order.
        found: torch.Tensor = ray.get(self._actor.give.remote(output), timeout=HAND_OVER_TIMEOUT_S)
        return found
