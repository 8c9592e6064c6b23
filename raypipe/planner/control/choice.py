"""What the controller turns: the schedule, and a codec per link and direction.

1f1b          kfkb k=3          slack r=1,3,1          zb-h1 r=2,2          ... + int8/bf16 on hop 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.memory import MemoryModel
from raypipe.planner.row_memory import resident_under

__all__ = ["NO_CODEC", "Choice", "CodecCost"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of everything that can be turned.

    Attributes:
        spec: the schedule, of a kind with a memory formula.
        forward_codecs, backward_codecs: names by hop; empty means "none" on all.
    """

    spec: ScheduleSpec
    forward_codecs: tuple[str, ...] = ()
    backward_codecs: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = list(zip(self._named(self.forward_codecs), self._named(self.backward_codecs), strict=True))
        coded = [f"{f}/{b} on hop {h}" for h, (f, b) in enumerate(pairs) if (f, b) != ("none", "none")]
        return " + ".join([self.spec.name, *coded])

    def _named(self, codecs: tuple[str, ...]) -> tuple[str, ...]:
        return codecs or ("none",) * max(len(self.forward_codecs), len(self.backward_codecs))

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.spec.num_microbatches

    def codec(self, hop: int, forward: bool) -> str:
        """Name of the codec on one way of a hop."""
        codecs = self.forward_codecs if forward else self.backward_codecs
        return codecs[hop] if codecs else "none"

    @property
    def lossy(self) -> bool:
        """Whether any message is compressed."""
        return any(name != "none" for name in (*self.forward_codecs, *self.backward_codecs))

    def memory_model(self) -> MemoryModel:
        """What knows the micro-batches in flight and the messages that wait: of replicas, counted in their rows."""
        spec = self.spec
        counted = resident_under(spec, len(spec.replicas), sum(spec.replicas)) if spec.replicas else None
        return MemoryModel(spec, resident=counted)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Choice:
        """Inverse of ``to_dict``, as JSON keeps it (lists for tuples)."""
        codecs = (tuple(found[name]) for name in ("forward_codecs", "backward_codecs"))
        return cls(ScheduleSpec.from_dict(found["spec"]), *codecs)
