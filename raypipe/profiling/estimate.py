"""Estimates of seconds from FLOPs and bytes, for models that cannot be run here: no memory, no data, another device.

The model runs on the meta device, which computes shapes only. The bytes that the backward keeps and needs are therefore
exact, and only the seconds are estimates. The backward of an operation is assumed to take as long as its forward for
its inputs, and as long again for its parameters, as for a matrix product. Estimates leave out caches, kernels that
reach neither the FLOP rate nor the bandwidth of the device, and the user's loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from raypipe.capture import Capture, TracedModel
from raypipe.capture.analyse import is_open
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.errors import ConfigError
from raypipe.ir.graph import Lines, Node
from raypipe.ir.profile import Profile
from raypipe.profiling.held_outputs import HeldOutputs
from raypipe.profiling.rates import Rates, measure_rates
from raypipe.profiling.steps import Columns, Steps, steps_of
from raypipe.profiling.workspace import KeptBytes, Loss, Passes, kept_bytes, tensors_in, workspaces


def estimate_graph(
    captured: Capture,
    microbatch_size: int,
    rates: Rates | None = None,
    *,
    sizes: Sequence[int] = (),
) -> Profile:
    """Estimate a profile without running the model; every node is marked "estimated".

    Args:
        microbatch_size: number of samples.
        rates: rates of the device; None for this machine's CPU.
        sizes: further micro-batch sizes for ``Profile.seconds_by_size``.

    Raises:
        ConfigError: the model is an nn.Sequential with weights, whose children may only run on real tensors, or a
            tensor's size depends on values.
    """
    _refuse_unestimated(captured)
    rates, meta = rates or measure_rates(), _OnMeta.of(captured)
    here, there = _counted(meta, microbatch_size), _twice(meta, microbatch_size)
    spaces = workspaces(
        Passes(meta.steps, meta.leaves, meta.buffers, meta.loss),
        meta.columns(microbatch_size),
        None if there is None else meta.columns(there.samples),
        {counts.samples: counts.kept_besides_data for counts in (here, there) if counts is not None},
    )
    costs = _costs_by_size(captured, meta, here, there, sizes, rates)
    nodes = tuple(
        dataclasses.replace(
            _with_seconds(node, seconds), activation_bytes=-(-nbytes // microbatch_size), workspace=space
        )
        for node, seconds, nbytes, space in zip(
            captured.graph.nodes, costs[microbatch_size], here.kept, spaces, strict=True
        )
    )
    return Profile(
        graph=dataclasses.replace(captured.graph, nodes=nodes),
        microbatch_size=microbatch_size,
        seconds_by_size=tuple((size, sum(map(sum, costs_of_size))) for size, costs_of_size in costs.items()),
        device=rates.device,
        notes=("Seconds are estimated from counted operations and bytes: this model was not timed.",),
    )


def in_seconds_of(rates: Rates, captured: Capture, profiled: Profile) -> Profile:
    """Replace the seconds of a profile, measured on this CPU, by estimates for another device; bytes stay as measured.

    If the model cannot run on the meta device, all measured seconds are divided by one number: the ratio of the two
    devices' FLOPs per second.
    """
    try:
        estimate = _by_counting(rates, captured, profiled)
    except (ConfigError, RuntimeError, NotImplementedError, TypeError, ValueError):
        estimate = _divided(profiled, measure_rates().flops_per_s / rates.flops_per_s)
    pairs = zip(profiled.graph.nodes, estimate.nodes, strict=True)
    nodes = tuple(_with_seconds(node, seconds) for node, seconds in pairs)
    return dataclasses.replace(
        profiled,
        graph=dataclasses.replace(profiled.graph, nodes=nodes),
        seconds_by_size=tuple(
            (size, s) for (size, _), s in zip(profiled.seconds_by_size, estimate.by_size, strict=True)
        ),
        raw_ratio=(1.0, 1.0),
        device=rates.device,
        notes=(f"Seconds are estimated for {rates.device}: they {estimate.how}. Nothing was timed there.",),
        small=None if profiled.small is None else (profiled.small[0], tuple(estimate.small)),
    )


class _Seconds(NamedTuple):
    """Seconds on another device.

    Attributes:
        nodes: (forward, backward for inputs, backward for parameters) of each node.
        by_size: seconds of the whole model at each micro-batch size of the profile.
        small: seconds of each node at the profile's smallest size; empty if it has one size only.
        how: end of the profile's note on how the seconds were estimated.
    """

    nodes: Sequence[tuple[float, float, float]]
    by_size: Sequence[float]
    small: Sequence[float]
    how: str


def _by_counting(rates: Rates, captured: Capture, profiled: Profile) -> _Seconds:
    """Estimate seconds from counted FLOPs and bytes; raises the error of a model that cannot run on the meta device."""
    if isinstance(captured.model, TracedModel):  # children of an nn.Sequential are simply tried
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
    """Multiply all measured seconds of a profile by a factor."""
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
    """Estimate the seconds of every node at several micro-batch sizes, from counts of FLOPs and bytes.

    Args:
        here: counts of a forward over ``here.samples`` samples.
        there: counts over twice as many samples: the work at other sizes is on the line through both. None if the model
            does not run on so many; then the smallest or largest size is counted instead.
        sizes: micro-batch sizes to estimate, besides ``here.samples``.

    Returns:
        By micro-batch size, (forward, backward for inputs, backward for parameters) seconds of every node.
    """
    wanted = sorted({here.samples, *sizes})
    if there is None and len(wanted) > 1:
        there = _counted(meta, wanted[0] if wanted[0] < here.samples else wanted[-1])
    return {size: _costs(captured, here, _work_at(size, here, there), rates) for size in wanted}


def _with_seconds(node: Node, seconds: tuple[float, float, float]) -> Node:
    """Copy a node with estimated seconds: (forward, backward for inputs, backward for parameters)."""
    forward, inward, weight = seconds
    return dataclasses.replace(
        node, forward_s=forward, backward_input_s=inward, backward_weight_s=weight, source="estimated"
    )


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
    """Count the bytes that each operation keeps for its backward and its workspace, exactly, on the meta device.

    Args:
        samples: number of samples for the kept bytes.
        loss: function of the outputs and the columns; replaced by another one if it does not run on the meta device.

    Returns:
        (kept bytes, workspaces) by operation; None if the model cannot run on the meta device, or computes under
        autocast, which the meta device ignores.
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
            with contextlib.suppress(Exception):  # a loss that reads values
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
    """FLOPs of one operation, and bytes of its inputs and outputs."""

    flops: float
    moved_bytes: float


