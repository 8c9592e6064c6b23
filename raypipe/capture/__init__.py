"""Capture of a user's nn.Module as a recipe: plain data from which the stages of any partition are built.

    nn.Module --trace--> flat graph --analyse--> operations, parameter uses --lines--+
    nn.Sequential -----> children as they are ---------------------------------------+--> ModelRecipe --> StagePrograms

The model itself is only read. One capture covers training and evaluation. Training is cut at positions in the order of
operations. Evaluation is divided so that each parameter is read in a stage that holds it in training.

Not supported in a traced forward: data-dependent control flow other than torch.cond and checks that only raise (the
error quotes the line), state that forward keeps between calls outside of buffers, and regions that switch autocast on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raypipe.capture.analyse import Analysis, Traced, analyse
from raypipe.capture.dependencies import model_graph
from raypipe.capture.explain import Inputs, untraceable
from raypipe.capture.loss_tail import divide
from raypipe.capture.loss_terms import LossTerms, loss_terms, return_parts
from raypipe.capture.recipe import ModelRecipe, TracedRecipe
from raypipe.capture.sequential import (
    SequentialModel,
    is_plain_sequential,
    sequential_children,
    sequential_graph,
)
from raypipe.capture.source_lines import lines_of
from raypipe.capture.trace import OneSizeError, trace
from raypipe.engine.initial.meta_init import stand_ins
from raypipe.engine.stage.generated_source import with_structure
from raypipe.engine.stage.minibatch_loss import LossTail
from raypipe.engine.stage.mixed_precision import computing, converted, model_in, refuse_other_types
from raypipe.engine.stage.quantized_linear import buffers_of, settle, traceable
from raypipe.engine.stage.randomness import evaluating
from raypipe.engine.stage.stage import Loss, StageProgram
from raypipe.engine.stage.user_metrics import MetricReads
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.precision import FP32, Precision

__all__ = ["Capture", "SequentialModel", "TracedModel", "capture", "giving"]

NO_METRIC_READS = MetricReads()
LossFn = Callable[[Any, Any], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class _Returned(NamedTuple):
    """Output structure of a model.

    Attributes:
        spec: pytree spec of the output; None for a single tensor.
        fixed: (index among the output's leaves, value) of every leaf that is not a tensor.
    """

    spec: pytree.TreeSpec | None
    fixed: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def of(cls, mode: Analysis) -> _Returned:
        """Return the output structure of a traced model; ``mode`` is its analysis in training or in evaluation mode."""
        return cls(mode.traced.out_spec, mode.fixed)


@dataclass(frozen=True, slots=True)
class _UserLoss:
    """Loss of the last stage, which rebuilds the structure of the model's output and calls the user's loss_fn.

    Attributes:
        returned: structure of the model's output in training mode.
        precision: number format in which the loss is computed.
        evaluated: structure in evaluation mode; None uses ``returned``.
    """

    loss_fn: LossFn
    returned: _Returned
    precision: Precision
    evaluated: _Returned | None = None

    def __call__(self, outputs: tuple[torch.Tensor, ...], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        with computing(self.precision, outputs):
            return self.loss_fn(self.as_returned(outputs), *targets)

    def as_returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Rebuild the output that the model returns, such as a dict, from the flat output tensors of the last stage."""
        leaves: list[Any] = list(outputs)
        for position, value in self.returned.fixed:
            leaves.insert(position, value)
        return leaves[0] if self.returned.spec is None else with_structure(leaves, self.returned.spec)

    def in_evaluation(self) -> _UserLoss:
        """Return this loss for outputs of the model in evaluation mode."""
        return replace(self, returned=self.evaluated or self.returned)


def _own_loss(outputs: Tensors, targets: Sequence[torch.Tensor]) -> torch.Tensor | Tensors:
    """Return the last stage's outputs: the model's own loss, or the terms of the loss if there are several."""
    return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """Graphs of a traced model in training mode and in evaluation mode; ``eval`` is None if nothing is evaluated."""

    train: Analysis
    eval: Analysis | None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured model: the recipe of its stages, which can be sent to other processes, and the user's own tensors.

    Attributes:
        recipe: builds the programs of the stages.
        parameters, buffers: the user's own tensors by canonical name, in the order of the model.
        persistent: names of the buffers that belong to the state_dict.
        model: graphs, or children of an nn.Sequential, that the recipe was made from. Profiling runs them one operation
            or child at a time.
        columns: shape and dtype of every data column of the example, by name.
        terms: averages in the loss that a traced model returns; None with a loss_fn, or for an untraced nn.Sequential.
        one_size: number of samples that every micro-batch must have; None if the model takes any number.
    """

    recipe: ModelRecipe
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    model: TracedModel | SequentialModel
    columns: dict[Any, tuple[tuple[int, ...], torch.dtype]]
    terms: LossTerms | None = None
    one_size: int | None = None

    @property
    def graph(self) -> ModelGraph:
        """Graph of the model, the planner's input."""
        return self.recipe.graph

    @property
    def changing(self) -> frozenset[str]:
        """Names of the trainable parameters, and of the buffers that a training forward was found to change."""
        return self.trainable | _changed_by(self.model)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Names of the buffers that training changes but no checkpoint holds, because they are not persistent."""
        return tuple(sorted(_changed_by(self.model) - self.persistent))

    @property
    def checks(self) -> tuple[str, ...]:
        """FILE:LINE of every check on values in a training forward; stages leave these checks out, see branches.py."""
        return self.model.train.traced.checks if isinstance(self.model, TracedModel) else ()

    def misfit(self, mode: str, shapes: Mapping[Any, Sequence[int]]) -> str:
        """Describe why stages of the model are not valid for data of these shapes, and the fix; "" if they are.

        Args:
            mode: "train" or "eval".
            shapes: shape of each column of a mini-batch, by name; columns that the model does not read may be among
                them. The number of samples does not matter.
        """
        if not isinstance(self.model, TracedModel) or not isinstance(self.recipe.stages, TracedRecipe):
            return ""
        lines = self.recipe.stages.train if mode == "train" else self.recipe.stages.eval
        if self.one_size is not None:
            shapes = {name: (self.one_size, *shape[1:]) if shape else () for name, shape in shapes.items()}
        return "" if lines is None else lines.column_sizes.misfit(shapes, of_minibatch=True)

    @property
    def loss_fn(self) -> LossFn | None:
        """The user's loss function; None if the model returns its own loss."""
        loss = self.recipe.loss
        return loss.loss_fn if isinstance(loss, _UserLoss) else None

    @property
    def trainable(self) -> frozenset[str]:
        return self.recipe.trainable

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]:
        """Build the program of every stage; see ``ModelRecipe.programs``."""
        return self.recipe.programs(cuts, order)

    def with_loss_tail(self, tensors: Mapping[str, torch.Tensor], rows: Mapping[Any, torch.Tensor]) -> Capture:
        """Return this capture of a model with its own loss, with a ``LossTail`` in place of the model's last part.

        Args:
            tensors: parameters and buffers by name, with values.
            rows: columns by name, with which the model is divided; see loss_tail.py.

        Raises:
            CaptureError: the model cannot be divided; the message is a clause, to be put into another message.
        """
        if not isinstance(self.model, TracedModel) or not isinstance(self.recipe.stages, TracedRecipe):
            raise CaptureError("the children of an nn.Sequential are not traced")
        recipe, stages, evaluation = self.recipe, self.recipe.stages, None
        train = divide(self.model.train, stages.train, tensors, rows, recipe.precision, 0)
        if self.model.eval is not None and stages.eval is not None:
            kept = len(recipe.metric_reads.outputs)
            evaluation = divide(self.model.eval, stages.eval, tensors, rows, recipe.precision, kept)
        bodies = TracedModel(analyse(train.body), None if evaluation is None else analyse(evaluation.body))
        columns = dict.fromkeys((*train.tail.columns, *(evaluation.tail.columns if evaluation else ())))
        blocks = {"train": train.blocks, "eval": (evaluation or train).blocks}
        loss = LossTail(train.tail, None if evaluation is None else evaluation.tail, tuple(columns), blocks)
        held = {name: x.nbytes for name, x in (*self.parameters.items(), *self.buffers.items())}
        samples = min((shape[0] for shape, _ in self.columns.values() if shape), default=1)
        changed = replace(
            recipe,
            graph=model_graph(bodies.train, samples, held, frozenset(self.parameters) - self.trainable),
            stages=_recipe_of(bodies, samples, held, stages.title),
            loss=loss,
            targets=loss.targets,
        )
        return replace(self, recipe=changed, model=bodies, terms=None)


