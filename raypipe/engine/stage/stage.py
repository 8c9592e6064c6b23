"""Stage of a model: a pure function of parameters, buffers, inputs and a random key; and the buffers that it updates.

    outputs = stage(parameters, buffers, inputs, columns, key)

The executor holds the tensors, the stage holds the code. A program sent to an actor therefore has no parameters, and
weight versions, activation recomputation and re-partitioning need no other kind of stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from raypipe.engine.stage import quantized_linear  # noqa: F401  (registers operations, which workers call)
from raypipe.engine.stage.generated_source import compiled
from raypipe.engine.stage.mixed_precision import computing, converted
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.user_metrics import MetricReads, fields_of
from raypipe.errors import StageError
from raypipe.ir.precision import FP32, Precision

Loss = Callable[[tuple[torch.Tensor, ...], Sequence[torch.Tensor]], torch.Tensor | tuple[torch.Tensor, ...]]
"""Loss function: (outputs of the last stage, targets) -> a scalar, or a tuple of scalars that add up to the loss."""


@dataclass(frozen=True, slots=True)
class Site:
    """Use of a parameter in the model. Gradients are accumulated per use, and uses are summed before the step.

    Rounding depends on whether uses or micro-batches are summed first. With one accumulator per use, the results are
    bitwise equal for every partition.

    Attributes:
        parameter: canonical name, the first of named_parameters().
        index: position among the uses of this parameter in execution order.
    """

    parameter: str
    index: int


class StageFunction(Protocol):
    """Function of a stage in one mode, training or evaluation.

    Attributes:
        sites: for each tensor of the argument ``parameters``, the use of a parameter to which the tensor belongs.
        buffers: names of the argument ``buffers``, which are updated in place.
        columns: names of the data columns that the stage reads itself.
        num_inputs, num_outputs: number of boundary tensors received and sent.
        precision: precision of the computation; arguments are converted to it.
    """

    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    num_inputs: int
    num_outputs: int
    precision: Precision

    @property
    def changing_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that a forward may update."""

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """Names of the ``changing_buffers`` that did not change when the model was tried; later they may change."""

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
    """Code and names that an actor needs to run a stage, without its tensors.

    Attributes:
        index, num_stages: position of the stage.
        train: function for training.
        eval: function for evaluation, of the same capture, names and partition; None without evaluation.
        parameters: canonical names of the trainable and frozen parameters held here.
        buffers: names of the buffers held here.
        trainable: names among parameters with requires_grad.
        shared_with: for each parameter that other stages hold too, the stages that hold it, including this one.
        num_sites: uses of each parameter in the whole model.
        order: position of each parameter in the user's named_parameters(), the order in which norms are combined.
        loss: loss of training; None before the last stage. ``loss_by_mode`` has the loss of evaluation too.
        targets: columns that the loss reads; empty before the last stage and if the model returns its loss.
        first_trainable: lowest stage with a trainable parameter.
        metric_reads: outputs and columns that metrics read if the model returns its own loss; on the last stage.
        precision: precision of the functions and the loss.
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
    metric_reads: MetricReads = MetricReads()  # noqa: RUF009  (immutable)
    precision: Precision = FP32

    @property
    def modes(self) -> dict[str, StageFunction]:
        """Functions by mode: "train", and "eval" if the program has one."""
        return {"train": self.train} if self.eval is None else {"train": self.train, "eval": self.eval}

    def loss_outputs(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the last stage in evaluation, without those that only metrics read."""
        return outputs[: len(outputs) - len(self.metric_reads.outputs)]

    def metric_arguments(
        self, outputs: tuple[torch.Tensor, ...], columns: Mapping[Any, torch.Tensor]
    ) -> tuple[Any, list[Any]]:
        """Return (output, further arguments) for metrics, from the outputs of the last stage in evaluation."""
        as_returned = getattr(self.loss_by_mode["eval"], "as_returned", None)
        if as_returned is not None:
            return as_returned(outputs), [columns[name] for name in self.targets]
        kept = outputs[len(outputs) - len(self.metric_reads.outputs) :]
        batch = fields_of({name: columns[name] for name in self.metric_reads.columns}, self.metric_reads.column_names)
        return fields_of(dict(zip(self.metric_reads.outputs, kept, strict=True)), self.metric_reads.output_names), [
            batch
        ]

    @property
    def loss_by_mode(self) -> dict[str, Loss | None]:
        """Loss by mode, "train" and "eval": they differ if the model returns another structure in evaluation."""
        in_evaluation = getattr(self.loss, "in_evaluation", None)
        return {"train": self.loss, "eval": self.loss if in_evaluation is None else in_evaluation()}

    def whole_loss(self, outputs: tuple[torch.Tensor, ...], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the loss of the last stage's outputs, with its parts added up."""
        assert self.loss is not None
        loss = self.loss(outputs, targets)
        return loss if isinstance(loss, torch.Tensor) else sum(loss[1:], start=loss[0])

    def shared_names(self, stages: Collection[int]) -> list[str]:
        """List the trainable parameters of this stage that another stage in ``stages`` holds too."""
        return [
            name
            for name, holders in self.shared_with.items()
            if name in self.trainable and any(s in stages for s in holders if s != self.index)
        ]

    def shared_sites(
        self, stages: Collection[int], tensors: Sequence[torch.Tensor | None]
    ) -> dict[Site, torch.Tensor | None]:
        """Return {use: gradient sum} of all uses of parameters that this stage shares with ``stages``.

        Args:
            stages: stages that hold some of the same parameters.
            tensors: gradient sums as ``GradientSink.exported(stages)`` of this stage lists them; an element is None if
                the use has no gradient sum.
        """
        wanted = self.shared_names(stages)
        sites = [site for name in wanted for site in self.train.sites if site.parameter == name]
        return dict(zip(sites, tensors, strict=True))


_NAME = re.compile(r"[a-z]\w*")
_TO_ONE_SIZE = (
    "Pad or crop the data to one shape, as collate_fn=raypipe.data.Pad(length) does with lists, or build the model as "
    "an nn.Sequential of blocks, which is not traced."
)


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Evaluate a Python expression over symbols; ``sizes`` has their values. Returns False if evaluation fails."""
    try:
        return bool(eval(condition, {"__builtins__": {}, "math": math, "torch": torch}, dict(sizes)))
    except Exception:  # noqa: BLE001  (functions of torch that only symbols have)
        return False


@dataclass(frozen=True, slots=True)
class ColumnSizes:
    """Sizes of data columns for which generated source is valid.

    The source may contain sizes of the captured example as constants, so that other sizes fail or give wrong values.

    Attributes:
        shapes: shape of each column, by name. A size that may vary is the name of a symbol; any other text is an
            expression over symbols, which is not checked.
        conditions: Python expressions over symbols, which must all be true.
        cause: reason why no size but the number of samples may vary, a clause; "" if unknown.
    """

    shapes: Mapping[Any, tuple[int | str, ...]]
    conditions: tuple[str, ...] = ()
    cause: str = ""

    def misfit(self, shapes: Mapping[Any, Sequence[int]], *, of_minibatch: bool = False) -> str:
        """Describe the first size for which the source is not valid, and the fix; "" if it is valid for all.

        Args:
            shapes: shapes of columns, by name. Conditions on columns that are missing here are not checked.
            of_minibatch: True if the columns have the samples of a whole mini-batch. Conditions on the number of
                samples, which are those of a micro-batch, are then not checked.
        """
        samples = {shape[0] for shape in self.shapes.values() if shape} if of_minibatch else set()
        known: dict[str, int] = {}
        for name, wanted in self.shapes.items():
            if (got := shapes.get(name)) is None:
                continue
            pairs = zip(wanted, got, strict=False)
            sizes = [known.setdefault(want, size) if isinstance(want, str) else want for want, size in pairs]
            if len(wanted) != len(got) or sizes != list(got):
                traced = ", ".join("samples" if at == 0 else str(size) for at, size in enumerate(sizes))
                reason = f" One shape is needed because {self.cause}" if self.cause else ""
                return (
                    f"Column {name!r} came with shape {tuple(got)}, but the model was traced for ({traced}) and its "
                    f"stages compute for that shape only. {_TO_ONE_SIZE}{reason}"
                )
        for condition in self.conditions:
            symbols = [name for name in _NAME.findall(condition) if self._place(name)]
            if known.keys() >= set(symbols) and not samples & set(symbols) and not holds(condition, known):
                needed = _NAME.sub(lambda found: self._place(found[0]) or found[0], condition)
                came = ", ".join(f"{self._place(symbol)} = {known[symbol]}" for symbol in dict.fromkeys(symbols))
                return (
                    f"A mini-batch came with {came}, but forward branches on sizes, and the model was traced for "
                    f"{needed}. Pad the data to sizes of this kind, as pad_to_multiple_of of Hugging Face's collators "
                    "and collate_fn=raypipe.data.Pad([64, 128]) do."
                )
        return ""

    def _place(self, symbol: str) -> str:
        """Return the first size with this symbol as text, such as "input_ids.shape[1]"; "" for other names."""
        places = (f"{name}.shape[{shape.index(symbol)}]" for name, shape in self.shapes.items() if symbol in shape)
        return next(places, "")


@dataclass(slots=True)
class GraphFunction:
    """Stage as generated Python source over aten operations, from a slice of an exported graph.

    Attributes:
        source: defines ``forward(self, *sites, *buffers, *constants, *inputs, *columns, key)``.
        names: globals of the source.
        constants: tensors that the model closed over, never trained and never changed.
        sizes: sizes of the columns for which the source is valid; None if it is valid for all.
        place: device of ``constants`` and of tensors that the source creates; None for host memory, as captured.
        others: see StageFunction.
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
    sizes: ColumnSizes | None = None
    changing_buffers: tuple[str, ...] = ()
    precision: Precision = FP32
    place: torch.device | None = None
    _function: Callable[..., tuple[torch.Tensor, ...]] | None = field(default=None, repr=False, compare=False)
    _valid: tuple[torch.Size, ...] | None = field(default=None, repr=False, compare=False)
    """Shapes of the newest call, which were valid."""

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """Empty, because the graph shows every buffer that a forward updates."""
        return ()

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(None if name in ("_function", "_valid") else getattr(self, name) for name in self.__slots__)

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
        if self.sizes is not None and (shapes := tuple([column.shape for column in columns])) != self._valid:
            if wrong := self.sizes.misfit(dict(zip(self.columns, shapes, strict=True))):
                raise StageError(wrong)
            self._valid = shapes
        if not (self.precision.leaves or self.precision.autocast):
            return self._function(None, *parameters, *buffers, *self.constants, *inputs, *columns, key)
        leaves, held, read = (converted(tensors, self.precision) for tensors in (parameters, buffers, columns))
        with computing(self.precision, (*leaves, *inputs, *read)):
            return self._function(None, *leaves, *held, *self.constants, *inputs, *read, key)


class StageBuffers:
    """Buffers of one stage by mode: the buffers of training, and copies of those that an evaluation may change.

    training    average --F0--> average --F1--> average ............................. --F2--> average
                                                   |  copied at the beginning           unchanged
    evaluation                                     +--> average --F--> average    (dropped)

    Evaluation mode changes no statistics of a BatchNorm, but a module may count or average in every forward. An
    evaluation is as in plain PyTorch on a copy of the model: its updates last until its end.

    Args:
        modes: functions of "train", and of "eval" if there is evaluation.
        held: all buffers of the stage by name; they stay the same tensors.
    """

    def __init__(self, modes: Mapping[str, StageFunction], held: Mapping[str, torch.Tensor]) -> None:
        self._held = {mode: {name: held[name] for name in of.buffers} for mode, of in modes.items()}
        self._changing = modes["eval"].changing_buffers if "eval" in modes else ()
        self._names = modes["train"].changing_buffers
        self._trained = [held[name] for name in self._names]
        self._before: list[torch.Tensor] = []
        self._constant = frozenset(modes["train"].tried_constant)
        self._evaluation: dict[str, torch.Tensor] | None = None

    def begin(self, *, training: bool, anew: bool) -> None:
        """Prepare the buffers for training, or for an evaluation, which works on copies of them.

        Args:
            anew: True if an evaluation begins, False if the evaluation continues; no effect in training.
        """
        if training:
            self._evaluation = None
        elif anew or self._evaluation is None:
            held = self._held["eval"]
            self._evaluation = held | {name: held[name].detach().clone() for name in self._changing}

    def keep(self) -> None:
        """Copy the buffers that training may change, before a step that may be repeated."""
        if not self._before:
            self._before = [x.detach().clone() for x in self._trained]
        else:
            for kept, x in zip(self._before, self._trained, strict=True):
                kept.copy_(x)

    def bring_back(self) -> None:
        """Restore the values of the last ``keep``, in place; do nothing if ``keep`` was not called."""
        for kept, x in zip(self._before, self._trained, strict=bool(self._before)):
            x.copy_(kept)

    def check(self, stage: int) -> None:
        """Check after a step on a stage with replicas that buffers assumed constant have the values of ``keep``.

        Raises:
            StageError: a buffer changed that did not change when the model was tried (``tried_constant``).
        """
        for name, x, kept in zip(self._names, self._trained, self._before, strict=True):
            if name in self._constant and not same_bits(x, kept):
                raise StageError(
                    f"Stage {stage} changed buffer {name!r} in this step, but not when the model was tried, so its "
                    "replicas now differ, each by its own micro-batches. Give the stage one worker (num_replicas takes "
                    "a list, one number per stage), or set replicated_buffers=True, with which each replica keeps its "
                    "own."
                )

    def of(self, *, training: bool) -> dict[str, torch.Tensor]:
        """Return the buffers for a forward in training or in an evaluation; the forward may change them."""
        return self._held["train"] if training or self._evaluation is None else self._evaluation


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype have equal values, or equal bytes if they contain NaN."""
    return torch.equal(one, two) or torch.equal(_bits(one), _bits(two))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1).view(torch.uint8)
