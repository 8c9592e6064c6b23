"""Model graph of the planner: operations in execution order with their bytes and seconds.

      conv --> relu --> add -->        nodes      (conv, relu, add), in execution order
        \\_______________/              edges      ((0, 1), (1, 2), (0, 2))

A cut is a position between two nodes of the execution order; it is crossed by every output made before it and
used after it, counted once. The model leaves out data columns, parameters and buffers: every stage reads those
itself, so they never cross.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.from_plain import from_plain

Lines = tuple[tuple[int, int], ...]
"""Bytes as a function of the number of samples: the largest of these lines, (fixed bytes, bytes per sample)."""


def most(lines: Iterable[tuple[int, int]], samples: int) -> int:
    """Return the largest of fixed + samples * per_sample, in bytes, over lines (fixed, per_sample); at least 0."""
    return max((fixed + samples * per_sample for fixed, per_sample in lines), default=0)


def pruned(lines: Iterable[tuple[int, int]]) -> Lines:
    """Remove lines (see ``most``) that another line, or zero, reaches or exceeds for every number of samples."""
    kept: list[tuple[int, int]] = []
    for fixed, per_sample in sorted(set(lines), key=lambda line: (-line[1], -line[0])):
        if max(fixed, per_sample) > 0 and (not kept or fixed > kept[-1][0]):
            kept.append((fixed, per_sample))
    return tuple(kept)


FORMAT = 1


@dataclass(frozen=True, slots=True)
class Node:
    """One operation, or one child of an nn.Sequential.

    Attributes:
        name: unique in the graph.
        module: dotted name of the module to which the operation belongs; "" for the model itself.
        param_names: canonical names of the parameters of which this node is the first user; a shared one counts once.
        param_bytes: bytes of param_names.
        cut_bytes: bytes that would cross a cut right after this node for one sample; None if no cut is possible.
        forward_s, backward_input_s, backward_weight_s: seconds per micro-batch; 0 until profiled.
        activation_bytes: bytes for one sample that are kept for backwards: its outputs, and what only its own backward
            reads; 0 until profiled.
        output_bytes: bytes of its output for one sample.
        frozen_bytes: the part of param_bytes without gradient and optimizer state.
        buffer_bytes: bytes of the module buffers of which this node is the first user.
        source: source of the seconds: "measured", "estimated", or "" until profiled.
        workspace: temporary bytes during its forward or backward, in addition to the activations that this and earlier
            nodes keep; () until profiled.
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
    """Nodes in execution order; a stage is a contiguous range of them.

    Attributes:
        nodes: in an order in which they can run.
        edges: (producer, consumer) positions; None if unknown, in which case only ``cut_bytes`` counts.
        together: (earlier, later) positions that must share a stage, because the value between them cannot be sent.
        before: (earlier, later) positions without a value between them, such that ``later`` must not be in an earlier
            stage: for example two users of a tensor, whose gradients are summed in this order.

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
        """List positions i such that nodes[:i] | nodes[i:] may be different stages."""
        return tuple(i + 1 for i, node in enumerate(self.nodes[:-1]) if node.cut_bytes is not None)

    def to_json(self) -> str:
        """Serialize the graph; ``from_json`` returns an equal one."""
        rows = [dataclasses.asdict(node) for node in self.nodes]
        pairs = {"edges": self.edges, "together": self.together, "before": self.before}
        return json.dumps({"format": FORMAT, "nodes": rows, **pairs})

    @classmethod
    def from_json(cls, text: str) -> ModelGraph:
        """Read a graph that ``to_json`` wrote.

        Raises:
            PlanError: the text is not such a graph; the message has what is wrong.
        """
        try:
            body = json.loads(text)
            if (written := body.pop("format")) != FORMAT:
                raise PlanError(f"A graph of format {written!r}, but this release reads {FORMAT}: make it anew.")
            graph: ModelGraph = from_plain(cls, body)
            return graph
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved model graph ({error!r}): make it anew with ModelGraph.to_json."
            ) from None


def link_nodes(
    nodes: Iterable[Node],
    edges: Iterable[tuple[int, int]],
    together: Iterable[tuple[int, int]] = (),
    before: Iterable[tuple[int, int]] = (),
) -> ModelGraph:
    """Create a graph; compute the nodes' ``cut_bytes`` from edges and ``output_bytes``.

    ``cut_bytes`` is None where a cut would separate a pair of ``together``, and 0 after the last node.
    """
    linked, pairs, joined = list(nodes), tuple(edges), tuple(together)
    last = list(range(len(linked)))
    for producer, consumer in pairs:
        last[producer] = max(last[producer], consumer)
    change, parted = [0] * (len(linked) + 1), [0] * (len(linked) + 1)
    for position, node in enumerate(linked):
        change[position] += node.output_bytes
        change[last[position]] -= node.output_bytes
    for earlier, later in joined:
        parted[earlier] += 1
        parted[later] -= 1
    crossing = barred = 0
    for position, node in enumerate(linked):
        crossing, barred = crossing + change[position], barred + parted[position]
        linked[position] = dataclasses.replace(node, cut_bytes=None if barred else crossing)
    return ModelGraph(tuple(linked), pairs, joined, tuple(before))