def capture(model: nn.Module, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], columns: Sequence[str],
            loss_fn: LossFn | None, *, evaluates: bool = True, metric_reads: MetricReads = NO_METRIC_READS,
            precision: Precision = FP32, parts: bool = True,
            varying: frozenset[tuple[Any, int]] = frozenset(),
            progress: Callable[[str], None] = lambda _text: None) -> Capture:  # fmt: skip
    """Turn a model into a graph that can be cut into stages. The model is not changed.

    Args:
        model: a module on the CPU or the meta device, in training or evaluation mode.
        example: one micro-batch of at least two samples: (input, ..., target), or columns by name.
        columns: names of the data columns in the order of the example.
        loss_fn: (output, target) -> scalar; None if the model returns its own loss.
        evaluates: False if nothing will be evaluated: evaluation mode is then not traced, which halves the time.
        metric_reads: outputs that metrics read, if the model returns its own loss; kept in evaluation mode.
        precision: number format in which stages compute; the model is captured in this format.
        parts: True to let the captured model return the terms of its own loss one by one if they average over
            different items; False to let it return their sum.
        varying: (column, dimension) of the sizes that differ between mini-batches, besides the number of samples.
        progress: takes a text that shows how far a trace is, see ``trace``.

    Raises:
        CaptureError: the model cannot be traced or trained; names the line or module, and the fix.
    """
    _refuse_loss_fn(loss_fn, example)
    refuse_other_types(model, precision)
    saved = frozenset(model.state_dict().keys())
    in_children = isinstance(model, nn.Sequential) and is_plain_sequential(model) and not settle(model)
    with traceable(model, precision):
        return _captured(model, example, columns, loss_fn, evaluates=evaluates, metric_reads=metric_reads,
                         precision=precision, parts=parts, varying=varying, progress=progress, saved=saved,
                         in_children=in_children)  # fmt: skip


