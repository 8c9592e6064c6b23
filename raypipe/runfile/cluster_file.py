"""Clusters as YAML files, short or in full, with units; a mistake is named by file, line and field.

    hosts: 4                                   devices: [{name: a, memory: 24 GiB, speed: 1.0, host: h0}, ...]
    per_host: 4                                links: [{bandwidth: 300 GB/s}, {bandwidth: 25 Gbit/s, latency: 20 us}]
    device: {memory: 24 GiB, speed: 1.0}
    inside: 300 GB/s                           links[0] inside a host, links[1] between hosts, and so on outwards
    between: {bandwidth: 25 Gbit/s, latency: 20 us}

speed is relative to the machine that timed the model, on which `raypipe plan` or `raypipe profile` ran: 2.0 needs half
of its seconds; the default is 1.0. A bandwidth alone is a link without latency. ``price_per_hour`` is the price of a
host, or of a device in a list; in any currency, for all or for none. A link whose wire carries one
message at a time has ``duplex: half`` or ``latency_occupies_wire: true`` (``ir.cluster.Link``).

`raypipe probe` writes such a file. It has one link between hosts: the slowest one that was measured, since a pipeline
waits for its slowest link.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError, PlanError
from raypipe.ir.cluster import DUPLEX, Cluster, ComputeDevice, Link
from raypipe.ir.communication import LinkProbe
from raypipe.runfile.run_file import RunFile, refuse, refuse_unknown
from raypipe.runfile.yaml_text import Path as KeyPath
from raypipe.runfile.yaml_text import parse

_BYTES = {f"{prefix}B": Fraction(1000**i) for i, prefix in enumerate(("", "k", "M", "G", "T"))}
_BYTES |= {f"{prefix}iB": Fraction(1024 ** (i + 1)) for i, prefix in enumerate("KMGT")} | {"KB": Fraction(1000)}
UNITS: Mapping[str, Mapping[str, Fraction]] = {
    "memory": _BYTES,
    "bandwidth": {
        **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
        **{f"{prefix}bit/s": Fraction(1000**i, 8) for i, prefix in enumerate(("", "k", "M", "G", "T"))},
    },
    "latency": {unit: Fraction(1, 10**digits) for unit, digits in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9))},
    "deadline": {"s": Fraction(1), "min": Fraction(60), "h": Fraction(3600), "days": Fraction(86400)},
}
"""{kind of quantity: {unit: factor}}: factors to bytes, bytes per second or seconds, the units of a plain number."""

EXAMPLES = {"memory": "24 GiB", "bandwidth": "25 Gbit/s", "latency": "20 us", "deadline": "12 h"}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster's YAML file.

    Raises:
        ConfigError: the message has file, line and field, and the possible values.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of a cluster's YAML file.") from error
    values, lines = parse(text, str(path))
    file = RunFile(str(path), values, {key: f"line {line}" for key, line in lines.items()})
    try:
        return _in_full(file) if "devices" in values else _in_few_words(file)
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None


def _in_few_words(file: RunFile) -> Cluster:
    refuse_unknown(file, (), file.values, _FEW)
    hosts, per_host = _count(file, "hosts"), _count(file, "per_host")
    device = file.values.get("device", {})
    _check_mapping(file, ("device",), device, ("memory", "speed"))
    if "links" in file.values:
        refuse(file, ("links",), "belongs to a list of devices; with hosts and per_host, give inside and between.")
    ends = {}
    for name, needed in (("inside", per_host > 1), ("between", hosts > 1)):
        if needed and name not in file.values:
            raise ConfigError(f"{file.name}: {name}: missing; {_WHERE[name]}, as in {name}: {EXAMPLES['bandwidth']}.")
        ends[name] = _link(file, (name,), file.values[name]) if name in file.values else Link()
    like = _device(file, ("device",), device)
    price = _price(file, (), file.values)
    like = replace(like, price_per_hour=None if price is None else price / per_host)
    return Cluster.hosts(hosts, per_host, inside=ends["inside"], between=ends["between"], device=like)


_FEW = ("hosts", "per_host", "device", "inside", "between", "price_per_hour", "devices", "links")

_WHERE = {
    "inside": "give the link between the devices of one host",
    "between": "give the link between the hosts",
}


def _in_full(file: RunFile) -> Cluster:
    refuse_unknown(file, (), file.values, ("devices", "links"))
    devices, links = file.values["devices"], file.values.get("links")
    for name, rows in (("devices", devices), ("links", links)):
        if not isinstance(rows, list) or not rows:
            refuse(
                file, (name,), f"{rows!r} is not a list with at least one entry; links go from the innermost outwards."
            )
    listed = []
    for i, row in enumerate(devices):
        path = ("devices", str(i))
        _check_mapping(file, path, row, ("name", "memory", "speed", "host", "price_per_hour"))
        device = _device(file, path, row)
        listed.append(
            replace(
                device,
                name=str(row.get("name", f"device{i}")),
                host=str(row.get("host", "")),
                price_per_hour=_price(file, path, row),
            )
        )
    return Cluster(tuple(listed), tuple(_link(file, ("links", str(i)), row) for i, row in enumerate(links or ())))


def _price(file: RunFile, path: KeyPath, row: Mapping[str, Any]) -> float | None:
    price = row.get("price_per_hour")
    if price is None:
        return None
    if type(price) not in (int, float) or not (math.isfinite(price) and price >= 0):
        refuse(file, (*path, "price_per_hour"), f"{price!r} is not possible; give a number from 0 up, as in 3.06.")
    return float(price)


def _count(file: RunFile, name: str) -> int:
    value = file.values.get(name)
    if value is None:
        raise ConfigError(f"{file.name}: {name}: missing; give hosts and per_host, or a list of devices.")
    if type(value) is not int or value < 1:
        refuse(file, (name,), f"{value!r} is not possible; give an integer of at least 1.")
    return value


def _check_mapping(file: RunFile, path: KeyPath, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, dict):
        refuse(file, path, f"{value!r} is not a mapping; possible keys are {', '.join(known)}.")
    refuse_unknown(file, path, value, known)


def _device(file: RunFile, path: KeyPath, row: Mapping[str, Any]) -> ComputeDevice:
    speed, memory = row.get("speed", 1.0), row.get("memory")
    if type(speed) not in (int, float) or not (math.isfinite(speed) and speed > 0):
        refuse(
            file,
            (*path, "speed"),
            f"{speed!r} is not possible; give a number above 0, 1.0 for the machine that times the model.",
        )
    limit = None if memory is None else round(_quantity(file, (*path, "memory"), memory, "memory"))
    return ComputeDevice("device", float(speed), limit)


def _link(file: RunFile, path: KeyPath, value: Any) -> Link:
    if not isinstance(value, dict):
        return Link(_quantity(file, path, value, "bandwidth"))
    refuse_unknown(file, path, value, ("bandwidth", "latency", "duplex", "latency_occupies_wire"))
    latency = _quantity(file, (*path, "latency"), value["latency"], "latency") if "latency" in value else 0.0
    bandwidth = math.inf
    if "bandwidth" in value:
        bandwidth = _quantity(file, (*path, "bandwidth"), value["bandwidth"], "bandwidth")
    duplex, occupies = value.get("duplex", "full"), value.get("latency_occupies_wire", False)
    if duplex not in DUPLEX:
        refuse(file, (*path, "duplex"), f"{duplex!r} is not possible; give full or half.")
    if type(occupies) is not bool:
        refuse(file, (*path, "latency_occupies_wire"), f"{occupies!r} is not possible; give true or false.")
    if occupies and not latency:
        refuse(file, (*path, "latency_occupies_wire"), "has no effect without a latency; give one, or leave it out.")
    if duplex == "half" and not occupies and bandwidth == math.inf:
        refuse(file, (*path, "duplex"), "half has no effect without a bandwidth; give one, or leave it out.")
    return Link(bandwidth, latency, duplex, occupies)


def _quantity(file: RunFile, path: KeyPath, value: Any, kind: str) -> float:
    try:
        return parse_quantity(value, kind)
    except ValueError as error:
        refuse(file, path, str(error))


def parse_quantity(value: Any, kind: str) -> float:
    """Parse "24 GiB" and the like: memory in bytes, bandwidth in bytes per second, latency or deadline in seconds.

    Args:
        value: text, or a number without a unit.
        kind: "memory", "bandwidth", "latency" or "deadline".

    Raises:
        ValueError: not a number, an unknown unit, or out of range; the message has an example.
    """
    text = str(value) if not isinstance(value, bool) else "?"
    match = _QUANTITY.fullmatch(text)
    unit = match[2] if match else ""
    if match and unit and unit not in UNITS[kind]:
        raise ValueError(f"{value!r} has the unit {unit!r}; {kind} is written in {', '.join(UNITS[kind])}.")
    try:
        number = float(Fraction(match[1]) * (UNITS[kind][unit] if unit else 1)) if match else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and kind != "latency"):
        raise ValueError(f"{value!r} is not a {kind}; write it as in {EXAMPLES[kind]}.")
    return number


def cluster_text(devices: Mapping[str, int], links: Sequence[LinkProbe]) -> str:
    """Return the text of a cluster's YAML file, from measured links.

    Args:
        devices: number of workers by node; nodes without a worker are left out.
        links: measurements between every two nodes, and from at least one node to itself.

    Raises:
        ConfigError: no node has room for a worker.
    """
    hosts = [host for host, count in devices.items() if count > 0]
    if not hosts:
        raise ConfigError("No node of the cluster has a CPU or GPU for a worker. Add a node with one.")
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
