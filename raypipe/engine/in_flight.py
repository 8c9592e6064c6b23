"""The micro-batches that a stage has begun and not ended: what each still needs, and its backward, whole or split.

    F   inputs, outputs ---------------------------------> hold
    B   outputs, output_grads --> all gradients             end
    I   outputs, output_grads --> input_grads, operands     hold less
    W   operands --> gradients of the other parameters      end

``output_grads`` come from the next stage, ``input_grads`` go to the stage before. Where the forward is run again,
outputs are let go once they are sent, and B or I begins with making them anew (``second_forward``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from raypipe.engine.backward import gradients
from raypipe.engine.gradients import GradientSink
from raypipe.engine.messages.channel import Message
from raypipe.engine.split_backward import input_gradients
from raypipe.engine.weight_ring import WeightRing

__all__ = ["InFlight"]

_Gradients = Sequence[torch.Tensor | None]
_Outputs = tuple[torch.Tensor, ...]


class _Held(NamedTuple):
    """Of one micro-batch.

    Attributes:
        again: makes the outputs with their graph; None where they have it.
    """

    inputs: Message
    outputs: _Outputs
    again: Callable[[], _Outputs] | None


class InFlight:
    """Micro-batches between F and the end of their backward, by number.

    Args:
        sink: of the parameters' gradients.
        ring: whose versions they use.
        sends_input_grads: the stage before waits for gradients.
    """

    def __init__(self, sink: GradientSink, ring: WeightRing, *, sends_input_grads: bool) -> None:
        self._sink, self._ring, self._sends_input_grads = sink, ring, sends_input_grads
        self._held: dict[int, _Held] = {}
        self._output_grads: dict[int, _Gradients] = {}
        self._input_grads: dict[int, _Gradients] = {}
        self._rest: dict[int, Callable[[], _Gradients]] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._rest)

    def drop(self) -> None:
        """Forget all of them, whose step will not end."""
        for kept in (self._held, self._output_grads, self._input_grads, self._rest):
            kept.clear()

    def hold(
        self, microbatch: int, inputs: Message, outputs: _Outputs, again: Callable[[], _Outputs] | None = None
    ) -> None:
        """After its forward.

        Args:
            again: computes the outputs once more, for the backward; None keeps them.
        """
        self._held[microbatch] = _Held(inputs, outputs, again)

    def outputs(self, microbatch: int, *, keep: bool) -> _Outputs:
        """Of its forward, to be sent; without ``keep`` it has come to its end."""
        held = self._held[microbatch] if keep else self._held.pop(microbatch)
        if keep and held.again is not None:
            self._held[microbatch] = held._replace(outputs=())
        return held.outputs

    def set_output_grads(self, microbatch: int, output_grads: _Gradients) -> None:
        """The gradients of its outputs are known."""
        self._output_grads[microbatch] = output_grads

    def take_input_grads(self, microbatch: int) -> _Gradients:
        """The gradients of its inputs, once."""
        return self._input_grads.pop(microbatch)

    def backward(self, microbatch: int) -> None:
        """B."""
        inputs = self._held[microbatch].inputs
        wanted = _differentiable(inputs)
        self._keep_input_grads(microbatch, inputs, wanted, self._whole(microbatch, [inputs[i] for i in wanted]))

    def backward_input(self, microbatch: int) -> None:
        """I: what the stage before waits for. Where nothing came that wants a gradient, W is all of the backward."""
        inputs = self._held[microbatch].inputs
        wanted = _differentiable(inputs)
        found: _Gradients = ()
        if wanted:
            roots, output_grads = self._roots(microbatch)
            received: list[torch.Tensor] = [inputs[i] for i in wanted]  # type: ignore[misc]
            split = input_gradients(roots, output_grads, received, self._ring.trained(microbatch))
            self._rest[microbatch] = split.finish
            self._sink.add(split.own)
            found = split.received
        self._keep_input_grads(microbatch, inputs, wanted, found)

    def backward_weight(self, microbatch: int) -> None:
        """W: what only the optimizer's step needs."""
        if microbatch not in self._rest:
            self._whole(microbatch, ())
            return
        self._sink.add(self._rest.pop(microbatch)())
        self._ring.leave(microbatch)

    def _whole(self, microbatch: int, received: _Gradients) -> _Gradients:
        """Gradients of the parameters go to the sink, those of ``received`` are returned."""
        roots, output_grads = self._roots(microbatch)
        own = self._ring.trained(microbatch)
        leaves = [*own, *received]
        found: _Gradients = (None,) * len(leaves)
        if roots and leaves:
            found = gradients(roots, output_grads, leaves)  # type: ignore[arg-type]
        self._ring.leave(microbatch)
        self._sink.add(found[: len(own)])
        return found[len(own) :]

    def _roots(self, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs that the backward begins with, and their gradients; nothing else holds the graph any more."""
        held = self._held.pop(microbatch)
        outputs = held.outputs if held.again is None else held.again()
        pairs = zip(outputs, self._output_grads.pop(microbatch, ()), strict=True)
        known = [(root, seed) for root, seed in pairs if seed is not None]
        return [root for root, _ in known], [seed for _, seed in known]

    def _keep_input_grads(self, microbatch: int, inputs: Message, wanted: Sequence[int], found: _Gradients) -> None:
        if self._sends_input_grads:
            by_input = dict(zip(wanted, found, strict=True))
            self._input_grads[microbatch] = tuple(by_input.get(i) for i in range(len(inputs)))


def _differentiable(inputs: Message) -> list[int]:
    """Positions of those that want a gradient."""
    return [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
