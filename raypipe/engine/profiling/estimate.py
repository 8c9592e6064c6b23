"""Seconds from FLOPs and bytes, where a model cannot be run: no room, no data, another device.

The model is run on the meta device, which has shapes and no memory: what the backward keeps and needs is therefore
exact, and only the seconds are a guess. The backward of an operation costs its forward once for its inputs and once for
its parameters, as it does for a matrix product. What is left out: caches, kernels that miss either rate, and the user's
loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from raypipe.engine.capture import Capture, TracedModel
from raypipe.engine.capture.analyse import is_open
from raypipe.engine.profiling.observe import KeptBytes, tensors_in
from raypipe.engine.profiling.rates import Rates, measure_rates
from raypipe.engine.profiling.steps import Columns, Steps, steps_of
from raypipe.engine.profiling.workspace import Loss, Passes, kept_bytes, workspaces
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import ConfigError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.lines import Lines
from raypipe.ir.profile import Profile

__all__ = ["bytes_unrun", "estimate_graph", "in_seconds_of"]


def estimate_graph(
    captured: Capture,
    microbatch_size: int,
    rates: Rates | None = None,
    *,
    sizes: Sequence[int] = (),
) -> Profile:
    """A profile without a run; every node is marked "estimated".

    Args:
        microbatch_size: samples.
        rates: of the device; None for this machine's CPU.
        sizes: of micro-batches for ``seconds_by_size``, besides this one.

    Raises:
        ConfigError: the model is an nn.Sequential, whose children only run on real tensors, or picks by value.
    """
    _refuse_unestimated(captured)
    rates, meta = rates or measure_rates(), _OnMeta.of(captured)
    here, there = _counted(meta, microbatch_size), _twice(meta, microbatch_size)
    spaces = workspaces(
        Passes(meta.steps, meta.leaves, meta.buffers, _stand_in_loss),
        meta.columns(microbatch_size),
        None if there is None else meta.columns(there.samples),
        {counts.samples: counts.kept_besides_data for counts in (here, there) if counts is not None},
    )
    costs = _costs_by_size(captured, meta, here, there, sizes, rates)
    kept = [-(-nbytes // microbatch_size) for nbytes in here.kept]
    return Profile(
        graph=_estimated(captured.graph, costs[microbatch_size], kept, spaces),
        microbatch_size=microbatch_size,
        seconds_by_size=tuple((size, sum(map(sum, found))) for size, found in costs.items()),
        device=rates.device,
        notes=("Seconds are estimated from counted operations and bytes: this model was not timed.",),
    )


def in_seconds_of(rates: Rates, captured: Capture, profiled: Profile) -> Profile:
    """A profile that was taken on a CPU, with another device's seconds: its bytes are as they were found.

    Where operations cannot be counted, measured seconds are all divided by one number, the ratio of both devices'
    matrix products.
    """
    try:
        found = _by_counting(rates, captured, profiled)
    except (ConfigError, RuntimeError, NotImplementedError, TypeError, ValueError):
        found = _divided(profiled, measure_rates().flops_per_s / rates.flops_per_s)
    nodes = tuple(
        dataclasses.replace(
            node, forward_s=forward, backward_input_s=inward, backward_weight_s=weight, source="estimated"
        )
        for node, (forward, inward, weight) in zip(profiled.graph.nodes, found.nodes, strict=True)
    )
    return dataclasses.replace(
        profiled,
        graph=dataclasses.replace(profiled.graph, nodes=nodes),
        seconds_by_size=tuple((size, s) for (size, _), s in zip(profiled.seconds_by_size, found.by_size, strict=True)),
        raw_ratio=(1.0, 1.0),
        device=rates.device,
        notes=(f"Seconds are estimated for {rates.device}: they {found.how}. Nothing was timed there.",),
        small=None if profiled.small is None else (profiled.small[0], tuple(found.small)),
    )


class _Seconds(NamedTuple):
    """Of another device.

    Attributes:
        nodes: forward, and the backward for inputs and for parameters.
        by_size, small: as in Profile.
        how: they were found, behind "they".
    """

    nodes: Sequence[tuple[float, float, float]]
    by_size: Sequence[float]
    small: Sequence[float]
    how: str


def _by_counting(rates: Rates, captured: Capture, profiled: Profile) -> _Seconds:
    """Raises what the meta device does of a model that cannot be run there."""
    if isinstance(captured.model, TracedModel):  # children of an nn.Sequential run there, or do not
        _refuse_unestimated(captured)
    meta, samples = _OnMeta.of(captured), profiled.microbatch_size
    sizes, small = [size for size, _ in profiled.seconds_by_size], profiled.small
    wanted = [*sizes, *(small[:1] if small else ())]
    costs = _costs_by_size(captured, meta, _counted(meta, samples), _twice(meta, samples), wanted, rates)
    return _Seconds(
        costs[samples],
        [sum(map(sum, costs[size])) for size in sizes],
        list(map(sum, costs[small[0]])) if small else [],
        "follow from counted operations and bytes",
    )


def _divided(profiled: Profile, factor: float) -> _Seconds:
    """All as measured, times a factor."""
    return _Seconds(
        [
            (factor * node.forward_s, factor * node.backward_input_s, factor * node.backward_weight_s)
            for node in profiled.graph.nodes
        ],
        [factor * seconds for _, seconds in profiled.seconds_by_size],
        [factor * seconds for seconds in profiled.small[1]] if profiled.small else [],
        f"are those of this machine's CPU divided by {1 / factor:.3g}, for operations of this model are not counted",
    )


def _costs_by_size(
    captured: Capture, meta: _OnMeta, here: _Counts, there: _Counts | None, sizes: Sequence[int], rates: Rates
) -> dict[int, list[tuple[float, float, float]]]:
    """``_costs`` by size, that of ``here`` among them.

    Args:
        there: of another size; None where twice the samples cannot be run.
    """
    wanted = sorted({here.samples, *sizes})
    if there is None and len(wanted) > 1:
        there = _counted(meta, wanted[0] if wanted[0] < here.samples else wanted[-1])
    return {size: _costs(captured, here, _work_at(size, here, there), rates) for size in wanted}


def _estimated(
    graph: ModelGraph, costs: Sequence[tuple[float, float, float]], kept: Sequence[int], spaces: Sequence[Lines]
) -> ModelGraph:
    """The graph with seconds, kept bytes of a sample and workspaces by node."""
    nodes = tuple(
        dataclasses.replace(
            node,
            forward_s=forward,
            backward_input_s=inward,
            backward_weight_s=weight,
            activation_bytes=nbytes,
            workspace=space,
            source="estimated",
        )
        for node, (forward, inward, weight), nbytes, space in zip(graph.nodes, costs, kept, spaces, strict=True)
    )
    return dataclasses.replace(graph, nodes=nodes)


def _refuse_unestimated(captured: Capture) -> None:
    if not isinstance(captured.model, TracedModel):
        if any(parameter.is_meta for parameter in captured.parameters.values()):
            return  # capture has run the children on the meta device
        raise ConfigError(
            "An nn.Sequential runs its children as they are, so it can be measured but not estimated. Profile it on an "
            "example, or put it into an nn.Module whose forward torch.export can trace."
        )
    picking = _picking(captured.model)
    if picking is not None:
        raise ConfigError(
            f"The size of {picking.name!r} depends on values, so the model can be measured but not estimated. Profile "
            "it on an example."
        )


def bytes_unrun(captured: Capture, samples: int, loss: Loss) -> tuple[list[int], list[Lines]] | None:
    """By operation, bytes kept for the backward and needed besides, exactly and without running the model.

    Args:
        samples: that the kept bytes are of.
        loss: of outputs and columns; one that does not run on the meta device is stood in for.

    Returns:
        None where the model cannot be run on the meta device, or autocast, which that does not know, decides types.
    """
    if not isinstance(captured.model, TracedModel) or _picking(captured.model) is not None:
        return None
    if captured.recipe.precision.autocast:
        return None
    try:
        meta = _OnMeta.of(captured)
        columns, twice, held = meta.columns(samples), meta.columns(2 * samples), (*meta.leaves, *meta.buffers)
        for one in (loss, _stand_in_loss):
            passes = Passes(meta.steps, meta.leaves, meta.buffers, one)
            with contextlib.suppress(Exception):  # it looks at values
                return kept_bytes(passes, columns, held=held), workspaces(passes, columns, twice)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return None


_MORE_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_args, **_kwargs: sdpa_flop_count(
        q, k, v
    )
}


class _Work(NamedTuple):
    """Of one operation."""

    flops: float
    moved_bytes: float


@dataclass(slots=True)
class _Counter:
    """Observer: FLOPs, bytes in and out, and which backwards there are, by position.

    Attributes:
        kept: counts the bytes that backwards keep.
    """

    kept: KeptBytes
    work: list[_Work] = field(default_factory=list)
    passes: list[bool] = field(default_factory=list)

    def __call__(self, position: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as counter:
            outputs = self.kept(position, call, args, kwargs)
        inputs = tensors_in((args, kwargs))
        moved_bytes = sum(t.nbytes for t in (*inputs, *tensors_in(outputs)))
        self.work.append(_Work(float(counter.get_total_flops()), moved_bytes))
        self.passes.append(any(t.requires_grad and not t.is_leaf for t in inputs))
        return outputs


class _Counts(NamedTuple):
    """What one pass with so many samples counted, by operation.

    Attributes:
        work: of the forward.
        passes: whether there is a backward for inputs.
        kept: bytes that the backward keeps.
        kept_besides_data: the same without the data's own, and with what the loss keeps.
    """

    samples: int
    work: list[_Work]
    passes: list[bool]
    kept: list[int]
    kept_besides_data: list[int]


def _counted(meta: _OnMeta, samples: int) -> _Counts:
    columns, count = meta.columns(samples), len(meta.steps.sites)
    counter = _Counter(KeptBytes((*meta.leaves, *meta.buffers)))
    outputs = meta.steps.run(meta.leaves, meta.buffers, columns, counter)
    kept = [counter.kept.bytes_of.get(i, 0) for i in range(count)]
    counter.kept(count - 1, _stand_in_loss, (outputs, columns), {})
    besides = counter.kept.besides(columns.values())
    return _Counts(samples, counter.work, counter.passes, kept, [besides.get(i, 0) for i in range(count)])


def _twice(meta: _OnMeta, samples: int) -> _Counts | None:
    """Of twice so many samples, a size that nobody asked for; None where the model does not take that."""
    with contextlib.suppress(Exception):
        return _counted(meta, 2 * samples)
    return None


def _work_at(size: int, here: _Counts, there: _Counts | None) -> list[_Work]:
    """By operation at another size, as it grows evenly from one to the other that were counted."""
    if there is None:
        return here.work
    share = (size - here.samples) / (there.samples - here.samples)
    return [
        _Work(*(max(0.0, a + share * (b - a)) for a, b in zip(one, other, strict=True)))
        for one, other in zip(here.work, there.work, strict=True)
    ]


def _picking(model: TracedModel) -> Any:
    """The first operation whose size depends on values, if there is one."""
    return next((node for node in model.train.nodes if is_open(node.meta.get("val"))), None)


class _OnMeta(NamedTuple):
    """The steps of a model and what they take, none of which has memory.

    Attributes:
        shapes: see Capture.columns.
    """

    steps: Steps
    leaves: list[torch.Tensor]
    buffers: list[torch.Tensor]
    shapes: Mapping[Any, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, captured: Capture) -> _OnMeta:
        (program,) = captured.programs(())
        parameters = {
            name: torch.nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            for name, p in captured.parameters.items()
        }
        leaves = list(WeightRing(program, parameters).newest_leaves())
        buffers = [captured.buffers[name].detach().to("meta") for name in program.train.buffers]
        return cls(steps_of(captured, program), leaves, buffers, captured.columns)

    def columns(self, samples: int) -> Columns:
        """So many samples by column."""
        return {
            name: torch.empty((samples, *shape[1:]) if shape else (), dtype=dtype, device="meta")
            for name, (shape, dtype) in self.shapes.items()
        }


def _stand_in_loss(outputs: Any, columns: Columns) -> torch.Tensor:
    """One whose gradient takes as much memory as the outputs, as most do."""
    total = torch.zeros((), device="meta")
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            total = total + tensor.square().sum()
    return total


def _costs(captured: Capture, counts: _Counts, work: Sequence[_Work], rates: Rates) -> list[tuple[float, float, float]]:
    """By node, seconds of forward and of the backward for inputs and for parameters.

    Args:
        counts: of any size.
        work: of the size that is asked for.
    """
    found = []
    for i, node in enumerate(captured.graph.nodes):
        forward = rates.seconds(*work[i])
        trained = any(captured.parameters[name].requires_grad for name in node.param_names)
        # Shared parameters have a name at their first use only; the gradient is taken at each.
        inward = forward if counts.passes[i] else 0.0
        found.append((forward, inward, forward if trained else 0.0))
    return found
