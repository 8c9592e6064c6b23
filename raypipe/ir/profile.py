"""What a profile says: a graph with seconds in its nodes, how far to trust them, and how they grow with the batch.

graph.nodes     seconds and kept bytes of each node, at ``microbatch_size`` samples; they add up to the whole model's
raw_ratio       sum over the nodes as they were measured, over the whole; the nodes are scaled by its inverse
seconds_by_size (1, t), (2, t), (4, t), ...: the whole model again, for the number of micro-batches
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph

__all__ = ["DOUBTFUL", "Profile"]

FORMAT = 3
ANEW = "measure anew with `raypipe profile CONFIG.yaml -o FILE`"
DOUBTFUL = 0.25
"""A raw sum further than this from the whole is mentioned in ``notes``."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiled model.

    Attributes:
        graph: its nodes have seconds per micro-batch, bytes kept per sample, and their source; the sum of the seconds
            is the whole model's, its loss included.
        microbatch_size: samples at which the seconds were taken.
        seconds_by_size: (samples, forward and backward seconds of the whole model), by samples, some of them perhaps
            more than ``microbatch_size``; fewer than two say nothing of other sizes, whose seconds then count as
            proportional.
        raw_ratio: (forward, backward) sums of the nodes before scaling, over the whole in the same round, in the
            median; 1 where nothing was scaled.
        device: what it was measured on, in words.
        notes: what a person should know, one sentence each.
        small: (samples, forward and backward seconds by node) at a smaller size than ``microbatch_size``; None where
            nodes were measured at one size only.
    """

    graph: ModelGraph
    microbatch_size: int
    seconds_by_size: tuple[tuple[int, float], ...] = ()
    raw_ratio: tuple[float, float] = (1.0, 1.0)
    device: str = ""
    notes: tuple[str, ...] = ()
    small: tuple[int, tuple[float, ...]] | None = None

    @property
    def forward_s(self) -> float:
        """Seconds of one micro-batch forward through the whole model."""
        return sum(node.forward_s for node in self.graph.nodes)

    @property
    def backward_s(self) -> float:
        """Seconds of its backward."""
        return sum(node.backward_s for node in self.graph.nodes)

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
                raise PlanError(f"This profile is not of format {FORMAT}, which this release reads: {ANEW}.")
            return cls(
                graph=ModelGraph.from_json(json.dumps(found["graph"])),
                microbatch_size=int(found["microbatch_size"]),
                seconds_by_size=tuple((int(b), float(t)) for b, t in found["seconds_by_size"]),
                raw_ratio=(float(found["raw_ratio"][0]), float(found["raw_ratio"][1])),
                device=str(found["device"]),
                notes=tuple(map(str, found["notes"])),
                small=_by_node(found["small"]),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"This is not a saved profile ({error!r}): {ANEW}.") from None


def _by_node(found: Any) -> tuple[int, tuple[float, ...]] | None:
    return None if found is None else (int(found[0]), tuple(map(float, found[1])))
