"""Every Ray that these tests start asks for the same throw-away token; those that need nothing special share one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

# Ray keeps the mode of the first session for the life of a process, and sets RAY_AUTH_MODE itself where nobody has:
# a session with a token before one without would leave its own actors unable to report to their owner. It reads both
# when it is imported.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray

from raypipe.runtime.workers.fleet import Fleet
from tests.runtime.left_over import ours, wait_until
from tests.runtime.raylets import Home, private_cluster


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One node for all tests of a process: 4 CPUs for runs, and "spare" for the fleets that tests keep beside them."""
    ray.init(
        address="local", num_cpus=4, resources={"spare": 9}, object_store_memory=1536 << 20, namespace="raypipe",
        include_dashboard=False, log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def fleet(local_ray: None) -> Iterator[Fleet]:
    """Four workers that are made one pipeline after the other. Only test_transports.py, the last file, kills some."""
    made = Fleet(4, {"CPU": 0, "spare": 1})
    yield made
    made.stop()


@pytest.fixture(scope="session")
def head() -> Iterator[Home]:
    """A node with a dashboard, for tests that come to it from other processes."""
    with private_cluster() as home:
        home.start(cpus=4, dashboard=True)
        yield home


@pytest.fixture
def cluster(local_ray: None) -> Iterator[None]:
    """The shared node, for a run that must leave nothing on it."""
    before = ours()
    yield
    wait_until(lambda: ours() == before)
