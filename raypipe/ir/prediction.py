"""What a plan promises: seconds, bytes and the bound that decides, as numbers that a table and a program can read.

The model leaves out what ``planner.simulate`` and ``planner.memory`` leave out; whether the seconds behind it were
measured is said in ``source``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CurvePoint", "HopPrediction", "Prediction", "StagePrediction"]


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One stage, on each of its devices; a worker that holds several stages is the device of each of them.

    Attributes:
        devices: names, one per replica.
        forward_s, backward_s: seconds per micro-batch that passes, the replicas' work and all-reduce shared out unless
            they have rows of their own.
        weight_s: the part of backward_s that no other stage waits for (W).
        in_flight: most micro-batches between their F and their B, or W.
        fullest_at: the action at which memory is fullest, as ``0F3``.
        memory: bytes on one device at that moment, by what they are for.
        recompute: backwards run the forward again, which is in backward_s.
        limit_bytes: what the device offers, None where nobody said; of several stages on it, to all of them together.
        exchange_s: seconds of a step in which replicas sum their gradients, where they have rows of their own.
        hidden_s: the part of these that lies beside the last backward.
    """

    devices: tuple[str, ...]
    forward_s: float
    backward_s: float
    in_flight: int
    fullest_at: str
    memory: tuple[tuple[str, int], ...]
    limit_bytes: int | None = None
    weight_s: float = 0.0
    recompute: bool = False
    exchange_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def memory_bytes(self) -> int:
        return sum(count for _, count in self.memory)


@dataclass(frozen=True, slots=True)
class HopPrediction:
    """One message between two stages, one way, and the gradient that comes back.

    Attributes:
        message_bytes: of one micro-batch, before any codec.
        latency_s: from leaving to arrival, what a codec adds to it included.
        occupancy_s: for which it keeps the link busy, or the thread that encodes or decodes, whichever is longer.
        back_s: (latency, occupancy) of the gradient; None for the same.
    """

    message_bytes: int
    latency_s: float
    occupancy_s: float
    back_s: tuple[float, float] | None = None

    @property
    def ways_s(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(latency, occupancy) forwards, and backwards."""
        there_s = (self.latency_s, self.occupancy_s)
        return there_s, self.back_s or there_s

    @property
    def busiest_s(self) -> tuple[float, float]:
        """(latency, occupancy) of the way that is busy longer."""
        return max(self.ways_s, key=lambda way: (way[1], way[0]))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """N micro-batches of b samples, what the closed form says of them, and which bound refuses them ("" for none)."""

    num_microbatches: int
    microbatch_size: int
    predicted_s: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One optimizer step.

    Attributes:
        step_s: seconds, simulated with all messages; the optimizer's own are not in it.
        bubble_fraction: share of worker time without computation.
        samples_per_s: of training.
        one_f_one_b_s: the same step with schedule 1f1b; None where that is the schedule, and where workers hold
            several stages, for 1f1b would need another cut or more workers.
        bound: what decides the step, in words.
        source: of the nodes' seconds: "measured", "estimated" or "mixed".
        links: where bandwidths and latencies come from.
        stages, hops: in the order of the pipeline.
        curve: every number of micro-batches that was looked at; empty where it was given.
        optimum, low, high, epsilon: N*, and the range within epsilon of it; 0 where it was given.
        decided_by: the bound that decided the number of micro-batches: "optimum", "divisors", "schedule", "model",
            "memory", "simulation", "given" or "rule".
    """

    step_s: float
    bubble_fraction: float
    samples_per_s: float
    one_f_one_b_s: float | None
    bound: str
    source: str
    links: str
    stages: tuple[StagePrediction, ...]
    hops: tuple[HopPrediction, ...]
    curve: tuple[CurvePoint, ...] = ()
    optimum: float = 0.0
    low: float = 0.0
    high: float = 0.0
    epsilon: float = 0.0
    decided_by: str = "given"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a stage that exchanges nothing has no word about it, nor a hop whose two ways are alike."""
        found = asdict(self)
        for row in found["hops"]:
            if row["back_s"] is None:
                del row["back_s"]
        for row in found["stages"]:
            if not row["exchange_s"]:
                del row["exchange_s"], row["hidden_s"]
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Prediction:
        """Inverse of ``to_dict``, as JSON keeps it (lists for tuples)."""
        stages = (
            StagePrediction(
                **{
                    **row,
                    "devices": tuple(row["devices"]),
                    "memory": tuple((str(name), int(count)) for name, count in row["memory"]),
                }
            )
            for row in found["stages"]
        )
        hops = (
            HopPrediction(**{**row, "back_s": tuple(row["back_s"]) if row.get("back_s") else None})
            for row in found["hops"]
        )
        curve = (CurvePoint(**row) for row in found["curve"])
        return cls(**{**found, "stages": tuple(stages), "hops": tuple(hops), "curve": tuple(curve)})
