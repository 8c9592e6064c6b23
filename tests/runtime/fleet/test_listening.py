"""Where a worker is: everybody hears the same, though a driver and its successor may ask at once."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from raypipe.engine.device.device import CPU, Device
from raypipe.runtime.worker.worker import StageActor

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


def slowly(share: float) -> Device:
    """So that others ask meanwhile."""
    time.sleep(0.5)
    return CPU


def test_all_who_ask_at_once_hear_of_the_same_endpoint(local_ray: None) -> None:
    """Else one of them would send peers to a port that nobody listens at any more."""
    actor = StageActor.options(num_cpus=0).remote(150.0)
    try:
        asked = [actor.listen.remote("tcp", None, 0.0, slowly) for _ in range(3)]
        found = {facts["address"] for facts in ray.get(asked, timeout=150)}
        assert len(found) == 1
        (address,) = found
        with socket.create_connection((address.host, address.port), timeout=10):
            pass
    finally:
        ray.kill(actor)
