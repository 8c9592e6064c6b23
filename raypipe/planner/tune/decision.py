"""One decision about a profiled model, before the stages are built."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.ir.candidate import Candidate
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.prediction import Prediction
from raypipe.planner.microbatch import MicrobatchChoice
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tune.request import Request

__all__ = ["Decision", "step_s_of"]


@dataclass(frozen=True, slots=True)
class Decision:
    """All that is decided before the stages are built.

    Attributes:
        request: with the schedule settled; what ``build_schedule`` takes for any number of micro-batches.
        graph: seconds at the micro-batch size decided on.
        cluster: what it was planned for.
        limits: with the memory model of the schedule.
        choice: of the micro-batches; None where they were given, or a rule stands in.
        of_all: it was found among all cuts, numbers of micro-batches and schedules, so that nothing is left to search.
        reasons: (what, why) of each choice.
        candidates: shapes that were compared; empty where the number of replicas was given.
    """

    request: Request
    graph: ModelGraph
    cluster: Cluster
    limits: Limits
    partition: Partition
    minibatch_size: int
    microbatch_size: int
    num_microbatches: int
    choice: MicrobatchChoice | None
    prediction: Prediction
    of_all: bool = False
    reasons: tuple[tuple[str, str], ...] = ()
    candidates: tuple[Candidate, ...] = ()


def step_s_of(decision: Decision) -> float:
    """Predicted seconds of its step, by which decisions are compared."""
    return decision.prediction.step_s
