"""Fixtures for tests with Ray: those that need nothing special share one node and one fleet. Ray is imported on use."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from raypipe.runtime.fleet.fleet import Fleet
    from tests.runtime.raylets import Home

__all__ = ["cluster", "fleet", "head", "local_ray", "pytest_runtest_makereport", "stays_connected"]

_SHARED: list[str] = []
"""The address of the shared node, while there is one."""
FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def local_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """One node for all tests of a process: 4 CPUs for runs, and "spare" for the fleets that tests keep beside them.

    Its 4 GPUs are numbers that Ray hands out, whatever the machine has.
    """
    import ray

    from tests.forked_worker import forked_workers

    forked = request.config.getoption("--forked-workers")
    with forked_workers() if forked else contextlib.nullcontext():
        ray.init(
            address="local", num_cpus=4, num_gpus=4, resources={"spare": 9}, object_store_memory=1536 << 20,
            namespace="raypipe", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            _system_config={"worker_niceness": 0},  # as raypipe starts it; else a busy machine leaves stages nothing
        )  # fmt: skip
        _SHARED.append(ray.get_runtime_context().gcs_address)
        try:
            yield
        finally:
            _SHARED.clear()
            ray.shutdown()


@pytest.fixture(scope="session")
def fleet(local_ray: None) -> Iterator[Fleet]:
    """Four workers that are made one pipeline after the other. A test that kills some is marked ``last``."""
    from raypipe.runtime.fleet.fleet import Fleet
    from raypipe.runtime.fleet.roster import Terms

    made = Fleet(4, Terms({"CPU": 0, "spare": 1}))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def head() -> Iterator[Home]:
    """A node with a dashboard, for tests that come to it from other processes."""
    from tests.runtime.raylets import private_cluster

    with private_cluster() as home:
        home.start(cpus=4, dashboard=True, RAY_JOB_STOP_WAIT_TIME_S="60")  # a busy machine needs more than its 3 s
        yield home


@pytest.fixture
def cluster(request: pytest.FixtureRequest, local_ray: None) -> Iterator[None]:
    """The shared node, on which a test must leave nothing: the next one finds it as it was, and this one fails.

    conftest.py has every test that uses the node use this.
    """
    from tests.runtime.left_over import AFTER_FAILURE_S, PATIENCE_S, leave_nothing, living, ours

    before, actors = ours(), frozenset(living())
    yield
    leave_nothing(before, actors, AFTER_FAILURE_S if request.node.stash.get(FAILED, False) else PATIENCE_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test's fixtures can ask whether it failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def stays_connected() -> None:
    """Fail a test that left the node which others share; else all later ones would fail instead."""
    if _SHARED:
        import ray

        there = ray.get_runtime_context().gcs_address if ray.is_initialized() else "nowhere"
        if there != _SHARED[0]:
            expected = _SHARED.pop()
            pytest.fail(f"This test left the shared node: the process was connected to {expected}, now to {there}.")
