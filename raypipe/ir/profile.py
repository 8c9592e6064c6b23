"""Profile of a model: a graph with seconds in its nodes, their reliability, and their growth with the batch size.

graph.nodes     seconds and kept bytes of each node, at ``microbatch_size`` samples; they add up to the whole model's
raw_ratio       measured sum over the nodes / measured whole model; the nodes' seconds were divided by it
seconds_by_size (1, t), (2, t), (4, t), ...: the whole model, for choosing the number of micro-batches
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.from_plain import from_plain
from raypipe.ir.graph import ModelGraph

FORMAT = 3
ANEW = "measure anew with `raypipe profile CONFIG.yaml -o FILE`"
DOUBTFUL = 0.25
"""Relative difference between the sum of the nodes and the whole model, above which ``notes`` mention it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiled model.

    Attributes:
        graph: its nodes have seconds per micro-batch, bytes kept per sample, and their source. The seconds of all nodes
            add up to those of the whole model, including its loss.
        microbatch_size: samples at which the seconds were taken.
        seconds_by_size: (samples, forward and backward seconds of the whole model), sorted by samples, which may exceed
            ``microbatch_size``; with fewer than two entries, seconds are assumed proportional to samples.
        raw_ratio: (forward, backward) sum of the nodes before scaling / seconds of the whole model; 1 if not scaled.
        device: description of the device on which the model was measured.
        notes: warnings, one sentence each.
        small: (samples, forward and backward seconds by node) at a smaller size than ``microbatch_size``; None if
            nodes were measured at one size only.
        whole_loss: True if the loss is not among the nodes, because it is computed over the whole mini-batch.
    """

    graph: ModelGraph
    microbatch_size: int
    seconds_by_size: tuple[tuple[int, float], ...] = ()
    raw_ratio: tuple[float, float] = (1.0, 1.0)
    device: str = ""
    notes: tuple[str, ...] = ()
    small: tuple[int, tuple[float, ...]] | None = None
    whole_loss: bool = False

    @property
    def forward_s(self) -> float:
        """Seconds of one micro-batch forward through the whole model."""
        return sum(node.forward_s for node in self.graph.nodes)

    @property
    def backward_s(self) -> float:
        """Seconds of one micro-batch backward through the whole model."""
        return sum(node.backward_s for node in self.graph.nodes)

    @property
    def source(self) -> str:
        """Origin of the seconds: "measured" if every node was measured, else "estimated"."""
        return "measured" if all(node.source == "measured" for node in self.graph.nodes) else "estimated"

    def to_json(self) -> str:
        """Serialize the profile; ``from_json`` returns an equal one."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({"format": FORMAT, **fields, "graph": json.loads(self.graph.to_json())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile that ``to_json`` wrote.

        Raises:
            PlanError: the text is not such a profile; the message has what is wrong.
        """
        try:
            body = json.loads(text)
            if body.pop("format") != FORMAT:
                raise PlanError(f"This profile is not of format {FORMAT}, which this release reads: {ANEW}.")
            profile: Profile = from_plain(cls, {**body, "graph": ModelGraph.from_json(json.dumps(body["graph"]))})
            return profile
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"This is not a saved profile ({error!r}): {ANEW}.") from None