def _captured(model: nn.Module, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], columns: Sequence[str],
              loss_fn: LossFn | None, *, evaluates: bool, metric_reads: MetricReads, precision: Precision, parts: bool,
              varying: frozenset[tuple[Any, int]], progress: Callable[[str], None],
              saved: frozenset[str], in_children: bool) -> Capture:  # fmt: skip
    """Capture a model inside of ``traceable``, see ``capture``.

    Args:
        saved: names in the model's state_dict.
        in_children: True for an nn.Sequential of which stages call the children.
    """
    taken = _Example.of(example, columns, loss_fn, precision)
    taken = taken._replace(inputs=taken.inputs._replace(varying=varying))
    named, buffers = dict(model.named_parameters()), buffers_of(model)
    held = {name: tensor.nbytes for name, tensor in (*named.items(), *buffers.items())}
    frozen = frozenset(n for n, p in named.items() if not p.requires_grad)
    source: TracedModel | SequentialModel
    stages: TracedRecipe | SequentialModel
    terms = None
    with model_in(model, precision):
        one_input = len(taken.inputs.args) == 1 and not taken.inputs.kwargs
        if in_children and isinstance(model, nn.Sequential) and one_input:
            source = stages = _children_captured(model, taken.inputs, evaluates=evaluates)
            graph = sequential_graph(source.train, held, frozen)
        else:
            source, terms = _traced(
                model, taken, metric_reads.outputs, returns_loss=loss_fn is None, evaluates=evaluates, parts=parts,
                progress=progress,
            )  # fmt: skip
            graph = model_graph(source.train, taken.samples, held, frozen)
            stages = _recipe_of(source, taken.samples, held, type(model).__name__)
    _refuse_rounded(model, source, precision)
    recipe = ModelRecipe(
        graph,
        stages,
        {name: parameter.numel() for name, parameter in named.items()},
        frozenset(named) - frozen,
        tuple(buffers),
        _loss_of(source, loss_fn, precision),
        taken.targets,
        metric_reads,
        precision,
    )
    one_size = taken.samples if isinstance(source, TracedModel) and source.train.traced.one_size else None
    return Capture(recipe, named, buffers, saved & buffers.keys(), source, taken.shapes, terms, one_size)


