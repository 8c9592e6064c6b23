"""The model as the planner sees it: operations in execution order with their bytes and seconds.

      conv --> relu --> add -->        nodes      (conv, relu, add), in execution order
        \\_______________/              edges      ((0, 1), (1, 2), (0, 2))

A cut is a place between two nodes of the execution order; what crosses it is every output made before it that
is still used after it, counted once. The model leaves out data columns, parameters and buffers: every stage
reads those itself, so they never cross.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raypipe.errors import PlanError
from raypipe.ir.lines import Lines

__all__ = ["ModelGraph", "Node", "link_nodes"]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Node:
    """One operation, or one child of an nn.Sequential.

    Attributes:
        name: unique in the graph.
        module: dotted name of the module that it belongs to, "" for the model itself.
        param_names: canonical names of the parameters that it reads first (a shared one counts once).
        param_bytes: bytes of those.
        cut_bytes: bytes that would cross a cut right after this node for one sample; None where
            no cut is possible.
        forward_s, backward_input_s, backward_weight_s: seconds per micro-batch; 0 until profiled.
        activation_bytes: bytes that its backward keeps, for one sample; 0 until profiled.
        output_bytes: bytes of its output for one sample.
        frozen_bytes: the part of param_bytes without gradient and optimizer state.
        buffer_bytes: bytes of the module buffers that it is the first to use.
        source: where the seconds come from: "measured", "estimated", or "" for nowhere yet.
        workspace: bytes that it needs while it runs, forward or backward, besides what it and those before it keep, as
            the most of lines; () until profiled.
    """

    name: str
    module: str
    param_names: tuple[str, ...]
    param_bytes: int
    cut_bytes: int | None
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    activation_bytes: int = 0
    output_bytes: int = 0
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    source: str = ""
    workspace: Lines = ()

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    @property
    def busy_s(self) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Nodes in execution order; a stage is a run of them.

    Attributes:
        nodes: in an order in which they can run.
        edges: (producer, consumer) positions; None where they are not known, and only ``cut_bytes`` counts.
        together: (earlier, later) positions that must share a stage, because what joins them cannot travel.
        before: (earlier, later) positions that must keep this order, though nothing travels between them: sums of
            gradients, which round differently in another one, and operations that would otherwise be free to run
            anywhere.

    Raises:
        PlanError: a pair that is not two positions in execution order.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...] | None = None
    together: tuple[tuple[int, int], ...] = ()
    before: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for earlier, later in (*(self.edges or ()), *self.together, *self.before):
            if not 0 <= earlier < later < len(self.nodes):
                raise PlanError(
                    f"The graph joins positions {earlier} and {later} of {len(self.nodes)} nodes: write the producer "
                    "first, and list nodes in an order in which they can run."
                )

    @property
    def param_bytes(self) -> int:
        return sum(node.param_bytes for node in self.nodes)

    @property
    def busy_s(self) -> float:
        """Seconds of one micro-batch through the whole model."""
        return sum(node.busy_s for node in self.nodes)

    def cut_positions(self) -> tuple[int, ...]:
        """Positions i such that nodes[:i] | nodes[i:] may be different stages."""
        return tuple(i + 1 for i, node in enumerate(self.nodes[:-1]) if node.cut_bytes is not None)

    def to_json(self) -> str:
        """The graph as text; ``from_json`` gives an equal one."""
        rows = [dataclasses.asdict(node) for node in self.nodes]
        pairs = {"edges": self.edges, "together": self.together, "before": self.before}
        return json.dumps({"format": FORMAT, "nodes": rows, **pairs}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelGraph:
        """Inverse of ``to_json``.

        Raises:
            PlanError: the text is not such a graph; names what is wrong.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise PlanError(
                    f"A graph of format {found['format']!r}, but this release reads {FORMAT}: make it anew."
                )
            nodes = tuple(_node(row) for row in found["nodes"])
            edges = None if found["edges"] is None else _pairs(found["edges"])
            return cls(nodes, edges, _pairs(found["together"]), _pairs(found.get("before", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved model graph ({error!r}): make it anew with ModelGraph.to_json."
            ) from None


def _node(row: dict[str, Any]) -> Node:
    lines = tuple((int(fixed), int(per_sample)) for fixed, per_sample in row.get("workspace", ()))
    return Node(**{**row, "param_names": tuple(row["param_names"]), "workspace": lines})


def _pairs(found: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in found)


def link_nodes(
    nodes: Iterable[Node],
    edges: Iterable[tuple[int, int]],
    together: Iterable[tuple[int, int]] = (),
    before: Iterable[tuple[int, int]] = (),
) -> ModelGraph:
    """A graph whose ``cut_bytes`` follow from edges and ``output_bytes``.

    No cut is possible where a pair of ``together`` would be parted. After the last node nothing crosses.
    """
    found, pairs, joined = list(nodes), tuple(edges), tuple(together)
    last = list(range(len(found)))
    for producer, consumer in pairs:
        last[producer] = max(last[producer], consumer)
    change, parted = [0] * (len(found) + 1), [0] * (len(found) + 1)
    for position, node in enumerate(found):
        change[position] += node.output_bytes
        change[last[position]] -= node.output_bytes
    for earlier, later in joined:
        parted[earlier] += 1
        parted[later] -= 1
    crossing = barred = 0
    for position, node in enumerate(found):
        crossing, barred = crossing + change[position], barred + parted[position]
        found[position] = dataclasses.replace(node, cut_bytes=None if barred else crossing)
    return ModelGraph(tuple(found), pairs, joined, tuple(before))
