"""Actors that generate hold no state of the run longer than its present executor does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.engine.device.device import CPU
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.errors import StageLostError
from raypipe.runtime.fleet.actor_decoding import ActorDecoding

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM: Any = SimpleNamespace(prefill=SimpleNamespace(function=None), step=SimpleNamespace(function=None))


class Executor:
    """What a decoder reads of an executor of both stages."""

    def __init__(self) -> None:
        self.transfer = DeviceTransfer(CPU)
        self.works = [SimpleNamespace(state=None)] * 2


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self._fence = SimpleNamespace(check=lambda term: None)
        self._executor = Executor()

    def held(self) -> int:
        from raypipe.runtime.fleet.actor_decoding import _decoders

        return sum(len(of_executor) for of_executor in _decoders.values())

    def configure(self) -> None:
        self._executor = Executor()


def test_no_decoder_outlives_its_generation_or_its_executor(cluster: None) -> None:
    lives, dies = workers = [Worker.remote(), Worker.remote()]  # type: ignore[attr-defined]
    try:
        with ActorDecoding(workers, [PROGRAM] * 2, 0):
            assert ray.get([worker.held.remote() for worker in workers], timeout=60) == [1, 1]
            ray.get(lives.configure.remote(), timeout=60)
            assert ray.get(lives.held.remote(), timeout=60) == 0
        ray.kill(dies)
        with pytest.raises(StageLostError):
            ActorDecoding(workers, [PROGRAM] * 2, 0).__enter__()
        assert ray.get(lives.held.remote(), timeout=60) == 0
    finally:
        for worker in workers:
            ray.kill(worker)
