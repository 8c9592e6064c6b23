"""From the user's nn.Module to stages that are functions.

    nn.Module --trace--> flat graph --analyse--> nodes, sites, what can be rebuilt --slice--> StagePrograms
    nn.Sequential -----> children as they are -----------------------------------^

The model itself is only read. Training and evaluation graphs come from one capture: training is cut by
position, and evaluation follows the parameters, so both modes find the same tensors in the same stage.

What the model omits: control flow that depends on data, but for torch.cond (the error quotes the line), attributes
of the model that forward changes other than buffers, autocast regions inside forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raypipe.engine.capture.analyse import Analysis, analyse
from raypipe.engine.capture.cut import (
    assign_by_anchors,
    assign_by_owner,
    assign_by_position,
    check_order,
    slice_stages,
)
from raypipe.engine.capture.explain import untraceable
from raypipe.engine.capture.loss_terms import LossTerms, loss_terms, return_parts
from raypipe.engine.capture.sequential import (
    Child,
    is_plain_sequential,
    sequential_children,
    sequential_graph,
    sequential_stages,
)
from raypipe.engine.capture.trace import trace
from raypipe.engine.capture.traced import Traced
from raypipe.engine.capture.view import model_graph
from raypipe.engine.stage import StageFunction, StageProgram
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph

__all__ = ["Capture", "SequentialModel", "TracedModel", "capture", "giving"]

LossFn = Callable[[Any, Any], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _UserLoss:
    """The user's loss on the structure that the model returns."""

    loss_fn: LossFn
    out_spec: pytree.TreeSpec | None
    fixed: tuple[tuple[int, Any], ...] = ()  # leaves that are no tensors: position, value

    def __call__(self, outputs: tuple[torch.Tensor, ...], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        leaves: list[Any] = list(outputs)
        for position, value in self.fixed:
            leaves.insert(position, value)
        output = leaves[0] if self.out_spec is None else pytree.tree_unflatten(leaves, self.out_spec)
        return self.loss_fn(output, *targets)


def _own_loss(outputs: Tensors, targets: Sequence[torch.Tensor]) -> torch.Tensor | Tensors:
    """The loss that the model computed, or its parts where they are weighed one by one."""
    return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model that torch.export traced, in both modes where it is evaluated; see analyse.py."""

    train: Analysis
    eval: Analysis | None
    together: tuple[tuple[int, int], ...]
    cut_bytes: tuple[int | None, ...]
    title: str

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """The stages of both modes; evaluation follows what training holds.

        Raises:
            CaptureError: a buffer that changes would be in two stages.
        """
        num_stages, train = len(cuts) + 1, self.train
        stages = assign_by_position(train, cuts, order)
        trains = slice_stages(train, stages, num_stages, f"{self.title} train")
        if self.eval is None:
            return trains, None
        names = {**train.traced.parameters, **{b: train.traced.buffers[b] for b in train.changing_buffers}}
        holders: dict[str, set[int]] = {}
        for node, stage in stages.items():
            for used in node.all_input_nodes:
                if used in names:
                    holders.setdefault(names[used], set()).add(stage)
        held = {name: tuple(sorted(found)) for name, found in holders.items()}
        places = None if order else assign_by_anchors(self.eval, held, self.cut_bytes, num_stages)
        if places is None:
            places = assign_by_owner(self.eval, held, self.together)
        return trains, slice_stages(self.eval, places, num_stages, f"{self.title} eval")


@dataclass(frozen=True, slots=True)
class SequentialModel:
    """The children of an nn.Sequential in both modes, and the data column that the first one reads."""

    train: tuple[Child, ...]
    eval: tuple[Child, ...] | None
    column: Any

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """The stages of both modes; a chain has one order only."""
        evals = None if self.eval is None else sequential_stages(self.eval, cuts, self.column)
        return sequential_stages(self.train, cuts, self.column), evals


@dataclass(frozen=True, slots=True)
class Capture:
    """A model ready to be cut.

    Attributes:
        graph: what the planner sees.
        parameters, buffers: the user's own tensors by canonical name, in the order of the model.
        persistent: names of the buffers that belong to the state_dict.
        model: what the graph was made from; profiling runs it operation by operation.
        columns: shape and dtype of every data column of the example, by name.
        terms: what the loss that a traced model returns averages over; None where there is a loss_fn or no trace.
    """

    graph: ModelGraph
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    model: TracedModel | SequentialModel
    columns: dict[Any, tuple[tuple[int, ...], torch.dtype]]
    _loss: Callable[[Tensors, Sequence[torch.Tensor]], torch.Tensor | Tensors]
    _targets: tuple[str, ...]
    terms: LossTerms | None = None

    @property
    def loss_fn(self) -> LossFn | None:
        """The user's, None where the model returns its own loss."""
        return self._loss.loss_fn if isinstance(self._loss, _UserLoss) else None

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self.parameters.items() if parameter.requires_grad)

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]:
        """The stages when the graph's nodes are cut before each of these positions.

        Args:
            order: positions of the nodes in an order in which every stage is a run (``Partition.order``); empty
                for their own. Within a stage operations keep the order of the model, whatever this one is.

        Raises:
            CaptureError: the cut would part what belongs together, or the order is not one of this graph; names it.
        """
        if order:
            check_order(self.graph, cuts, order)
        trains, found = self.model.functions(cuts, order)
        evals: Sequence[StageFunction | None] = found or [None] * len(trains)
        num_stages = len(trains)
        holders: dict[str, list[int]] = {}
        num_sites: dict[str, int] = {}
        for index, function in enumerate(trains):
            for site in function.sites:
                num_sites[site.parameter] = num_sites.get(site.parameter, 0) + 1
            for name in dict.fromkeys(site.parameter for site in function.sites):
                holders.setdefault(name, []).append(index)
        for name in self.parameters:  # not used in training: held by who evaluates with it, or kept by stage 0
            evaluating = [i for i, f in enumerate(found or ()) if any(site.parameter == name for site in f.sites)]
            holders.setdefault(name, evaluating or [0])
        read = {name for function in (*trains, *(found or ())) for name in function.buffers}
        unread = [name for name in self.buffers if name not in read]  # kept too
        trainable = self.trainable
        first_trainable = min((holders[name][0] for name in trainable if name in num_sites), default=None)
        if first_trainable is None:
            raise CaptureError(
                "No parameter that the model uses requires a gradient, so there is nothing to train. "
                "Set requires_grad=True on the parameters that shall move."
            )
        listed = {name: i for i, name in enumerate(self.parameters)}
        programs = []
        for index, (train, evaluation) in enumerate(zip(trains, evals, strict=True)):
            held = tuple(name for name in self.parameters if index in holders[name])
            last = index == num_stages - 1
            of_eval = () if evaluation is None else evaluation.buffers
            buffers = dict.fromkeys((*train.buffers, *of_eval, *(unread if index == 0 else ())))
            programs.append(
                StageProgram(
                    index=index,
                    num_stages=num_stages,
                    train=train,
                    eval=evaluation,
                    parameters=held,
                    buffers=tuple(buffers),
                    trainable=trainable & frozenset(held),
                    shared_with={name: tuple(holders[name]) for name in held if len(holders[name]) > 1},
                    num_sites=num_sites,
                    order=listed,
                    loss=self._loss if last else None,
                    targets=self._targets if last else (),
                    first_trainable=first_trainable,
                )
            )
        return tuple(programs)


