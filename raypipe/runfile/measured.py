"""A cluster file of what `raypipe probe` measured, for `raypipe plan --cluster`.

    10.0.0.1 -> 10.0.0.1   2000 MB/s  0.05 ms         devices: [{name: 10.0.0.1/0, host: 10.0.0.1}, ...]
    10.0.0.1 -> 10.0.0.2    117 MB/s  0.20 ms   -->   links:
    10.0.0.2 -> 10.0.0.1    110 MB/s  0.25 ms           - {bandwidth: 2000.000 MB/s, latency: 50.0 us}   in a host
                                                        - {bandwidth: 110.000 MB/s, latency: 250.0 us}   between hosts

A cluster file has one link between hosts. The slowest one that was measured stands for all, since a pipeline waits for
its slowest link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypipe.errors import ConfigError
from raypipe.ir.links import LinkProbe

__all__ = ["cluster_text"]


def cluster_text(devices: Mapping[str, int], links: Sequence[LinkProbe]) -> str:
    """The file, as ``read_cluster`` reads it.

    Args:
        devices: places for workers by node; a node without any, as a head that only leads, is left out.
        links: between every two nodes, and from at least one node to itself.

    Raises:
        ConfigError: no node has a place for a worker.
    """
    hosts = [host for host, count in devices.items() if count > 0]
    if not hosts:
        raise ConfigError("No node of the cluster has a CPU or GPU for a worker, so that there is nothing to describe.")
    rows = [f"  - {{name: {host}/{i}, host: {host}}}" for host in hosts for i in range(devices[host])]
    inside = _slowest([link for link in links if link.source == link.target], "in a host")
    between = [link for link in links if link.source != link.target and {link.source, link.target} <= set(hosts)]
    return "\n".join([
        "# Measured by raypipe probe. Add to devices what it cannot know: memory: 24 GiB, price_per_hour: 3.06, and",
        "# speed: 2.0 where one computes twice as fast as the machine on which raypipe plan times the model.",
        "devices:",
        *rows,
        "links:",
        inside,
        *([_slowest(between, "between hosts, the slowest one")] if between else []),
        "",
    ])  # fmt: skip


def _slowest(links: Sequence[LinkProbe], what: str) -> str:
    bandwidth = min(link.bandwidth_bytes_s for link in links)
    latency_s = max(link.latency_s for link in links)
    return f"  - {{bandwidth: {bandwidth / 1e6:.3f} MB/s, latency: {latency_s * 1e6:.1f} us}} # {what}"