@dataclass(slots=True)
class _Counter:
    """Observer of Steps that records each operation's work and kept bytes, and if it has a backward for its inputs.

    Args:
        flops: counter inside which the operations run.
    """

    kept: KeptBytes
    flops: FlopCounterMode
    work: list[_Work] = field(default_factory=list)
    passes: list[bool] = field(default_factory=list)

    def __call__(self, position: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self.flops.get_total_flops()
        outputs = self.kept(position, call, args, kwargs)
        inputs = tensors_in((args, kwargs))
        moved_bytes = sum(t.nbytes for t in (*inputs, *tensors_in(outputs)))
        self.work.append(_Work(float(self.flops.get_total_flops() - before), moved_bytes))
        self.passes.append(any(t.requires_grad and not t.is_leaf for t in inputs))
        return outputs


class _Counts(NamedTuple):
    """Counts of one forward over ``samples`` samples, with one item for each operation in every list.

    Attributes:
        passes: True if the operation has a backward for its inputs.
        kept: bytes that the operation keeps for its backward.
        kept_besides_data: kept bytes without data columns; the last operation also has the bytes that the loss keeps.
    """

    samples: int
    work: list[_Work]
    passes: list[bool]
    kept: list[int]
    kept_besides_data: list[int]


def _counted(meta: _OnMeta, samples: int) -> _Counts:
    columns, count = meta.columns(samples), len(meta.steps.sites)
    # One counter for all operations: beginning to count takes longer than to run an operation on the meta device.
    with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as flops:
        counter = _Counter(KeptBytes((*meta.leaves, *meta.buffers)), flops)
        outputs = meta.steps.run(meta.leaves, meta.buffers, columns, counter)
    kept = [counter.kept.bytes_of.get(i, 0) for i in range(count)]
    counter.kept(count - 1, meta.loss, (outputs, columns), {})
    if meta.holds_outputs:
        kept[-1] = counter.kept.bytes_of.get(count - 1, 0)
    besides = counter.kept.besides(columns.values())
    return _Counts(samples, counter.work, counter.passes, kept, [besides.get(i, 0) for i in range(count)])


def _twice(meta: _OnMeta, samples: int) -> _Counts | None:
    """Count at twice the samples; None if the model does not accept that size."""
    with contextlib.suppress(Exception):
        return _counted(meta, 2 * samples)
    return None


def _work_at(size: int, here: _Counts, there: _Counts | None) -> list[_Work]:
    """Compute the work of each operation at ``size`` on a line through two counts; with one only, return its work."""
    if there is None:
        return here.work
    share = (size - here.samples) / (there.samples - here.samples)
    return [
        _Work(*(max(0.0, a + share * (b - a)) for a, b in zip(one, other, strict=True)))
        for one, other in zip(here.work, there.work, strict=True)
    ]


def _picking(model: TracedModel) -> Any:
    """Return the first operation whose output size depends on values; None if there is no such operation."""
    return next((node for node in model.train.nodes if is_open(node.meta.get("val"))), None)


class _OnMeta(NamedTuple):
    """A model on the meta device: a parameter for each use, and shape and dtype of every data column.

    Attributes:
        loss: function in place of the user's loss.
        holds_outputs: True if ``loss`` is ``HeldOutputs``, whose kept bytes count as the last operation's.
    """

    steps: Steps
    leaves: list[torch.Tensor]
    buffers: list[torch.Tensor]
    shapes: Mapping[Any, tuple[tuple[int, ...], torch.dtype]]
    loss: Loss
    holds_outputs: bool

    @classmethod
    def of(cls, captured: Capture) -> _OnMeta:
        (program,) = captured.programs(())
        parameters = {
            name: torch.nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            for name, p in captured.parameters.items()
        }
        leaves = list(WeightRing(program, parameters).newest_leaves())
        buffers = [captured.buffers[name].detach().to("meta") for name in program.train.buffers]
        holds = isinstance(program.loss, HeldOutputs)

        def held(outputs: Any, columns: Columns) -> torch.Tensor:
            return program.whole_loss(outputs, [columns[name] for name in program.targets])

        loss = held if holds else _stand_in_loss
        return cls(steps_of(captured, program), leaves, buffers, captured.columns, loss, holds)

    def columns(self, samples: int) -> Columns:
        """Make data columns with this number of samples, on the meta device."""
        return {
            name: torch.empty((samples, *shape[1:]) if shape else (), dtype=dtype, device="meta")
            for name, (shape, dtype) in self.shapes.items()
        }


def _stand_in_loss(outputs: Any, columns: Columns) -> torch.Tensor:
    """Compute a loss, in place of the user's, whose gradient by each output has as many bytes as the output."""
    total = torch.zeros((), device="meta")
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            total = total + tensor.square().sum()
    return total


def _costs(captured: Capture, counts: _Counts, work: Sequence[_Work], rates: Rates) -> list[tuple[float, float, float]]:
    """Estimate seconds by node for this work: (forward, backward for inputs, backward for parameters)."""
    costs = []
    for i, node in enumerate(captured.graph.nodes):
        forward = rates.seconds(*work[i])
        trained = any(captured.parameters[name].requires_grad for name in node.param_names)
        # Shared parameters have a name at their first use only; the gradient is taken at each.
        inward = forward if counts.passes[i] else 0.0
        costs.append((forward, inward, forward if trained else 0.0))
    return costs
