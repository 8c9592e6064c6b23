"""Networks for tests: skipped in sight where none can be made, a failure where every tier must run."""

from __future__ import annotations

import pytest

from tests.lab.network import missing


@pytest.fixture(scope="session", autouse=True)
def lab_is_possible(pytestconfig: pytest.Config) -> None:
    reason = missing()
    if reason and pytestconfig.getoption("must_run"):
        pytest.fail(f"A network must be made here: {reason}")
    if reason:
        pytest.skip(f"no network can be made: {reason}")
