"""A cluster as a YAML file, in few words or in full, with units; a mistake is named by file, line and field.

    hosts: 4                                   devices: [{name: a, memory: 24 GiB, speed: 1.0, host: h0}, ...]
    per_host: 4                                links: [{bandwidth: 300 GB/s}, {bandwidth: 25 Gbit/s, latency: 20 us}]
    device: {memory: 24 GiB, speed: 1.0}
    inside: 300 GB/s                           links[0] inside a host, links[1] between hosts, and so on outwards
    between: {bandwidth: 25 Gbit/s, latency: 20 us}

speed says how many times as fast a device computes as the machine that timed the model, the one on which `raypipe plan`
or `raypipe profile` ran: 2.0 needs half of its seconds, and 1.0 is where nothing is said. A bandwidth alone is a link
without latency. ``price_per_hour`` is what a host costs, and in a list what that device does; in any currency, and
all of it or nothing.
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
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.runfile.read import RunFile, refuse, refuse_unknown
from raypipe.runfile.yaml_text import Path as KeyPath
from raypipe.runfile.yaml_text import parse

__all__ = ["parse_quantity", "read_cluster"]

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
"""What a quantity may be written in, by its kind; a plain number is in bytes, bytes per second or seconds."""

EXAMPLES = {"memory": "24 GiB", "bandwidth": "25 Gbit/s", "latency": "20 us", "deadline": "12 h"}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def read_cluster(path: str | Path) -> Cluster:
    """Read the file.

    Raises:
        ConfigError: names file, line and field, and what may stand there.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of a cluster's YAML file.") from error
    values, lines = parse(text, str(path))
    found = RunFile(str(path), values, {key: f"line {line}" for key, line in lines.items()})
    try:
        return _in_full(found) if "devices" in values else _in_few_words(found)
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None


def _in_few_words(found: RunFile) -> Cluster:
    refuse_unknown(found, (), found.values, _FEW)
    hosts, per_host = _count(found, "hosts"), _count(found, "per_host")
    device = found.values.get("device", {})
    _check_mapping(found, ("device",), device, ("memory", "speed"))
    if "links" in found.values:
        refuse(found, ("links",), "belongs to a list of devices; with hosts and per_host, give inside and between.")
    ends = {}
    for name, needed in (("inside", per_host > 1), ("between", hosts > 1)):
        if needed and name not in found.values:
            raise ConfigError(f"{found.name}: {name}: missing; {_WHERE[name]}, as in {name}: {EXAMPLES['bandwidth']}.")
        ends[name] = _link(found, (name,), found.values[name]) if name in found.values else Link()
    like = _device(found, ("device",), device)
    price = _price(found, (), found.values)
    like = replace(like, price_per_hour=None if price is None else price / per_host)
    return Cluster.hosts(hosts, per_host, inside=ends["inside"], between=ends["between"], device=like)


_FEW = ("hosts", "per_host", "device", "inside", "between", "price_per_hour", "devices", "links")

_WHERE = {
    "inside": "say how fast the devices of one host are joined",
    "between": "say how fast the hosts are joined",
}


def _in_full(found: RunFile) -> Cluster:
    refuse_unknown(found, (), found.values, ("devices", "links"))
    devices, links = found.values["devices"], found.values.get("links")
    for name, rows in (("devices", devices), ("links", links)):
        if not isinstance(rows, list) or not rows:
            refuse(
                found, (name,), f"{rows!r} is no list with at least one entry; links go from the innermost outwards."
            )
    made = []
    for i, row in enumerate(devices):
        path = ("devices", str(i))
        _check_mapping(found, path, row, ("name", "memory", "speed", "host", "price_per_hour"))
        device = _device(found, path, row)
        made.append(
            replace(
                device,
                name=str(row.get("name", f"device{i}")),
                host=str(row.get("host", "")),
                price_per_hour=_price(found, path, row),
            )
        )
    return Cluster(tuple(made), tuple(_link(found, ("links", str(i)), row) for i, row in enumerate(links or ())))


def _price(found: RunFile, path: KeyPath, row: Mapping[str, Any]) -> float | None:
    price = row.get("price_per_hour")
    if price is None:
        return None
    if type(price) not in (int, float) or not (math.isfinite(price) and price >= 0):
        refuse(found, (*path, "price_per_hour"), f"{price!r} is not possible; give a number from 0 up, as in 3.06.")
    return float(price)


def _count(found: RunFile, name: str) -> int:
    value = found.values.get(name)
    if value is None:
        raise ConfigError(f"{found.name}: {name}: missing; give hosts and per_host, or a list of devices.")
    if type(value) is not int or value < 1:
        refuse(found, (name,), f"{value!r} is not possible; give an integer of at least 1.")
    return value


def _check_mapping(found: RunFile, path: KeyPath, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, dict):
        refuse(found, path, f"{value!r} is no mapping; possible keys are {', '.join(known)}.")
    refuse_unknown(found, path, value, known)


def _device(found: RunFile, path: KeyPath, row: Mapping[str, Any]) -> Device:
    speed, memory = row.get("speed", 1.0), row.get("memory")
    if type(speed) not in (int, float) or not (math.isfinite(speed) and speed > 0):
        refuse(
            found,
            (*path, "speed"),
            f"{speed!r} is not possible; give a number above 0, 1.0 for the machine that times the model.",
        )
    limit = None if memory is None else round(_quantity(found, (*path, "memory"), memory, "memory"))
    return Device("device", float(speed), limit)


def _link(found: RunFile, path: KeyPath, value: Any) -> Link:
    if not isinstance(value, dict):
        return Link(_quantity(found, path, value, "bandwidth"))
    refuse_unknown(found, path, value, ("bandwidth", "latency"))
    latency = _quantity(found, (*path, "latency"), value["latency"], "latency") if "latency" in value else 0.0
    if "bandwidth" not in value:
        return Link(latency_s=latency)
    return Link(_quantity(found, (*path, "bandwidth"), value["bandwidth"], "bandwidth"), latency)


def _quantity(found: RunFile, path: KeyPath, value: Any, kind: str) -> float:
    try:
        return parse_quantity(value, kind)
    except ValueError as error:
        refuse(found, path, str(error))


def parse_quantity(value: Any, kind: str) -> float:
    """A memory in bytes, a bandwidth in bytes per second, a latency or deadline in seconds, from "24 GiB" and the like.

    Args:
        kind: "memory", "bandwidth", "latency" or "deadline".

    Raises:
        ValueError: no number, an unknown unit, or out of range; says what is right.
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
        raise ValueError(f"{value!r} is no {kind}; write it as in {EXAMPLES[kind]}.")
    return number
