"""What the planner has to be told of a model: seconds by operation, and what the optimizer keeps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from raypipe.engine.capture import Capture
from raypipe.engine.profile import measure_stages
from raypipe.engine.state import MakeOptimizer
from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph
from raypipe.planner.tune import Profiled

__all__ = ["optimizer_factor", "profile_of", "refuse_other_graph"]

ADAM_FACTOR = 2.0
"""Bytes of Adam's state per byte of parameters."""


def profile_of(captured: Capture, example: Mapping[Any, torch.Tensor], *, by_size: bool) -> Profiled:
    """The graph with seconds: the whole model is measured, and shared out by parameters as an estimate.

    Args:
        example: one micro-batch by column.
        by_size: measure smaller micro-batches too.
    """
    programs = captured.programs(())
    tensors = {**captured.parameters, **captured.buffers}
    samples = min((len(x) for x in example.values() if x.dim()), default=1)
    measured = measure_stages(programs, tensors, example)
    points = {samples: measured.forward_s[0] + measured.backward_s[0]}
    for size in (1 << i for i in range(samples.bit_length())):
        if by_size and size < samples:
            # Batch normalisation, for one, refuses a single sample: such a size is no candidate either.
            with contextlib.suppress(ValueError, RuntimeError):
                seconds = measure_stages(programs, tensors, {name: x[:size] for name, x in example.items()})
                points[size] = seconds.forward_s[0] + seconds.backward_s[0]
    graph = _shared_out(captured.graph, measured.forward_s[0], measured.backward_s[0])
    return Profiled(graph, samples, tuple(sorted(points.items())) if by_size else ())


def _shared_out(graph: ModelGraph, forward_s: float, backward_s: float) -> ModelGraph:
    total = graph.param_bytes
    shares = [node.param_bytes / total if total else 1 / len(graph.nodes) for node in graph.nodes]
    nodes = (
        dataclasses.replace(
            node,
            forward_s=forward_s * share,
            backward_input_s=backward_s * share / 2,
            backward_weight_s=backward_s * share / 2,
            source="estimated",
        )
        for node, share in zip(graph.nodes, shares, strict=True)
    )
    return dataclasses.replace(graph, nodes=tuple(nodes))


def refuse_other_graph(captured: Capture, profiled: Profiled) -> None:
    """A profile says nothing of a model with other operations.

    Raises:
        PlanError: names the first operation that differs.
    """
    own, other = ([node.name for node in graph.nodes] for graph in (captured.graph, profiled.graph))
    if own != other:
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
        raise PlanError(
            f"The profile is of another model: it has {len(other)} operations and this one {len(own)}, and they differ "
            f"from operation {at} on. Make it anew with `raypipe profile`."
        )


def optimizer_factor(make_optimizer: MakeOptimizer, captured: Capture) -> float:
    """Bytes of optimizer state per byte of parameters, of one step on a copy of the smallest matrix that is trained.

    An optimizer that cannot be made for one parameter counts as Adam; training will say what is wrong with it.
    """
    trained = [(name, p) for name, p in captured.parameters.items() if name in captured.trainable]
    name, like = min(trained, key=lambda pair: (pair[1].dim() < 2, pair[1].numel()), default=("", None))
    if like is None:
        return ADAM_FACTOR
    with contextlib.suppress(Exception):
        copy = torch.nn.Parameter(like.detach().clone())
        copy.grad = torch.zeros_like(copy)
        made = make_optimizer([(name, copy)])
        made.step()
        kept = [x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        # A step counter is one number, whatever the size of the parameter.
        return sum(x.nbytes for x in kept if x.numel() > 1) / max(1, copy.nbytes)
    return ADAM_FACTOR
