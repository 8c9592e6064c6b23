"""The model as the planner sees it: operations in execution order with their bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelGraph", "Node"]


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
    """

    name: str
    module: str
    param_names: tuple[str, ...]
    param_bytes: int
    cut_bytes: int | None
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Nodes in execution order; a stage is a run of them."""

    nodes: tuple[Node, ...]

    @property
    def param_bytes(self) -> int:
        return sum(node.param_bytes for node in self.nodes)

    def cut_positions(self) -> tuple[int, ...]:
        """Positions i such that nodes[:i] | nodes[i:] may be different stages."""
        return tuple(i + 1 for i, node in enumerate(self.nodes[:-1]) if node.cut_bytes is not None)
