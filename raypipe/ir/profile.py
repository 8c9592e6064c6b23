"""What a profile says: a graph with seconds in its nodes, how far to trust them, and how they grow with the batch.

graph.nodes     seconds and kept bytes of each node, at ``microbatch_size`` samples
whole           forward and backward of the whole model, measured in one piece
raw_ratio       sum over the nodes as they were measured, over the whole; the nodes are scaled by its inverse
seconds_by_size (1, t), (2, t), (4, t), ...: the whole model again, for the number of micro-batches
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph

__all__ = ["DOUBTFUL", "Profile"]

FORMAT = 1
DOUBTFUL = 0.25
"""A raw sum further than this from the whole is mentioned in ``notes``."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiled model.

    Attributes:
        graph: its nodes have seconds per micro-batch, bytes kept per sample, and their source.
        microbatch_size: samples at which the seconds were taken.
        forward_s, backward_s: of the whole model with its loss; the nodes' sums agree with them.
        raw_ratio: (forward, backward) sums of the nodes before scaling, over the whole in the same round, in the
            median; 1 where estimated.
        seconds_by_size: (samples, forward and backward seconds of the whole model), by samples.
        device: what it was measured on, in words.
        notes: what a person should know, one sentence each.
    """

    graph: ModelGraph
    microbatch_size: int
    forward_s: float
    backward_s: float
    raw_ratio: tuple[float, float]
    seconds_by_size: tuple[tuple[int, float], ...]
    device: str
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """ "measured" where every node is, else "estimated"."""
        return "measured" if all(node.source == "measured" for node in self.graph.nodes) else "estimated"

    def to_json(self) -> str:
        """The profile as text; ``from_json`` gives an equal one."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({"format": FORMAT, **fields, "graph": json.loads(self.graph.to_json())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Inverse of ``to_json``.

        Raises:
            PlanError: the text is not such a profile; names what is wrong.
        """
        try:
            found = json.loads(text)
            if found.pop("format") != FORMAT:
                raise PlanError(f"This profile is not of format {FORMAT}, which this release reads: measure anew.")
            return cls(
                graph=ModelGraph.from_json(json.dumps(found["graph"])),
                microbatch_size=int(found["microbatch_size"]),
                forward_s=float(found["forward_s"]),
                backward_s=float(found["backward_s"]),
                raw_ratio=(float(found["raw_ratio"][0]), float(found["raw_ratio"][1])),
                seconds_by_size=tuple((int(b), float(t)) for b, t in found["seconds_by_size"]),
                device=str(found["device"]),
                notes=tuple(map(str, found["notes"])),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"This is not a saved profile ({error!r}): measure anew.") from None
