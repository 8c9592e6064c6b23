"""What the controller turns: the schedule's kind with k or r, the micro-batches, and a codec per link and direction.

1f1b          kfkb k=3          slack r=1,3,1          zb-h1 r=2,2          ... + int8/bf16 on hop 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.errors import PlanError
from raypipe.ir.schedule import Schedule
from raypipe.planner.memory import MemoryModel
from raypipe.planner.schedule import make_schedule

__all__ = ["NO_CODEC", "Choice", "Codec", "schedule_of"]


@dataclass(frozen=True, slots=True)
class Codec:
    """What compressing one direction of a link costs and saves, as measured.

    Attributes:
        name: as in codec_forward and codec_backward.
        ratio: bytes before over bytes on the wire.
        encode_s_per_byte, decode_s_per_byte: per byte before the codec, on the link's own thread.
    """

    name: str
    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and self.encode_s_per_byte >= 0 and self.decode_s_per_byte >= 0):
            raise PlanError(f"{self}: give a ratio above 0 and seconds per byte from 0 up.")


NO_CODEC = Codec("none")


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of every knob.

    Attributes:
        kind: "1f1b", "kfkb", "slack", "zb-h1" or "gpipe".
        num_microbatches: M.
        group_size: k of kfkb.
        slack: r by hop, of slack and zb-h1.
        forward_codecs, backward_codecs: names by hop; empty means "none" on all.
    """

    kind: str
    num_microbatches: int
    group_size: int = 1
    slack: tuple[int, ...] = ()
    forward_codecs: tuple[str, ...] = ()
    backward_codecs: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = self.kind
        if self.kind == "kfkb":
            text = f"kfkb k={self.group_size}"
        elif self.slack:
            text = f"{self.kind} r={','.join(map(str, self.slack))}"
        pairs = list(zip(self._named(self.forward_codecs), self._named(self.backward_codecs), strict=True))
        coded = [f"{f}/{b} on hop {h}" for h, (f, b) in enumerate(pairs) if (f, b) != ("none", "none")]
        return " + ".join([text, *coded])

    def _named(self, codecs: tuple[str, ...]) -> tuple[str, ...]:
        return codecs or ("none",) * max(len(self.forward_codecs), len(self.backward_codecs))

    def codec(self, hop: int, forward: bool) -> str:
        """Name of the codec on one way of a hop."""
        codecs = self.forward_codecs if forward else self.backward_codecs
        return codecs[hop] if codecs else "none"

    @property
    def lossy(self) -> bool:
        """Whether any message is compressed."""
        return any(name != "none" for name in (*self.forward_codecs, *self.backward_codecs))

    @property
    def order(self) -> tuple[str, int, int, tuple[int, ...]]:
        """What decides the rows of actions: all but the codecs."""
        return self.kind, self.num_microbatches, self.group_size, self.slack

    def memory_model(self) -> MemoryModel:
        """What knows the micro-batches in flight and the messages that wait."""
        return MemoryModel(self.kind, self.num_microbatches, group_size=self.group_size, slack=self.slack)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Choice:
        """Inverse of ``to_dict``, as JSON keeps it (lists for tuples)."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
        return cls(**values)


def schedule_of(choice: Choice, num_stages: int, first_trainable: int = 0, *, overlap: bool = False) -> Schedule:
    """The compute actions of one step.

    Args:
        overlap: steps with parted backwards may overlap.

    Raises:
        ScheduleError: a number is out of range.
    """
    return make_schedule(
        choice.kind,
        num_stages,
        choice.num_microbatches,
        group_size=choice.group_size if choice.kind == "kfkb" else None,
        slack=choice.slack if choice.kind in ("slack", "zb-h1") else None,
        first_trainable=first_trainable,
        overlap=overlap,
    )
