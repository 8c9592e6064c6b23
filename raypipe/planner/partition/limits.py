"""What a partition has to keep: the second half of every solver's input, beside graph and cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from raypipe.errors import PlanError
from raypipe.ir.cluster import Device
from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.planner.memory import MemoryModel

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a partition.

    Attributes:
        num_stages: exactly so many; None takes as many as are worth it, at most one per device.
        memory: schedule and sizes that decide a stage's bytes.
        memory_limit_bytes: per device, on top of the device's own; None for none.
        room_bytes: kept free on every device for boundary messages and workspaces; ``fit`` sets it.
        update_interval: micro-batches per optimizer step, over which replicas spread their all-reduce;
            1 is PipeDream's update after every micro-batch.
        max_replicas: devices per stage at most, None for no bound; only ``hierarchical`` replicates.
        in_order: stage s on device s, all of them in use: who asks has placed the stages already.
        sync_s_per_byte: by stage, seconds per micro-batch for each trainable byte on it, which its replicas sum; with
            ``in_order`` only. Empty for none.
        sums_factor: bytes that replicas exchange for each byte of gradients.
        shards: they exchange parameters behind their steps, in place of totals.
        codecs: of messages forwards and backwards.
        max_states: ``antichain`` refuses a graph with more sets of executed nodes than this.
    """

    num_stages: int | None = None
    memory: MemoryModel = field(default_factory=MemoryModel)
    memory_limit_bytes: int | None = None
    room_bytes: int = 0
    update_interval: int = 1
    max_replicas: int | None = None
    in_order: bool = False
    sync_s_per_byte: tuple[float, ...] = ()
    sums_factor: float = 1.0
    shards: bool = False
    codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC)
    max_states: int = 100_000

    def __post_init__(self) -> None:
        optional = (self.num_stages, self.memory_limit_bytes, self.max_replicas)
        if min(1 if x is None else x for x in (*optional, self.update_interval, self.max_states)) < 1:
            raise PlanError(f"{self}: each bound must be at least 1, or None where that is allowed.")

    def sync_ps_per_byte(self, depth: int) -> float:
        """``sync_s_per_byte`` of the stage at this depth, in picoseconds; the last stage is at depth 1."""
        return self.sync_s_per_byte[-depth] * 1e12 if self.sync_s_per_byte else 0.0

    def capacity_bytes(self, device: Device) -> int | None:
        """Bytes that the nodes of one stage may use on this device, None for no limit."""
        caps = [cap for cap in (device.memory_bytes, self.memory_limit_bytes) if cap is not None]
        return min(caps) - self.memory.reserve_bytes - self.room_bytes if caps else None
