"""From the user's nn.Module to stages that are functions.

    nn.Module --trace--> flat graph --analyse--> nodes, sites, what can be rebuilt --lines--+
    nn.Sequential -----> children as they are ----------------------------------------------+--> ModelRecipe

From here on the recipe is cut, wherever a plan is made, into StagePrograms.

The model itself is only read. Training and evaluation graphs come from one capture: training is cut by
position, and evaluation follows the parameters, so both modes find the same tensors in the same stage.

What the model omits: control flow that depends on data, but for torch.cond (the error quotes the line), attributes
of the model that forward changes other than buffers, autocast regions inside forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raypipe.engine.capture.analyse import Analysis, analyse
from raypipe.engine.capture.changed_buffers import changed_buffers
from raypipe.engine.capture.explain import untraceable
from raypipe.engine.capture.lines import lines_of
from raypipe.engine.capture.loss_terms import LossTerms, loss_terms, return_parts
from raypipe.engine.capture.recipe import ModelRecipe, TracedRecipe
from raypipe.engine.capture.same_memory import refuse_constants, refuse_same_memory
from raypipe.engine.capture.sequential import (
    SequentialModel,
    is_plain_sequential,
    sequential_children,
    sequential_graph,
)
from raypipe.engine.capture.trace import trace
from raypipe.engine.capture.traced import Traced
from raypipe.engine.capture.view import model_graph
from raypipe.engine.eager_cond import evaluating
from raypipe.engine.foreign_operations import with_structure
from raypipe.engine.initial.stand_ins import stand_ins
from raypipe.engine.meter import Asked
from raypipe.engine.precision import computing, converted, model_in, refuse_other_types
from raypipe.engine.stage import Loss, StageProgram
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.precision import FP32, Precision

__all__ = ["Capture", "SequentialModel", "TracedModel", "capture", "giving"]

NOTHING_ASKED = Asked()
LossFn = Callable[[Any, Any], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class _Returned(NamedTuple):
    """The structure of what a model returns; None for one tensor. Fixed are leaves that are none: position, value."""

    spec: pytree.TreeSpec | None
    fixed: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def of(cls, mode: Analysis) -> _Returned:
        """By a model that was traced in this mode."""
        return cls(mode.traced.out_spec, mode.fixed)


@dataclass(frozen=True, slots=True)
class _UserLoss:
    """The user's loss on the structure that the model returns."""

    loss_fn: LossFn
    returned: _Returned
    precision: Precision
    evaluated: _Returned | None = None  # in evaluation, where nothing is said otherwise the same

    def __call__(self, outputs: tuple[torch.Tensor, ...], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        with computing(self.precision, outputs):
            return self.loss_fn(self.as_returned(outputs), *targets)

    def as_returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The last stage's outputs in the structure that the model returns."""
        leaves: list[Any] = list(outputs)
        for position, value in self.returned.fixed:
            leaves.insert(position, value)
        return leaves[0] if self.returned.spec is None else with_structure(leaves, self.returned.spec)

    def in_evaluation(self) -> _UserLoss:
        """The same on what the model returns then."""
        return replace(self, returned=self.evaluated or self.returned)


def _own_loss(outputs: Tensors, targets: Sequence[torch.Tensor]) -> torch.Tensor | Tensors:
    """The loss that the model computed, or its parts where they are weighed one by one."""
    return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as torch.export traced it, in both modes where it is evaluated; see analyse.py."""

    train: Analysis
    eval: Analysis | None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured model: what can be cut and sent anywhere, and what stays here with the user's own tensors.

    Attributes:
        recipe: makes its stages.
        parameters, buffers: the user's own tensors by canonical name, in the order of the model.
        persistent: names of the buffers that belong to the state_dict.
        model: what the recipe was made from; profiling runs it operation by operation.
        columns: shape and dtype of every data column of the example, by name.
        terms: what the loss that a traced model returns averages over; None where there is a loss_fn or no trace.
    """

    recipe: ModelRecipe
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    model: TracedModel | SequentialModel
    columns: dict[Any, tuple[tuple[int, ...], torch.dtype]]
    terms: LossTerms | None = None

    @property
    def graph(self) -> ModelGraph:
        """What the planner sees."""
        return self.recipe.graph

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Buffers that training changes and no checkpoint keeps."""
        return tuple(sorted(_changed_by(self.model) - self.persistent))

    @property
    def loss_fn(self) -> LossFn | None:
        """The user's, None where the model returns its own loss."""
        loss = self.recipe.loss
        return loss.loss_fn if isinstance(loss, _UserLoss) else None

    @property
    def trainable(self) -> frozenset[str]:
        return self.recipe.trainable

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]:
        """See ModelRecipe."""
        return self.recipe.programs(cuts, order)


