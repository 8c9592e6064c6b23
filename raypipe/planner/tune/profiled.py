"""A model with seconds, at any micro-batch size; and one decision about it, before the stages are built."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.prediction import Prediction
from raypipe.planner.microbatch import MicrobatchChoice, StageTime, fit_stage_time
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tune.request import Request

__all__ = ["Decision", "Profiled"]


@dataclass(frozen=True)
class Profiled:
    """A model with seconds.

    Attributes:
        graph: seconds of its nodes at ``microbatch_size`` samples.
        points: (samples, seconds) of the whole model, forward and backward; fewer than two say nothing of other
            sizes, whose seconds then count as proportional.
        notes: what a person should know of how it was measured, one sentence each.
    """

    graph: ModelGraph
    microbatch_size: int
    points: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def times(self) -> StageTime | None:
        """t(b) of the whole model."""
        return fit_stage_time(dict(self.points)) if len(self.points) > 1 else None

    def seconds(self, samples: int) -> float:
        """Seconds of one micro-batch of so many samples through the whole model, by the curve through the points."""
        times, here_s = self.times, self.graph.busy_s
        if times is None:
            return here_s * samples / self.microbatch_size
        return here_s * times.seconds(samples) / times.seconds(self.microbatch_size)

    def to_json(self) -> str:
        """The profile as text; ``from_json`` gives an equal one."""
        graph = json.loads(self.graph.to_json())
        fields = {"microbatch_size": self.microbatch_size, "points": self.points, "notes": self.notes}
        return json.dumps({**fields, "graph": graph}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profiled:
        """Inverse of ``to_json``.

        Raises:
            PlanError: the text is no such profile; names what is wrong.
        """
        try:
            found = json.loads(text)
            points = tuple((int(b), float(s)) for b, s in found["points"])
            graph = ModelGraph.from_json(json.dumps(found["graph"]))
            return cls(graph, int(found["microbatch_size"]), points, tuple(map(str, found["notes"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved profile ({error!r}): write one with `raypipe profile CONFIG.yaml -o FILE`."
            ) from None

    def at(self, microbatch_size: int, graph: ModelGraph | None = None) -> ModelGraph:
        """The graph, or another form of it, with seconds at another size."""
        graph = graph or self.graph
        if microbatch_size == self.microbatch_size:
            return graph
        factor = self.seconds(microbatch_size) / (self.graph.busy_s or 1.0)
        nodes = (
            dataclasses.replace(
                node,
                forward_s=node.forward_s * factor,
                backward_input_s=node.backward_input_s * factor,
                backward_weight_s=node.backward_weight_s * factor,
            )
            for node in graph.nodes
        )
        return dataclasses.replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class Decision:
    """All that is decided before the stages are built.

    Attributes:
        request: with the schedule settled; what ``build_schedule`` takes for any number of micro-batches.
        graph: seconds at the micro-batch size decided on.
        cluster: what it was planned for.
        limits: with the memory model of the schedule.
        choice: of the micro-batches; None where they were given, or a rule stands in.
        reasons: (what, why) of each choice.
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
    reasons: tuple[tuple[str, str], ...] = ()
