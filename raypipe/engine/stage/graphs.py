"""CUDA graphs of a stage: a forward or backward becomes one launch, which repeats the recorded kernels.

A graph reads and writes the same addresses every time, so each micro-batch between its forward and the end of its
backward has a slot, with inputs, outputs, activations and gradients of its own:

    slot 0    F0 ------ B0   F2 ------ B2        F: inputs and columns are copied in | replay
    slot 1         F1 ------ B1   F3 ------ B3   B: output gradients are copied in | replay | input gradients, out

    first micro-batch of a shape          runs eagerly, which also warms up kernels and libraries
    first forward in a slot               is recorded, then replayed
    first backward in a slot              is recorded, then replayed; once more for output gradients of another layout

No backward of a recorded forward runs eagerly: attention with dropout leaves its seed in device memory when recorded,
and an eager backward reads it in host memory (torch: "Note [Seed and Offset Device]").

Each random draw has a generator of its own, which is seeded before a replay (``GraphKey``). Backwards draw nothing.

The backward adds to the gradient sums within its graph (``GradientSink``). Losses, sends, receives and the optimizer's
step stay outside. All graphs of a stage share a pool of memory: what outlives a graph is referenced by its slot, and
the rest is reused by the next graph, because a stage runs one at a time.

Only the largest shape that was seen is recorded; others, as of the last, smaller mini-batch of an epoch, run eagerly.
If a parameter or buffer has moved, the graphs are dropped and recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from raypipe.engine.device.device import Device, ran_out
from raypipe.engine.messages.transfer import apart, fill, memory_like
from raypipe.engine.stage.backward import gradients
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.randomness import GraphKey, RandomKey
from raypipe.engine.stage.stage import Site, StageFunction
from raypipe.errors import StageError
from raypipe.ir.precision import Precision

_T = TypeVar("_T")
_Optional = Sequence[torch.Tensor | None]
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """Graph of a backward, for output gradients of one layout.

    Attributes:
        output_grads: gradients of the outputs, which it reads; None for an output without one.
        input_grads: gradients of the inputs, which it writes.
        added: uses of parameters to whose sums it adds, by index in ``GradientSink.trained``.
        replay: replays it.
    """

    output_grads: _Optional
    input_grads: _Optional
    added: list[int]
    replay: Replay


@dataclass(slots=True, eq=False)
class _Slot:
    """Graphs of one micro-batch in flight, and the tensors at the addresses that they use.

    Attributes:
        arguments: inputs and columns, which a forward reads; inputs are leaves if they require a gradient.
        leaves: one per use of a parameter, in the parameters' memory.
        outputs: outputs of the recorded forward, with their autograd graph.
        forward: replays the forward.
        backwards: graphs of the backward, by the layout of the output gradients.
    """

    arguments: list[torch.Tensor | None]
    leaves: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    forward: Replay
    backwards: dict[Any, _Backward] = field(default_factory=dict)


class StageGraphs:
    """Stage function (``StageFunction``) for training, whose forwards and backwards are graphs of the device.

    No micro-batch may outlive its step.

    Args:
        function: the stage's function, which runs eagerly.
        stage: number of the stage, for messages.
    """

    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    num_inputs: int
    num_outputs: int
    precision: Precision
    changing_buffers: tuple[str, ...]
    tried_constant: tuple[str, ...]

    def __init__(self, function: StageFunction, stage: int, device: Device, sink: GradientSink) -> None:
        if not device.graphs:
            raise StageError(
                f"cuda_graphs=True: stage {stage} is on a device without graphs ({device.title}). Set use_gpu=True in "
                "ScalingConfig, or cuda_graphs=False."
            )
        self._function, self._stage, self._device, self._sink = function, stage, device, sink
        self._pool: Any = None
        self._elements = -1
        self._recorded_for: tuple[Any, ...] = ()
        self._step = -1
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._generators: dict[int, torch.Generator] = {}

    def __getattr__(self, name: str) -> Any:  # the attributes above
        return getattr(self._function, name)

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: _Optional,
        columns: Sequence[torch.Tensor],
        key: RandomKey,
    ) -> tuple[torch.Tensor, ...]:
        arguments = (*inputs, *columns)
        wanted = _layout(arguments), _addresses((*parameters, *buffers))
        if key.step != self._step:
            self._step, self._free = key.step, list(self._slots)
        if wanted != self._recorded_for:
            elements = sum(x.numel() for x in arguments if x is not None)
            if elements > self._elements or (self._recorded_for and wanted[0] == self._recorded_for[0]):
                self._elements, self._recorded_for, self._pool = elements, wanted, self._device.new_pool()
                self._slots, self._free, self._generators = [], [], {}
                key = GraphKey(key, self._generators)
            return self._function(parameters, buffers, inputs, columns, key)  # type: ignore[arg-type]
        drawing = GraphKey(key, self._generators)
        if not self._free:
            self._free.append(self._new_slot(parameters, buffers, arguments, len(inputs), drawing))
        slot = self._free.pop()
        _fill(slot.arguments, arguments)
        drawing.seed_generators()
        slot.forward()
        outputs: tuple[torch.Tensor, ...] = _Replayed.apply(self, slot, *parameters, *inputs)
        if not any(x.requires_grad for x in outputs):
            self._free.append(slot)  # no backward follows
        return outputs

    def outputs(self, slot: _Slot) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a forward that was replayed, as they may leave their slot.

        If a backward follows, they have been received before it. Else they are copied, because links between devices
        send them from where they are.
        """
        stays = any(x.requires_grad for x in slot.outputs)
        return tuple(x.detach() if stays else apart(x) for x in slot.outputs)

    def backward(self, slot: _Slot, output_grads: _Optional) -> _Optional:
        """Run a backward; return the gradients of the inputs, and add those of parameters to their sums."""
        if slot in self._slots:
            self._free.append(slot)
        layout = _layout(output_grads)
        if layout not in slot.backwards:
            slot.backwards[layout] = self._new_backward(slot, output_grads)
        recorded = slot.backwards[layout]
        _fill(recorded.output_grads, output_grads)
        self._sink.open(recorded.added)
        recorded.replay()
        return [None if gradient is None else apart(gradient) for gradient in recorded.input_grads]

    def _new_slot(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], arguments: _Optional,
        num_inputs: int, key: GraphKey,
    ) -> _Slot:  # fmt: skip
        """Record the forward of a new slot."""
        static = [None if x is None else memory_like(self._device, x) for x in arguments]
        # Other version counters than the optimizer's and those of copies into the slot, which autograd would refuse.
        own = [x.data.requires_grad_(x.requires_grad) for x in parameters]
        for position, leaf in enumerate(own):
            self._sink.watch(position, leaf)
        held = [x.data for x in buffers]
        replay, outputs = self._record(
            partial(self._function, own, held, static[:num_inputs], static[num_inputs:], key),  # type: ignore[arg-type]
            key.generators.values(),
        )
        slot = _Slot(static, own, outputs, replay)
        self._slots.append(slot)
        return slot

    def _new_backward(self, slot: _Slot, output_grads: _Optional) -> _Backward:
        """Record a backward for output gradients of this layout."""
        static = [None if x is None else memory_like(self._device, x) for x in output_grads]
        with self._sink.recording():
            replay, (added, input_grads) = self._record(partial(self._gradients, slot, static))
        return _Backward(static, input_grads, added, replay)

    def _gradients(self, slot: _Slot, output_grads: _Optional) -> tuple[list[int], _Optional]:
        """Add a micro-batch's gradients to their sums; return (uses with a gradient, gradients of the inputs)."""
        known = [(x, gradient) for x, gradient in zip(slot.outputs, output_grads, strict=True) if gradient is not None]
        own = [x for x in slot.leaves if x.requires_grad]
        received = [x for x in slot.arguments if x is not None and x.requires_grad]
        grads = gradients([x for x, _ in known], [x for _, x in known], [*own, *received], keep_graph=True)
        self._sink.add(grads[: len(own)])
        return [use for use, gradient in enumerate(grads[: len(own)]) if gradient is not None], grads[len(own) :]

    def _record(self, run: Callable[[], _T], generators: Iterable[torch.Generator] = ()) -> tuple[Replay, _T]:
        try:
            return self._device.record(run, self._pool, generators)
        except RuntimeError as error:
            if ran_out(error):
                raise
            raise StageError(
                f"cuda_graphs=True: the work of stage {self._stage} cannot be recorded: {error}. A graph repeats "
                "kernels only, so forward must read no value on the host, nor choose sizes by values. Set "
                "cuda_graphs=False, or leave such an operation out."
            ) from error


class _Replayed(torch.autograd.Function):
    """Forward that was replayed, in the autograd graph of what follows it; its backward is replayed too."""

    @staticmethod
    def forward(ctx: Any, graphs: StageGraphs, slot: _Slot, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs, ctx.slot = graphs, slot
        ctx.places = [place for place, x in enumerate(tensors[len(slot.leaves) :]) if x is not None and x.requires_grad]
        ctx.num_inputs = len(tensors) - len(slot.leaves)
        outputs = graphs.outputs(slot)
        ctx.mark_non_differentiable(*(x for x, y in zip(outputs, slot.outputs, strict=True) if not y.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        by_place = dict(zip(ctx.places, ctx.graphs.backward(ctx.slot, output_grads), strict=True))
        return None, None, *(None for _ in ctx.slot.leaves), *map(by_place.get, range(ctx.num_inputs))


def _layout(tensors: _Optional) -> tuple[Any, ...]:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _fill(into: _Optional, values: _Optional) -> None:
    for static, x in zip(into, values, strict=True):
        if static is not None and x is not None:
            fill(static, x)
