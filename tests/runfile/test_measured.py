"""What `raypipe probe` measured, as a file that `raypipe plan --cluster` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.links import LinkProbe
from raypipe.runfile.cluster import read_cluster
from raypipe.runfile.measured import cluster_text

INSIDE = LinkProbe("10.0.0.1", "10.0.0.1", 50e-6, 2e9)
LINKS = [
    LinkProbe("10.0.0.1", "10.0.0.2", 200e-6, 110e6),
    LinkProbe("10.0.0.2", "10.0.0.1", 250e-6, 117e6),
    INSIDE,
]


def read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_the_slowest_link_between_hosts_stands_for_all(tmp_path: Path) -> None:
    found = read(tmp_path, cluster_text({"10.0.0.1": 2, "10.0.0.2": 1}, LINKS))
    places = [("10.0.0.1/0", "10.0.0.1"), ("10.0.0.1/1", "10.0.0.1"), ("10.0.0.2/0", "10.0.0.2")]
    assert found.devices == tuple(Device(name, host=host) for name, host in places)
    assert found.links == (Link(2e9, 50e-6), Link(110e6, 250e-6))
    assert (found.link(0, 1), found.link(1, 2)) == found.links


def test_a_head_without_a_place_counts_for_nothing(tmp_path: Path) -> None:
    slow = [LinkProbe("10.0.0.9", "10.0.0.1", 1.0, 1e3), LinkProbe("10.0.0.2", "10.0.0.9", 1.0, 1e3)]
    found = read(tmp_path, cluster_text({"10.0.0.9": 0, "10.0.0.1": 1, "10.0.0.2": 1}, [*slow, *LINKS]))
    assert [device.host for device in found.devices] == ["10.0.0.1", "10.0.0.2"]
    assert found.link(0, 1) == Link(110e6, 250e-6)
    with pytest.raises(ConfigError, match="No node of the cluster has a CPU or GPU for a worker"):
        cluster_text({"10.0.0.9": 0}, LINKS)


def test_one_host_has_one_link(tmp_path: Path) -> None:
    found = read(tmp_path, cluster_text({"10.0.0.1": 4}, [INSIDE]))
    assert (len(found.devices), found.links) == (4, (Link(2e9, 50e-6),))
