"""The cluster: which link joins which devices, JSON there and back, and refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link

DEVICES = st.builds(
    ComputeDevice,
    name=st.sampled_from(["a", "b"]),
    speed=st.sampled_from([0.5, 2.0]),
    memory_bytes=st.none() | st.integers(1, 1 << 40),
    host=st.sampled_from(["", "h0", "r0/h1"]),
)
LINKS = st.builds(Link, st.sampled_from([math.inf, 3e9]), st.sampled_from([0.0, 1e-3]))


@pytest.mark.slow
@given(st.lists(DEVICES, min_size=1, max_size=4), st.lists(LINKS, min_size=1, max_size=3))
def test_json_there_and_back(devices: list[ComputeDevice], links: list[Link]) -> None:
    cluster = Cluster(tuple(devices), tuple(links))
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_the_link_is_the_one_of_the_first_part_that_differs() -> None:
    hosts = ["rack0/host0", "rack0/host0", "rack0/host1", "rack1/host2"]
    links = (Link(4.0), Link(2.0), Link(1.0))
    cluster = Cluster(tuple(ComputeDevice(host=host) for host in hosts), links)
    assert [cluster.link(0, i) for i in (1, 2, 3)] == [links[0], links[1], links[2]]
    assert cluster.link(2, 3) == cluster.link(3, 2) == links[2]
    assert Cluster(cluster.devices, links[:2]).link(0, 3) == links[1]


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert Link(1000.0, 0.5).transfer_s(250) == 0.75
    assert Link().transfer_s(1 << 40) == 0.0


def test_hosts_are_in_order() -> None:
    cluster = Cluster.hosts(2, 3, inside=Link(2.0), between=Link(1.0))
    assert [device.host for device in cluster.devices] == ["host0"] * 3 + ["host1"] * 3
    assert cluster.link(2, 3).bandwidth_bytes_s == 1.0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ComputeDevice("gpu", speed=0.0), "'gpu' has speed=0.0"),
        (lambda: ComputeDevice("gpu", memory_bytes=0), "'gpu' has memory_bytes=0"),
        (lambda: Link(0.0), "bandwidth above 0"),
        (lambda: Link(latency_s=-1.0), "latency from 0 up"),
        (lambda: Cluster(()), "at least one device"),
        (lambda: Cluster.from_json("{"), "not a cluster"),
        (lambda: Cluster.from_dict({}), "'devices'"),
        (lambda: Cluster.from_dict({"devices": [{"sped": 2}]}), "sped"),
    ],
)
def test_refusals_name_the_field(make, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()
