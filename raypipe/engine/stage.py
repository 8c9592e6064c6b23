"""A stage is a function of parameters, buffers, inputs and a random key; it owns nothing.

    outputs = stage(parameters, buffers, inputs, columns, key)

The executor holds the tensors, the stage holds the recipe. What travels to an actor is therefore free of
parameters, and weight versions, recomputation and re-partitioning need no other kind of stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import raypipe.engine.cumulative  # noqa: F401  (an operation that the source of a stage may call)
from raypipe.engine.meter import Asked
from raypipe.engine.metric_fields import fields_of
from raypipe.engine.precision import computing, converted
from raypipe.engine.randomness import RandomKey
from raypipe.engine.region import compiled
from raypipe.errors import StageError
from raypipe.ir.precision import FP32, Precision

__all__ = ["GraphFunction", "Loss", "Site", "StageFunction", "StageProgram"]

Loss = Callable[[tuple[torch.Tensor, ...], Sequence[torch.Tensor]], torch.Tensor | tuple[torch.Tensor, ...]]
"""(outputs of the last stage, targets) -> a scalar, or parts that add up to it."""


@dataclass(frozen=True, slots=True)
class Site:
    """One use of a parameter; gradients are accumulated per site and summed once before the optimizer's step.

    Sums over the sites of a shared parameter do not commute with sums over micro-batches, so one
    accumulator per site is what makes every partition give the same bits.

    Attributes:
        parameter: canonical name, the first of named_parameters().
        index: position among the uses of this parameter in execution order.
    """

    parameter: str
    index: int


class StageFunction(Protocol):
    """One mode (training or evaluation) of a stage.

    Attributes:
        sites: what ``parameters`` holds, in order.
        buffers: names of what ``buffers`` holds; updates happen in place.
        columns: names of the data columns that the stage reads itself.
        num_inputs, num_outputs: boundary tensors that come and go.
        precision: what it computes in: it converts what it is given.
    """

    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    num_inputs: int
    num_outputs: int
    precision: Precision

    @property
    def changing_buffers(self) -> tuple[str, ...]:
        """Those of ``buffers`` that a forward may update."""

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """Those of ``changing_buffers`` of which nothing is known but that the forwards of a trial left them alone."""

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        key: RandomKey,
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What an actor needs to play a stage, apart from the tensors.

    Attributes:
        index, num_stages: position.
        train: training's mode.
        eval: evaluation's, of the same capture, with the same names and the same cut; None where nothing is evaluated.
        parameters: canonical names of the trainable and frozen parameters held here.
        buffers: names of the buffers held here.
        trainable: names among parameters with requires_grad.
        shared_with: for each shared parameter held here too, the stages that hold it, this one included.
        num_sites: uses of each parameter in the whole model.
        order: position of each parameter in the user's named_parameters(), for norms in one order.
        loss: None before the last stage; see ``loss_by_mode``.
        targets: columns that the loss reads; empty before the last stage and where the model returns its loss.
        first_trainable: lowest stage with a trainable parameter.
        asked: by metrics of a model that returns its own loss, on the last stage.
        precision: of its functions and its loss.
    """

    index: int
    num_stages: int
    train: StageFunction
    eval: StageFunction | None
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    trainable: frozenset[str]
    shared_with: dict[str, tuple[int, ...]]
    num_sites: dict[str, int]
    order: dict[str, int]
    loss: Loss | None
    targets: tuple[str, ...]
    first_trainable: int
    asked: Asked = Asked()  # noqa: RUF009  (immutable)
    precision: Precision = FP32

    @property
    def modes(self) -> dict[str, StageFunction]:
        """By name: "train", and "eval" where there is one."""
        return {"train": self.train} if self.eval is None else {"train": self.train, "eval": self.eval}

    def without_asked(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the last stage returns in evaluation, without what only metrics read."""
        return outputs[: len(outputs) - len(self.asked.outputs)]

    def metric_arguments(
        self, outputs: tuple[torch.Tensor, ...], columns: Mapping[Any, torch.Tensor]
    ) -> tuple[Any, list[Any]]:
        """(output, what stands behind it) as metrics take them, from what the last stage returns in evaluation."""
        as_returned = getattr(self.loss_by_mode["eval"], "as_returned", None)
        if as_returned is not None:
            return as_returned(outputs), [columns[name] for name in self.targets]
        kept = outputs[len(outputs) - len(self.asked.outputs) :]
        batch = fields_of({name: columns[name] for name in self.asked.columns}, self.asked.column_names)
        return fields_of(dict(zip(self.asked.outputs, kept, strict=True)), self.asked.output_names), [batch]

    @property
    def loss_by_mode(self) -> dict[str, Loss | None]:
        """As ``modes``, for a model may return another structure in evaluation; "eval" is always there."""
        in_evaluation = getattr(self.loss, "in_evaluation", None)
        return {"train": self.loss, "eval": self.loss if in_evaluation is None else in_evaluation()}

    def whole_loss(self, outputs: tuple[torch.Tensor, ...], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the last stage's outputs, its parts added up."""
        assert self.loss is not None
        found = self.loss(outputs, targets)
        return found if isinstance(found, torch.Tensor) else sum(found[1:], start=found[0])

    def shared_names(self, stages: Collection[int]) -> list[str]:
        """Parameters that learn and belong to one of these other stages too."""
        return [
            name
            for name in self.parameters
            if name in self.trainable and any(s in stages for s in self.shared_with.get(name, ()) if s != self.index)
        ]

    def shared_sites(
        self, stages: Collection[int], tensors: Sequence[torch.Tensor | None]
    ) -> dict[Site, torch.Tensor | None]:
        """By use site on this stage, what it exported to these."""
        wanted = self.shared_names(stages)
        sites = [site for name in wanted for site in self.train.sites if site.parameter == name]
        return dict(zip(sites, tensors, strict=True))


def _other_shape(name: str, column: torch.Tensor, shape: tuple[int | None, ...]) -> StageError:
    """Numbers of the traced shape are part of the code: run on another one it may fail, or be wrong in silence."""
    sizes = ", ".join("samples" if size is None else str(size) for size in shape)
    return StageError(
        f"Column {name!r} came with shape {tuple(column.shape)}, but the model was traced for ({sizes}) and its stages "
        "compute for that shape only. Pad or crop the data to one shape, or build the model as an nn.Sequential of "
        "blocks, which is not traced."
    )


@dataclass(slots=True)
class GraphFunction:
    """A stage as generated Python source over aten operations; what a slice of an exported graph becomes.

    Attributes:
        source: defines ``forward(self, *sites, *buffers, *constants, *inputs, *columns, key)``.
        names: the globals that the source refers to.
        constants: tensors that the model closed over, never trained and never changed.
        column_shapes: that each column must have, None where any size will do; empty for no such rule.
        place: where ``constants`` lie and what the source makes is made; None for host memory, as it was captured.
    """

    source: str
    names: dict[str, Any]
    constants: tuple[torch.Tensor, ...]
    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    num_inputs: int
    num_outputs: int
    title: str = "stage"
    column_shapes: tuple[tuple[int | None, ...], ...] = ()
    changing_buffers: tuple[str, ...] = ()
    precision: Precision = FP32
    place: torch.device | None = None
    _function: Callable[..., tuple[torch.Tensor, ...]] | None = field(default=None, repr=False, compare=False)

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """None: the graph tells."""
        return ()

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(None if name == "_function" else getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        key: RandomKey,
    ) -> tuple[torch.Tensor, ...]:
        if self._function is None:
            self._function = compiled(self.source, self.names, self.title, self.place, direct=True)
        for name, column, shape in zip(self.columns, columns, self.column_shapes, strict=False):
            if len(shape) != column.dim() or any(want not in (None, got) for want, got in zip(shape, column.shape)):  # noqa: B905
                raise _other_shape(name, column, shape)
        leaves, held, read = (converted(tensors, self.precision) for tensors in (parameters, buffers, columns))
        with computing(self.precision, (*leaves, *inputs, *read)):
            return self._function(None, *leaves, *held, *self.constants, *inputs, *read, key)
