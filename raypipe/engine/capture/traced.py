"""A whole model in one mode, as one flat graph: what tracing gives and everything after it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree

from raypipe.engine.capture.lengths import is_tokens

__all__ = ["UNCAST", "Traced"]

UNCAST = "raypipe_uncast"
"""In the meta of a node: the type of the device for which the model switches autocast off around it."""


@dataclass(slots=True)
class Traced:
    """A whole model in one mode.

    Attributes:
        graph: flat fx graph; its output is the flat list of the model's outputs.
        parameters, buffers: placeholder -> name in the user's model (canonical for shared parameters).
        constants: placeholder -> tensor that the model closed over.
        columns: placeholder -> name of the data column.
        key: placeholder of the random key.
        num_draws: random operations in the graph.
        out_spec: structure of the model's output.
        pinned: nodes that change in place something with another live alias: no cut may part the nodes of
            one such group (first and last node of it).
    """

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    columns: dict[fx.Node, str]
    key: fx.Node
    num_draws: int
    out_spec: pytree.TreeSpec
    pinned: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    @property
    def one_length(self) -> bool:
        """Whether a column of token ids must be as long as the example's."""
        shapes = [value.shape for value in (node.meta["val"] for node in self.columns) if is_tokens(value)]
        return any(isinstance(shape[1], int) for shape in shapes)