def _loss_of(source: TracedModel | SequentialModel, loss_fn: LossFn | None, precision: Precision) -> Loss:
    """Return the loss of the last stage: the user's loss_fn, or the loss that the model returns."""
    if loss_fn is None:
        return _own_loss
    if isinstance(source, SequentialModel):
        return _UserLoss(loss_fn, _Returned(None), precision)
    evaluated = None if source.eval is None else _Returned.of(source.eval)
    return _UserLoss(loss_fn, _Returned.of(source.train), precision, evaluated)


def _refuse_rounded(model: nn.Module, source: TracedModel | SequentialModel, precision: Precision) -> None:
    """Raise CaptureError if forward updates a float buffer that ``precision`` would round to 16 bits."""
    if not precision.leaves:
        return
    changing = _changed_by(source)
    wrong = sorted(name for name, x in buffers_of(model).items() if name in changing and x.is_floating_point())
    if wrong:
        raise CaptureError(
            f"precision={precision.name!r} would keep {wrong[0]!r} in {precision.leaves}, too coarse for the "
            "small changes that every forward makes to it. Take precision='bf16-autocast', or a norm without "
            "statistics (GroupNorm, LayerNorm)."
        )


def _changed_by(source: TracedModel | SequentialModel) -> frozenset[str]:
    """Return the names of the buffers that a training forward changes, according to the graph or a run of the model."""
    if isinstance(source, TracedModel):
        return frozenset(source.train.traced.buffers[node] for node in source.train.changing_buffers)
    return frozenset(name for child in source.train for name in child.changes)


class _Example(NamedTuple):
    """Example micro-batch, divided into arguments of the model and targets of the loss_fn.

    Attributes:
        inputs: arguments of the model, in the run's precision.
        targets: names of the columns that the loss_fn takes; empty without a loss_fn.
        shapes: shape and dtype of every column, by name.
    """

    inputs: Inputs
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
        """Split an example into inputs and targets, and convert the inputs to ``precision``.

        With a loss_fn the last column is the target; without one all columns are inputs.
        """
        tensors = tuple(example.values() if isinstance(example, Mapping) else example)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in zip(columns, tensors, strict=True)}
        if isinstance(example, Mapping):
            read = dict(zip(example, converted(tensors, precision), strict=True))
            return cls(Inputs((), read, tuple(columns)), (), shapes)
        if loss_fn is None:
            return cls(Inputs(tuple(converted(tensors, precision)), {}, tuple(columns)), (), shapes)
        inputs = Inputs(tuple(converted(tensors[:-1], precision)), {}, tuple(columns[:-1]))
        return cls(inputs, tuple(columns[-1:]), shapes)

    @property
    def samples(self) -> int:
        return min((len(t) for t in self.inputs.tensors if t.dim()), default=1)


def _children_captured(model: nn.Sequential, inputs: Inputs, *, evaluates: bool) -> SequentialModel:
    """Capture the children of an nn.Sequential as modules: stages call the children, and nothing is traced."""
    try:
        train, evaluation = sequential_children(model, inputs.args[0])
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise untraceable(model, inputs, error) from None
    return SequentialModel(tuple(train), tuple(evaluation) if evaluates else None, inputs.columns[0])


