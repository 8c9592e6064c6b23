"""Where no cluster answers, a run says so at once; ray.init alone would wait for minutes."""

from __future__ import annotations

import socket

import pytest

from raypipe.errors import ConfigError
from raypipe.runtime.driver.client import connected, find_run
from raypipe.runtime.driver.knock import knock

pytestmark = pytest.mark.ray


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nothing listens, in RAY_ADDRESS."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    return address


def test_nothing_listens_there(nobody: str) -> None:
    message = f"No Ray cluster at {nobody}: nothing listens there .* Set RAY_ADDRESS to one that runs"
    with pytest.raises(ConfigError, match=message), connected(1, {}):
        raise AssertionError("connected")
    with pytest.raises(ConfigError, match=message):
        find_run("anybody")


def test_what_is_no_host_and_port_is_left_to_ray() -> None:
    knock("auto")
    knock("ray://127.0.0.1:1")
