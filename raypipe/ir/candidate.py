"""Shapes of a pipeline that were compared: how many workers each stage has, what a step takes, or why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan of one shape.

    Attributes:
        workers: by stage.
        step_s: predicted seconds of a step; 0 where it is refused.
        memory_bytes: of the fullest worker; 0 where it is refused.
        num_microbatches, microbatch_size: with which it is quickest; 0 where it is refused.
        refused: why it cannot be, "" where it can.
        chosen: it is the plan.
    """

    workers: tuple[int, ...]
    step_s: float = 0.0
    memory_bytes: int = 0
    num_microbatches: int = 0
    microbatch_size: int = 0
    refused: str = ""
    chosen: bool = False

    @property
    def kind(self) -> str:
        """In the words of the field."""
        if self.workers == (1,):
            return "one worker"
        if len(self.workers) == 1:
            return "data parallelism"
        return "pipeline" if max(self.workers) == 1 else "replicated stages"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Candidate:
        """Inverse of ``to_dict``, as JSON keeps it (lists for tuples)."""
        return cls(**{**found, "workers": tuple(found["workers"])})