def _traced(
    model: nn.Module, taken: _Example, kept: Sequence[Any], *, returns_loss: bool, evaluates: bool, parts: bool,
    progress: Callable[[str], None],
) -> tuple[TracedModel, LossTerms | None]:  # fmt: skip
    """Trace the model with torch.export in training mode, and in evaluation mode if anything is evaluated.

    Args:
        kept: keys of the outputs that metrics read, which a model with its own loss returns after the loss.
        returns_loss: True if the model returns its own loss.
        evaluates, parts, progress: see ``capture``.

    Returns:
        (graphs of both modes, terms of the loss); the terms are None unless the model returns its own loss.
    """
    if taken.samples < 2:
        raise CaptureError("Tracing needs an example of at least two samples; raise the micro-batch size to 2.")
    run = partial(trace, model, taken.inputs, returns_loss=returns_loss, progress=progress)
    # A caller that passes meta tensors wants the whole capture on the meta device.
    with nullcontext() if any(tensor.is_meta for tensor in taken.inputs.tensors) else stand_ins(model):
        modes = None
        with suppress(OneSizeError):
            modes = _both_modes(run, kept, evaluates=evaluates)
        if modes is None:  # outside of an except block, whose error would be taken for the cause of the next one
            modes = _both_modes(partial(run, one_size=True), kept, evaluates=evaluates)
        training, evaluated = modes
        terms = _weighable_terms(model, training, evaluated, parts=parts) if returns_loss else None
    return TracedModel(analyse(training), None if evaluated is None else analyse(evaluated)), terms


def _both_modes(run: Callable[..., Traced], kept: Sequence[Any], *, evaluates: bool) -> tuple[Traced, Traced | None]:
    """Trace a model in training mode and, if ``evaluates`` is True, in evaluation mode.

    Args:
        run: ``trace`` with the model and the example bound.
        kept: keys of the outputs that metrics read; the evaluation graph returns them after the loss.

    Returns:
        (training graph, evaluation graph); the latter is None if nothing is evaluated.
    """
    training = run(training=True)
    if not evaluates:
        return training, None
    with evaluating():  # a forward may check torch.is_grad_enabled()
        return training, run(training=False, fixed=training.fixed, kept=kept)


def _refuse_loss_fn(loss_fn: LossFn | None, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]) -> None:
    if loss_fn is not None and not isinstance(example, Sequence):
        raise CaptureError(
            "A batch of named columns becomes keyword arguments of a model that returns its own loss; with a loss_fn, "
            "give tuples (input, ..., target) instead."
        )
    learned = next((name for name, _ in loss_fn.named_parameters()), "") if isinstance(loss_fn, nn.Module) else ""
    if learned:
        kind = type(loss_fn).__name__
        raise CaptureError(
            f"loss_fn, {kind}, has parameters of its own ({learned!r}), and stages train those of the model. Put it "
            f"into the model and leave loss_fn out: self.loss = {kind}(...) in its __init__, and a forward that takes "
            "the target too and returns self.loss(output, target)."
        )


def _recipe_of(traced: TracedModel, samples: int, held: Mapping[str, int], title: str) -> TracedRecipe:
    """Convert the graphs of both modes to lines of source.

    For ``samples`` and ``held`` see ``model_graph``; ``title`` is the name of the model's class.
    """
    train = lines_of(traced.train)
    if traced.eval is None:
        return TracedRecipe(train, None, (), (), title)
    seen = model_graph(traced.eval, samples, held)
    return TracedRecipe(train, lines_of(traced.eval), seen.together, tuple(n.cut_bytes for n in seen.nodes), title)


def giving(program: StageProgram, take: Callable[..., torch.Tensor]) -> StageProgram:
    """Copy the last stage's program with another loss: ``take(output)`` in place of ``loss_fn(output, target)``."""
    assert isinstance(program.loss, _UserLoss), "a model that returns its own loss has no output"
    return replace(program, loss=replace(program.loss, loss_fn=take), targets=())


def _weighable_terms(model: nn.Module, training: Traced, evaluating: Traced | None, *, parts: bool) -> LossTerms | None:
    """Find the terms of the model's own loss, and what each of them averages over, such as samples or labels.

    If the terms need separate weights and ``parts`` is True, both graphs are changed in place: they return the terms
    one by one. If the two graphs do not have the same terms, both still return the sum.

    Args:
        training, evaluating: graphs in both modes; ``evaluating`` is None if nothing is evaluated.
    """
    tensors = {**dict(model.named_parameters()), **buffers_of(model)}
    terms = loss_terms(training, set(training.columns), tensors)
    if terms is None or not terms.parts:
        return terms
    if not parts:
        return terms.summed()
    if evaluating is not None:
        same = loss_terms(evaluating, set(evaluating.columns), tensors)
        if same is None or [count for _, count in same.parts] != [count for _, count in terms.parts]:
            return terms.summed()
        return_parts(evaluating, same)
    return_parts(training, terms)
    return terms
