"""Recomputation: a stage's forward whose graph is let go, and the same forward once more in its backward.

    F   inputs, columns, buffers --> outputs, sent and let go; kept: what came, and the buffers as they were
    B   the same ------------------> outputs with their graph --> gradients

Between F and B (I, or W where nothing came that wants a gradient) a micro-batch holds what it came with instead of its
activations. Both forwards are the same to the bit: they use the weight version of the micro-batch and the same keyed
draws. What a forward changes is changed once: a buffer (a batch norm's statistics, the vectors of a spectral norm) in
F, and in B a copy of it as it was; an input that the stage overwrites in B, and in F a copy of it.

F makes a graph too, which ends with it: without one torch takes other kernels for some operations (an LSTM on a CPU),
which round differently, and the outputs would not say which of them require a gradient. What a forward changes is seen
in the first micro-batch of all. Torch does not count what a batch norm does to its statistics, nor need they be others
after it: which buffers may change is known from the graph of the model.

Chen et al., arXiv:1604.06174; per stage of a pipeline: GPipe, arXiv:1811.06965, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from raypipe.errors import StageError

__all__ = ["Given", "SecondForward"]

Tensors = tuple[torch.Tensor, ...]


class Given(NamedTuple):
    """What a forward is a function of, besides weights and a key.

    Attributes:
        inputs: that came from the stage before.
        columns: of the data, by name; those that the loss reads among them.
        buffers: of the stage, by name.
    """

    inputs: Sequence[torch.Tensor | None]
    columns: Mapping[Any, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class SecondForward:
    """The forwards of one stage.

    Args:
        stage: for messages.
        changing: names of buffers that a forward may change.
    """

    def __init__(self, stage: int, changing: Collection[str] = ()) -> None:
        self._stage = stage
        self._changing = {("buffer", name) for name in changing}
        self._changed: frozenset[tuple[str, Any]] | None = None  # by a forward; None where nobody knows yet

    def first(self, run: Callable[[Given], Tensors], given: Given) -> tuple[Tensors, Callable[[], Tensors]]:
        """F: the outputs without their graph, and what makes them again with it; that is to be called once.

        Raises:
            StageError: the forward changed what it did not change before.
        """
        kept = given._replace(buffers=self._copied("buffer", given.buffers))
        inputs = self._copied("input", dict(enumerate(given.inputs)))
        used = Given(list(inputs.values()), self._copied("column", given.columns), given.buffers)
        before = dict(_versions(used))
        outputs = run(used)
        if not outputs:  # no valid target: nothing to make a gradient of
            return (), tuple
        changed = {key for key, version in _versions(used) if version != before[key]}
        if self._changed is None:
            self._changed = frozenset(changed | self._changing)
        elif changed - self._changed:
            raise self._unsteady(f"changes {_in_words(*min(changed - self._changed, key=str))}")
        requires_grad = tuple(x.requires_grad for x in outputs)
        bare = tuple(x.detach().requires_grad_(flag) for x, flag in zip(outputs, requires_grad, strict=True))
        return bare, partial(self._second, run, kept, requires_grad)

    def _second(self, run: Callable[[Given], Tensors], kept: Given, requires_grad: tuple[bool, ...]) -> Tensors:
        """B: the outputs with their graph."""
        outputs = run(kept)
        found = tuple(x.requires_grad for x in outputs)
        if found != requires_grad:
            raise self._unsteady("has outputs that require a gradient")
        return outputs

    def _copied(self, kind: str, tensors: Mapping[Any, Any]) -> dict[Any, Any]:
        """The same with copies of those that a forward changes, or may change for all that is known."""
        changed = self._changed
        return {
            name: _copy(x) if x is not None and (changed is None or (kind, name) in changed) else x
            for name, x in tensors.items()
        }

    def _unsteady(self, what: str) -> StageError:
        return StageError(
            f"Stage {self._stage} {what} in some micro-batches and not in others, so that it cannot be computed again. "
            "Set recompute='never', or leave this stage out of recompute."
        )


def _versions(given: Given) -> Iterator[tuple[tuple[str, Any], int]]:
    """How often each tensor was changed in place, as far as torch counts."""
    kinds = ("input", dict(enumerate(given.inputs))), ("column", given.columns), ("buffer", given.buffers)
    for kind, tensors in kinds:
        for name, x in tensors.items():
            if x is not None:
                yield (kind, name), x._version


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A leaf like it."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _in_words(kind: str, name: Any) -> str:
    return {"input": f"input {name}", "column": f"column {name!r}"}.get(kind, f"buffer {name!r}")
