"""A cluster as a file, written by hand or by `raypipe probe`; mistakes are named by file, line and field."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import LinkProbe
from raypipe.runfile.cluster_file import cluster_text, parse_quantity, read_cluster

COMPACT = """\
hosts: 4
per_host: 4
device: {memory: 24 GiB, speed: 2.5}
inside: 300 GB/s
between: {bandwidth: 25 Gbit/s, latency: 20 us}
"""
FULL = """\
devices:
  - {name: big, memory: 80 GB, speed: 2, host: a}
  - {memory: 500 MiB, host: b}
links: [300 GB/s, {bandwidth: 10 Gbit/s}]
"""


def read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_few_words_are_equal_hosts(tmp_path: Path) -> None:
    device = ComputeDevice("gpu", 2.5, 24 << 30)
    found = read(tmp_path, COMPACT)
    assert found == Cluster.hosts(4, 4, inside=Link(300e9), between=Link(25e9 / 8, 20e-6), device=device)


def test_in_full_every_device_is_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, FULL)
    assert found.devices == (ComputeDevice("big", 2.0, 80 * 10**9, "a"), ComputeDevice("device1", 1.0, 500 << 20, "b"))
    assert found.links == (Link(300e9), Link(10e9 / 8))


def test_prices_are_of_hosts_or_of_devices(tmp_path: Path) -> None:
    found = read(tmp_path, COMPACT + "price_per_hour: 12\n")
    assert {device.price_per_hour for device in found.devices} == {3.0}
    full = read(tmp_path, FULL.replace("host: a}", "host: a, price_per_hour: 2.5}"))
    assert [device.price_per_hour for device in full.devices] == [2.5, None]


def test_one_host_needs_no_link_between_hosts(tmp_path: Path) -> None:
    assert len(read(tmp_path, "hosts: 1\nper_host: 8\ninside: 300 GB/s\n").devices) == 8
    assert read(tmp_path, "hosts: 8\nper_host: 1\nbetween: 1 GB/s\n").links[0] == Link()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (COMPACT.replace("per_host", "perhost"), ["line 2: perhost: unknown; did you mean per_host?"]),
        ("hosts: 2\ndevices_per_host: 2\n", ["line 2: devices_per_host: unknown; did you mean per_host?"]),
        (COMPACT.replace("hosts: 4", "hosts: 0", 1), ["line 1: hosts: 0 is not possible"]),
        (COMPACT.replace("24 GiB", "24 GBit"), ["line 3: device.memory: '24 GBit' has the unit 'GBit'", "GiB"]),
        (COMPACT.replace("24 GiB", "much"), ["line 3: device.memory: 'much' is not a memory", "24 GiB"]),
        (COMPACT.replace("speed: 2.5", "speed: -1"), ["line 3: device.speed: -1 is not possible"]),
        (COMPACT.replace("speed: 2.5", "cores: 2"), ["line 3: device.cores: unknown", "memory, speed"]),
        (COMPACT.replace("300 GB/s", "300 GB"), ["line 4: inside: '300 GB' has the unit 'GB'", "Gbit/s"]),
        (COMPACT.replace("20 us", "20 hours"), ["line 5: between.latency: '20 hours'", "ms"]),
        (COMPACT.replace("inside: 300 GB/s\n", ""), ["inside: missing", "25 Gbit/s"]),
        (COMPACT.replace("hosts: 4\n", "", 1), ["hosts: missing", "list of devices"]),
        (FULL.replace("host: b", "hosts: b"), ["devices.1.hosts: unknown; did you mean host?"]),
        (FULL.replace("links", "link"), ["link: unknown; did you mean links?"]),
        ("devices: []\nlinks: [1 GB/s]\n", ["line 1: devices: [] is not a list with at least one entry"]),
        ("devices: [{}]\n", ["links: None is not a list"]),
        (COMPACT + "price_per_hour: cheap\n", ["line 6: price_per_hour: 'cheap' is not possible", "as in 3.06"]),
        (FULL.replace("host: b", "price_per_hour: -1"), ["devices.1.price_per_hour: -1 is not possible"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "cluster.yaml"))
    for word in words:
        assert word in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("24 GiB", "memory", 24 * 2**30),
        ("24GB", "memory", 24e9),
        (17, "memory", 17.0),
        ("1.5e3 B", "memory", 1500.0),
        ("25 Gbit/s", "bandwidth", 3.125e9),
        ("300 GB/s", "bandwidth", 3e11),
        ("20 us", "latency", 2e-5),
        (0, "latency", 0.0),
    ],
)
def test_quantities(text: object, kind: str, value: float) -> None:
    assert math.isclose(parse_quantity(text, kind), value)


@pytest.mark.parametrize("bad", [True, "", "-1 GiB", "nan", "1..2 GiB", 0, None, []])
def test_no_quantities(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a memory; write it as in 24 GiB"):
        parse_quantity(bad, "memory")


INSIDE = LinkProbe("10.0.0.1", "10.0.0.1", 50e-6, 2e9)
LINKS = [
    LinkProbe("10.0.0.1", "10.0.0.2", 200e-6, 110e6),
    LinkProbe("10.0.0.2", "10.0.0.1", 250e-6, 117e6),
    INSIDE,
]


def test_the_slowest_link_between_hosts_stands_for_all(tmp_path: Path) -> None:
    found = read(tmp_path, cluster_text({"10.0.0.1": 2, "10.0.0.2": 1}, LINKS))
    places = [("10.0.0.1/0", "10.0.0.1"), ("10.0.0.1/1", "10.0.0.1"), ("10.0.0.2/0", "10.0.0.2")]
    assert found.devices == tuple(ComputeDevice(name, host=host) for name, host in places)
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


def test_a_link_may_share_its_wire(tmp_path: Path) -> None:
    wan = "{bandwidth: 200 Mbit/s, latency: 50 ms, duplex: half, latency_occupies_wire: true}"
    found = read(tmp_path, f"hosts: 8\nper_host: 1\nbetween: {wan}\n")
    assert found.links[1] == Link(25e6, 0.05, "half", latency_occupies_wire=True)
    assert Cluster.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("link", "part"),
    [
        ("{duplex: simplex}", "'simplex' is not possible; give full or half"),
        ("{latency_occupies_wire: 1}", "1 is not possible; give true or false"),
    ],
)
def test_a_wire_is_shared_or_not(tmp_path: Path, link: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read(tmp_path, f"hosts: 2\nper_host: 1\nbetween: {link}\n")
