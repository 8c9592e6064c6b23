"""``raypipe probe -o``: what is measured of a cluster becomes a file to plan with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.errors import ConfigError
from raypipe.runfile.cluster import read_cluster
from tests.runtime.raylets import Home

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def address(head: Home) -> Iterator[str]:
    yield head.address
    ray.shutdown()


def test_what_was_measured_can_be_planned_for(address: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    done = CliRunner().invoke(app, ["probe", "--address", address, "-o", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Mbit/s" in done.output
    assert done.output.endswith(f"wrote {file}\n")
    found = read_cluster(file)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    assert len(found.devices) == int(ray.cluster_resources()["CPU"])
    assert len({device.host for device in found.devices}) == 1
    (inside,) = found.links
    assert 0 < inside.latency_s < 1
    assert 0 < inside.bandwidth_bytes_s < 1e12


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        CliRunner().invoke(
            app, ["probe", "--address", "10.255.0.1:1", "-o", str(tmp_path / "no/c.yaml")], catch_exceptions=False
        )