def capture(model: nn.Module, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], columns: Sequence[str],
            loss_fn: LossFn | None, *, evaluates: bool = True, asked: Asked = NOTHING_ASKED,
            precision: Precision = FP32) -> Capture:  # fmt: skip
    """Turn a model into a graph that can be cut into stages. The model is not changed.

    Args:
        model: on the CPU, in any mode.
        example: one micro-batch of at least two samples: (input, ..., target), or columns by name.
        columns: names of the data columns in the order of the example.
        loss_fn: (output, target) -> scalar, None where the model returns its own loss.
        evaluates: whether anything will be evaluated; without, evaluation's mode is not traced, half of the time.
        asked: what metrics read of a model that returns its own loss, to be kept in evaluation.
        precision: that stages compute in; the model is captured in it.

    Raises:
        CaptureError: names the place that cannot be traced or trained, and what to do.
    """
    _refuse_hooks(model)
    _refuse_loss_fn(loss_fn, example)
    refuse_other_types(model, precision)
    taken = _Example.of(example, columns, loss_fn, precision)
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    held = {name: tensor.nbytes for name, tensor in (*named.items(), *buffers.items())}
    frozen = frozenset(n for n, p in named.items() if not p.requires_grad)
    about = _About(held, frozen, loss_fn, precision, evaluates, asked.outputs)
    with model_in(model, precision):
        one_input = len(taken.args) == 1 and not taken.kwargs
        if isinstance(model, nn.Sequential) and is_plain_sequential(model) and one_input:
            found = _children_captured(model, taken, about)
        else:
            found = _traced(model, taken, about)
    _refuse_rounded(model, found, example, precision)
    numels = {name: parameter.numel() for name, parameter in named.items()}
    trainable = frozenset(named) - frozen
    _refuse_apart({**named, **buffers}, trainable, found.model)
    recipe = ModelRecipe(
        found.graph, found.stages, numels, trainable, tuple(buffers), found.loss, taken.targets, asked, precision
    )
    persistent = frozenset(model.state_dict().keys()) & buffers.keys()
    return Capture(recipe, named, buffers, persistent, found.model, taken.shapes, found.terms)


class _About(NamedTuple):
    """What both ways to capture a model are told.

    Attributes:
        held: bytes of every parameter and buffer, by name.
        frozen: names of the parameters that are not trained.
        asked: outputs that metrics read, see ``trace``.
    """

    held: Mapping[str, int]
    frozen: frozenset[str]
    loss_fn: LossFn | None
    precision: Precision
    evaluates: bool
    asked: Sequence[Any]


def _refuse_rounded(model: nn.Module, found: _Found, example: Any, precision: Precision) -> None:
    """Statistics in 16 bits would lose the small changes that they are made of."""
    if not precision.leaves:
        return
    source = found.model
    if isinstance(source, TracedModel):
        changing = {source.train.traced.buffers[node] for node in source.train.changing_buffers}
    else:
        changing = changed_buffers(model, example[0])
    wrong = sorted(name for name, x in model.named_buffers() if name in changing and x.is_floating_point())
    if wrong:
        raise CaptureError(
            f"precision={precision.name!r} would keep {wrong[0]!r}, which every forward changes a little, in "
            f"{precision.leaves}, too coarse for that. Take precision='bf16-autocast', or a norm without statistics "
            "(GroupNorm, LayerNorm)."
        )


def _refuse_apart(
    named: Mapping[str, torch.Tensor], trainable: frozenset[str], source: TracedModel | SequentialModel
) -> None:
    """Tensors over one memory, which stages would hold apart."""
    changing = trainable | _changed_by(source)
    if isinstance(source, TracedModel):
        refuse_constants(source.train.traced.constants.values(), named, changing)
    refuse_same_memory(named, changing)


def _changed_by(source: TracedModel | SequentialModel) -> frozenset[str]:
    """Names of the buffers that a forward in training changes, as far as a graph or a trial tells."""
    if isinstance(source, TracedModel):
        return frozenset(source.train.traced.buffers[node] for node in source.train.changing_buffers)
    return frozenset(name for child in source.train for name in child.changes)


class _Example(NamedTuple):
    """One micro-batch, as the model and the loss take it.

    Attributes:
        inputs, targets: names of the columns that each reads, those of the inputs behind args, then kwargs.
        shapes: as in Capture.columns.
    """

    args: Tensors
    kwargs: dict[str, torch.Tensor]
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(
        cls,
        example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        columns: Sequence[str],
        loss_fn: Any,
        precision: Precision,
    ) -> _Example:
        """The last column is the target of a loss_fn; a model that returns its own loss reads all of them."""
        tensors = tuple(example.values() if isinstance(example, Mapping) else example)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in zip(columns, tensors, strict=True)}
        if isinstance(example, Mapping):
            read = dict(zip(example, converted(tensors, precision), strict=True))
            return cls((), read, tuple(columns), (), shapes)
        if loss_fn is None:
            return cls(tuple(converted(tensors, precision)), {}, tuple(columns), (), shapes)
        inputs = tuple(converted(tensors[:-1], precision))
        return cls(inputs, {}, tuple(columns[:-1]), tuple(columns[-1:]), shapes)

    @property
    def samples(self) -> int:
        return min((len(t) for t in (*self.args, *self.kwargs.values()) if t.dim()), default=1)


