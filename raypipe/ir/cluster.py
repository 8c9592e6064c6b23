"""Devices that stages are placed on, and the links between them.

    rack0/host0   rack0/host1      rack1/host2      ComputeDevice.host
      0  1          2  3              4  5          devices
      ----          ----              ----          links[0], inside a host
      -----------------                             links[1], between hosts
      -----------------------------------           links[2], between racks

The link between two devices is the entry for the first part of the host path in which they differ. If the paths are
deeper than ``links``, its last entry is used for everything further out.

With ``duplex="half"`` each device receives activations and gradients over one wire, in turn. Other wires that several
pairs of devices share are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.errors import PlanError


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """Device that holds one worker.

    Attributes:
        name: shown in plans.
        speed: work per second, relative to the device on which the model was profiled.
        memory_bytes: limit for all stages on the device; None for no limit.
        host: path of its machine, as ``rack0/host1``.
        price_per_hour: rent in any currency; None if unknown. The price of a host is the sum over its devices.
    """

    name: str = "device"
    speed: float = 1.0
    memory_bytes: int | None = None
    host: str = ""
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise PlanError(f"Device {self.name!r} has speed={self.speed}: give a number above 0.")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise PlanError(f"Device {self.name!r} has memory_bytes={self.memory_bytes}: give bytes above 0, or None.")
        if self.price_per_hour is not None and not (math.isfinite(self.price_per_hour) and self.price_per_hour >= 0):
            raise PlanError(f"Device {self.name!r} has price_per_hour={self.price_per_hour}: give a number from 0 up.")


DUPLEX = ("full", "half")


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two devices, as latency and bandwidth.

    Attributes:
        bandwidth_bytes_s: bytes per second.
        latency_s: seconds from sending to arrival, in addition to bytes / bandwidth.
        duplex: "full" if each direction of each pair of devices has this bandwidth; "half" if a device receives from
            both of its neighbours in the pipeline over one wire of this bandwidth, one message after the other.
        latency_occupies_wire: True if the next message waits until this one has arrived, so that a message keeps the
            wire for bytes / bandwidth + latency; False if only its bytes do.
    """

    bandwidth_bytes_s: float = math.inf
    latency_s: float = 0.0
    duplex: str = "full"
    latency_occupies_wire: bool = False

    def __post_init__(self) -> None:
        if self.duplex not in DUPLEX:
            raise PlanError(f"{self}: duplex={self.duplex!r} is unknown; give {' or '.join(map(repr, DUPLEX))}.")
        if type(self.latency_occupies_wire) is not bool:
            raise PlanError(f"{self}: latency_occupies_wire={self.latency_occupies_wire!r}; give True or False.")
        if not (self.bandwidth_bytes_s > 0 and 0 <= self.latency_s < math.inf):
            raise PlanError(f"{self}: give a bandwidth above 0 and a latency from 0 up.")

    @property
    def half_duplex(self) -> bool:
        return self.duplex == "half"

    def transfer_s(self, nbytes: float) -> float:
        """Return the seconds until all bytes have arrived."""
        return self.latency_s + nbytes / self.bandwidth_bytes_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in the order in which a pipeline would run through them, and the links that join them.

    Attributes:
        devices: at least one.
        links: one for each level of the hierarchy: inside a host, between hosts, and so on outwards.
    """

    devices: tuple[ComputeDevice, ...]
    links: tuple[Link, ...] = (Link(),)

    def __post_init__(self) -> None:
        if not self.devices or not self.links:
            raise PlanError("A cluster needs at least one device and one link: list them.")

    @classmethod
    def uniform(
        cls, num_devices: int, *, memory_bytes: int | None = None, bandwidth_bytes_s: float = math.inf
    ) -> Cluster:
        """Create equal devices with equal links between all of them."""
        devices = tuple(ComputeDevice(f"device{i}", memory_bytes=memory_bytes) for i in range(num_devices))
        return cls(devices, (Link(bandwidth_bytes_s),))

    @classmethod
    def hosts(
        cls, num_hosts: int, per_host: int, *, inside: Link, between: Link, device: ComputeDevice | None = None
    ) -> Cluster:
        """Create equal hosts of equal devices: 16 GPUs on 4 hosts are ``hosts(4, 4, ...)``."""
        like = device or ComputeDevice()
        devices = (
            ComputeDevice(f"host{h}/device{i}", like.speed, like.memory_bytes, f"host{h}", like.price_per_hour)
            for h in range(num_hosts)
            for i in range(per_host)
        )
        return cls(tuple(devices), (inside, between))

    def link(self, a: int, b: int) -> Link:
        """Return the link between two devices, given by their positions."""
        return self.links[min(self.distance(a, b), len(self.links) - 1)]

    def distance(self, a: int, b: int) -> int:
        """Return the level of the link between two devices: 0 inside a host, 1 between hosts of one rack, and so on.

        Args:
            a, b: positions of the devices.
        """
        first, second = self.devices[a].host.split("/"), self.devices[b].host.split("/")
        same = next(
            (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
        )
        return max(len(first), len(second)) - same

    def to_json(self) -> str:
        """Serialize the cluster; an infinite bandwidth is written as null."""
        links = [
            asdict(x) | ({"bandwidth_bytes_s": None} if math.isinf(x.bandwidth_bytes_s) else {}) for x in self.links
        ]
        return json.dumps({"devices": [asdict(device) for device in self.devices], "links": links}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read a cluster that ``to_json`` wrote.

        Raises:
            PlanError: the text is not such a cluster; the message has what is wrong.
        """
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise PlanError(f"This is not a cluster ({error}): write devices and links as JSON.") from None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Cluster:
        """Create a cluster from parsed YAML or JSON.

        Args:
            fields: {"devices": ..., "links": ...}, each a list of mappings by field name.

        Raises:
            PlanError: a field is missing or unknown; the message has its name.
        """
        try:
            devices = tuple(ComputeDevice(**row) for row in fields["devices"])
            rows = [{k: v for k, v in row.items() if v is not None} for row in fields.get("links", [{}])]
            return cls(devices, tuple(Link(**row) for row in rows))
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"The cluster cannot be read ({error!r}). Give devices, each with name, speed, memory_bytes and host, "
                "and links from the innermost out, each with bandwidth_bytes_s and latency_s."
            ) from None