def capture(model: nn.Module, example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], columns: Sequence[str],
            loss_fn: LossFn | None, *, evaluates: bool = True) -> Capture:  # fmt: skip
    """Turn a model into a graph that can be cut into stages. The model is not changed.

    Args:
        model: on the CPU, in any mode.
        example: one micro-batch of at least two samples: (input, ..., target), or columns by name.
        columns: names of the data columns in the order of the example.
        loss_fn: (output, target) -> scalar, None where the model returns its own loss.
        evaluates: whether anything will be evaluated; without, evaluation's mode is not traced, half of the time.

    Raises:
        CaptureError: names the place that cannot be traced or trained, and what to do.
    """
    _refuse_hooks(model)
    buffers = dict(model.named_buffers())
    persistent = frozenset(model.state_dict().keys()) & buffers.keys()
    if loss_fn is not None and not isinstance(example, Sequence):
        raise CaptureError(
            "A batch of named columns becomes keyword arguments of a model that returns its own loss; with a loss_fn, "
            "give tuples (input, ..., target) instead."
        )
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn has parameters of its own; make it part of the model and let the model return it.")
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    if isinstance(example, Mapping):
        args, kwargs, inputs, targets = (), dict(example), tuple(columns), ()
    elif loss_fn is None:
        args, kwargs, inputs, targets = tuple(example), {}, tuple(columns), ()
    else:
        args, kwargs, inputs, targets = tuple(example[:-1]), {}, tuple(columns[:-1]), tuple(columns[-1:])
    loss = _own_loss if loss_fn is None else _UserLoss(loss_fn, None)
    tensors = example.values() if isinstance(example, Mapping) else example
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in zip((*inputs, *targets), tensors, strict=True)}
    source: TracedModel | SequentialModel
    terms: LossTerms | None = None
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    if isinstance(model, nn.Sequential) and is_plain_sequential(model) and len(args) == 1 and not kwargs:
        try:
            train, evaluation = sequential_children(model, args[0])
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001  (told in one paragraph)
            raise untraceable(model, args, kwargs, inputs, error) from None
        sizes = {name: t.nbytes for name, t in (*model.named_parameters(), *model.named_buffers())}
        graph = sequential_graph(train, sizes, frozen)
        source = SequentialModel(tuple(train), tuple(evaluation) if evaluates else None, inputs[0])
    else:
        samples = min((len(t) for t in (*args, *kwargs.values()) if t.dim()), default=1)
        if samples < 2:
            raise CaptureError("Tracing needs an example of at least two samples; raise the micro-batch size to 2.")
        run = partial(trace, model, args, kwargs, inputs, returns_loss=loss_fn is None)
        training = run(training=True)
        evaluating = run(training=False, one_length=training.one_length) if evaluates else None
        if loss_fn is None:
            terms = _weighable_terms(model, training, evaluating)
        analysed = analyse(training)
        graph = model_graph(analysed, samples, frozen)
        source = TracedModel(analysed, None, (), (), type(model).__name__)
        if evaluating is not None:
            other = analyse(evaluating)
            seen = model_graph(other, samples)
            cut_bytes = tuple(node.cut_bytes for node in seen.nodes)
            source = TracedModel(analysed, other, seen.together, cut_bytes, type(model).__name__)
        if loss_fn is not None:
            loss = _UserLoss(loss_fn, analysed.traced.out_spec, analysed.fixed)
    named = dict(model.named_parameters())
    return Capture(graph, named, buffers, persistent, source, shapes, loss, targets, terms)


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
