"""Where no cluster answers, a run says so at once; ray.init alone would wait for minutes."""

from __future__ import annotations

import socket

import pytest

from raypipe.errors import ConfigError
from raypipe.runtime.driver.client import find_run
from raypipe.runtime.driver.ray_cluster import connected
from raypipe.runtime.driver.ray_ping import cluster_address, ping_cluster

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
    ping_cluster("ray://127.0.0.1:1")


def test_where_ray_finds_a_cluster_by_itself_is_asked_too(nobody: str) -> None:
    assert cluster_address("auto") == nobody
    with pytest.raises(ConnectionError, match="nothing listens there"):
        ping_cluster("auto")


def test_a_token_that_ray_was_told_of_and_nobody_has(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end the process, with pages of its log."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(ConfigError, match=f"No Ray cluster at {nobody}: RAY_AUTH_MODE=token, and there is no token"):
        find_run("anybody")
