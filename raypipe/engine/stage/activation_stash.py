"""Activation stash of a stage: micro-batches between their forward and the end of their backward, whole or split.

    F   inputs, outputs                                     stashed
    B   outputs, output_grads --> all gradients             dropped
    I   outputs, output_grads --> input_grads, operands     only operands stashed
    W   operands --> gradients of the other parameters      dropped

``output_grads`` come from the next stage, ``input_grads`` go to the previous stage. With activation recomputation the
outputs are freed once they are sent, and B or I begins by recomputing them (``Recomputation``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from raypipe.engine.messages.channel import Message
from raypipe.engine.stage.backward import gradients, input_gradients
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.weight_ring import WeightRing

_Gradients = Sequence[torch.Tensor | None]
_Outputs = tuple[torch.Tensor, ...]


class _Stashed(NamedTuple):
    """Stashed tensors of one micro-batch.

    Attributes:
        recompute: function that recomputes the outputs with their autograd graph; None if ``outputs`` have a graph.
    """

    inputs: Message
    outputs: _Outputs
    recompute: Callable[[], _Outputs] | None


class ActivationStash:
    """Stash of the micro-batches between their forward and the end of their backward, by micro-batch number.

    A backward is whole (B), or split into an input part (I) and a weight part (W).

    Args:
        sink: accumulators of the parameters' gradients.
        ring: weight versions that the micro-batches use.
        sends_input_grads: True if the previous stage needs the gradients of its outputs.
    """

    def __init__(self, sink: GradientSink, ring: WeightRing, *, sends_input_grads: bool) -> None:
        self._sink, self._ring, self._sends_input_grads = sink, ring, sends_input_grads
        self._held: dict[int, _Stashed] = {}
        self._output_grads: dict[int, _Gradients] = {}
        self._input_grads: dict[int, _Gradients] = {}
        self._rest: dict[int, Callable[[], _Gradients]] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._rest)

    def drop(self) -> None:
        """Drop all micro-batches, after their step was aborted."""
        for kept in (self._held, self._output_grads, self._input_grads, self._rest):
            kept.clear()

    def hold(
        self, microbatch: int, inputs: Message, outputs: _Outputs, recompute: Callable[[], _Outputs] | None = None
    ) -> None:
        """Stash a micro-batch after its forward; ``recompute`` recomputes ``outputs``, None if they have a graph."""
        self._held[microbatch] = _Stashed(inputs, outputs, recompute)

    def outputs(self, microbatch: int, *, keep: bool) -> _Outputs:
        """Return the outputs of a forward, to be sent. The micro-batch is dropped unless ``keep`` is True."""
        held = self._held[microbatch] if keep else self._held.pop(microbatch)
        if keep and held.recompute is not None:
            self._held[microbatch] = held._replace(outputs=())
        return held.outputs

    def set_output_grads(self, microbatch: int, output_grads: _Gradients) -> None:
        """Store the gradients of the outputs of a micro-batch."""
        self._output_grads[microbatch] = output_grads

    def take_input_grads(self, microbatch: int) -> _Gradients:
        """Return the gradients of the inputs of a micro-batch, and drop them."""
        return self._input_grads.pop(microbatch)

    def backward(self, microbatch: int) -> None:
        """Run B, the whole backward of a micro-batch."""
        inputs = self._held[microbatch].inputs
        differentiable = _differentiable(inputs)
        self._keep_input_grads(
            microbatch, inputs, differentiable, self._run_whole(microbatch, [inputs[i] for i in differentiable])
        )

    def backward_input(self, microbatch: int) -> None:
        """Run I, the input part of a backward.

        This computes the gradients of the inputs, and of parameters whose gradients cannot be deferred to W. If no
        input requires a gradient, nothing is done, and ``backward_weight`` runs the whole backward.
        """
        inputs = self._held[microbatch].inputs
        differentiable = _differentiable(inputs)
        grads: _Gradients = ()
        if differentiable:
            roots, output_grads = self._roots(microbatch)
            received: list[torch.Tensor] = [inputs[i] for i in differentiable]  # type: ignore[misc]
            split = input_gradients(roots, output_grads, received, self._ring.trained(microbatch))
            self._rest[microbatch] = split.finish
            self._sink.add(split.own)
            grads = split.received
        self._keep_input_grads(microbatch, inputs, differentiable, grads)

    def backward_weight(self, microbatch: int) -> None:
        """Run W, the weight part of a backward: the parameter gradients that ``backward_input`` has deferred."""
        if microbatch not in self._rest:
            self._run_whole(microbatch, ())
            return
        self._sink.add(self._rest.pop(microbatch)())
        self._ring.leave(microbatch)

    def _run_whole(self, microbatch: int, received: _Gradients) -> _Gradients:
        """Run a whole backward; add the parameters' gradients to the sink; return the gradients of ``received``."""
        roots, output_grads = self._roots(microbatch)
        own = self._ring.trained(microbatch)
        leaves = [*own, *received]
        grads: _Gradients = (None,) * len(leaves)
        if roots and leaves:
            grads = gradients(roots, output_grads, leaves)  # type: ignore[arg-type]
        self._ring.leave(microbatch)
        self._sink.add(grads[: len(own)])
        return grads[len(own) :]

    def _roots(self, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Remove a micro-batch; return (its outputs that have a gradient, these gradients).

        Outputs are recomputed first if necessary. The caller then has the only reference to their graph.
        """
        held = self._held.pop(microbatch)
        outputs = held.outputs if held.recompute is None else held.recompute()
        pairs = zip(outputs, self._output_grads.pop(microbatch, ()), strict=True)
        known = [(root, output_grad) for root, output_grad in pairs if output_grad is not None]
        return [root for root, _ in known], [output_grad for _, output_grad in known]

    def _keep_input_grads(
        self, microbatch: int, inputs: Message, differentiable: Sequence[int], grads: _Gradients
    ) -> None:
        if self._sends_input_grads:
            by_input = dict(zip(differentiable, grads, strict=True))
            self._input_grads[microbatch] = tuple(by_input.get(i) for i in range(len(inputs)))


def _differentiable(inputs: Message) -> list[int]:
    """List the positions of the inputs that require a gradient."""
    return [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