class _Found(NamedTuple):
    """What both ways to capture a model find out; see Capture and ModelRecipe."""

    graph: ModelGraph
    stages: TracedRecipe | SequentialModel
    model: TracedModel | SequentialModel
    loss: Loss
    terms: LossTerms | None = None


def _children_captured(model: nn.Sequential, taken: _Example, about: _About) -> _Found:
    """The children as they are."""
    try:
        train, evaluation = sequential_children(model, taken.args[0])
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise untraceable(model, taken.args, taken.kwargs, taken.inputs, error) from None
    children = SequentialModel(tuple(train), tuple(evaluation) if about.evaluates else None, taken.inputs[0])
    loss: Loss = _own_loss if about.loss_fn is None else _UserLoss(about.loss_fn, _Returned(None), about.precision)
    return _Found(sequential_graph(train, about.held, about.frozen), children, children, loss)


def _traced(model: nn.Module, taken: _Example, about: _About) -> _Found:
    """The graphs of torch.export, in both modes where anything is evaluated."""
    if taken.samples < 2:
        raise CaptureError("Tracing needs an example of at least two samples; raise the micro-batch size to 2.")
    loss_fn = about.loss_fn
    run = partial(trace, model, taken.args, taken.kwargs, taken.inputs, returns_loss=loss_fn is None)
    given = (*taken.args, *taken.kwargs.values())
    # An example without memory is a caller's who wants all of it on the meta device.
    with nullcontext() if any(tensor.is_meta for tensor in given) else stand_ins(model):
        training = run(training=True)
        evaluated = None
        if about.evaluates:
            with evaluating():  # a forward may ask whether there are gradients
                evaluated = run(training=False, one_length=training.one_length, kept=about.asked)
        terms = _weighable_terms(model, training, evaluated) if loss_fn is None else None
    source = TracedModel(analyse(training), None if evaluated is None else analyse(evaluated))
    loss: Loss = _own_loss
    if loss_fn is not None:
        in_evaluation = None if source.eval is None else _Returned.of(source.eval)
        loss = _UserLoss(loss_fn, _Returned.of(source.train), about.precision, in_evaluation)
    graph = model_graph(source.train, taken.samples, about.held, about.frozen)
    stages = _recipe_of(source, taken.samples, about.held, type(model).__name__)
    return _Found(graph, stages, source, loss, terms)


def _refuse_loss_fn(loss_fn: LossFn | None, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]) -> None:
    if loss_fn is not None and not isinstance(example, Sequence):
        raise CaptureError(
            "A batch of named columns becomes keyword arguments of a model that returns its own loss; with a loss_fn, "
            "give tuples (input, ..., target) instead."
        )
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn has parameters of its own; make it part of the model and let the model return it.")


def _recipe_of(traced: TracedModel, samples: int, held: Mapping[str, int], title: str) -> TracedRecipe:
    """The lines of both modes."""
    train = lines_of(traced.train)
    if traced.eval is None:
        return TracedRecipe(train, None, (), (), title)
    seen = model_graph(traced.eval, samples, held)
    return TracedRecipe(train, lines_of(traced.eval), seen.together, tuple(n.cut_bytes for n in seen.nodes), title)


def giving(program: StageProgram, take: Callable[..., torch.Tensor]) -> StageProgram:
    """The last stage with ``take`` in place of its loss_fn, called with the model's whole output and no target."""
    assert isinstance(program.loss, _UserLoss), "a model that returns its own loss has no output"
    return replace(program, loss=replace(program.loss, loss_fn=take), targets=())


def _weighable_terms(model: nn.Module, training: Traced, evaluating: Traced | None) -> LossTerms:
    """What the model's own loss averages over; terms that need weights of their own become outputs, in both modes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    terms = loss_terms(training, set(training.columns), tensors)
    if not terms.parts:
        return terms
    if evaluating is not None:
        same = loss_terms(evaluating, set(evaluating.columns), tensors)
        if [count for _, count in same.parts] != [count for _, count in terms.parts]:
            return terms.summed()
        return_parts(evaluating, same)
    return_parts(training, terms)
    return terms


def _refuse_hooks(model: nn.Module) -> None:
    """Gradient hooks belong to the user's own tensors and modules, which no stage calls."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"The parameter {name!r} has a gradient hook, which a stage would not run; remove it.")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"The module {name!r} has a backward hook, which a stage would not run; remove it.")
