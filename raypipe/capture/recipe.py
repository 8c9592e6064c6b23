"""Recipe from which the programs of all stages are built, for any cuts, without the model.

    Capture (client) --recipe--> ModelRecipe --programs(cuts, order)--> StagePrograms

A recipe is plain data, without parameters, buffers or fx graphs. It pickles, so that the client and the driver can
build the same programs. It holds a model in one of two forms: the lines of source of a graph that torch.export traced
(source_lines.py), or the children of an nn.Sequential (sequential.py). Each form has a training mode and, if anything
is evaluated, an evaluation mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from raypipe.capture.cut import (
    assign_by_anchors,
    assign_by_owner,
    assign_by_position,
    check_order,
    slice_stages,
)
from raypipe.capture.sequential import SequentialModel
from raypipe.capture.source_lines import Lines, ValueKind
from raypipe.engine.stage.stage import Loss, StageFunction, StageProgram
from raypipe.engine.stage.user_metrics import MetricReads
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.precision import FP32, Precision

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class TracedRecipe:
    """A model that torch.export traced.

    Attributes:
        train, eval: lines of source in both modes; ``eval`` is None if nothing is evaluated.
        together: pairs of operations in ``eval`` that must share a stage, as positions in execution order.
        cut_bytes: bytes that cross a cut after each operation in ``eval``; None if no cut is possible there.
        title: name of the model's class.
    """

    train: Lines
    eval: Lines | None
    together: tuple[tuple[int, int], ...]
    cut_bytes: tuple[int | None, ...]
    title: str

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """Build the stage functions for training and for evaluation.

        Evaluation is divided so that each parameter and changing buffer is read in a stage that holds it in training.

        Args:
            cuts: ascending indices into ``order``, at each of which a new stage of training begins.
            order: permutation of the operations of training, as positions in execution order; empty for that order.

        Returns:
            (functions for training, functions for evaluation); the latter are None if nothing is evaluated.

        Raises:
            CaptureError: a buffer that changes would be in two stages, or evaluation needs a tensor in another stage.
        """
        num_stages, train = len(cuts) + 1, self.train
        stages = assign_by_position(train, cuts, order)
        trains = slice_stages(train, stages, num_stages, f"{self.title} train")
        if self.eval is None:
            return trains, None
        held = _holders(train, stages)
        places = None if order else assign_by_anchors(self.eval, held, self.cut_bytes, num_stages)
        if places is None:
            places = assign_by_owner(self.eval, held, self.together)
        return trains, slice_stages(self.eval, places, num_stages, f"{self.title} eval")


def _holders(lines: Lines, stages: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    """Map the names of parameters and changing buffers to the stages that hold them."""
    unchanging = set(lines.of_kind(ValueKind.BUFFER)) - set(lines.changing_buffers)
    names = {number: name for number, name in lines.held_names().items() if number not in unchanging}
    holders: dict[str, set[int]] = {}
    for number, stage in stages.items():
        for used in lines.values[number].inputs:
            if used in names:
                holders.setdefault(names[used], set()).add(stage)
    return {name: tuple(sorted(holding)) for name, holding in holders.items()}


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A model ready to be cut.

    Attributes:
        graph: the model as the planner reads it.
        stages: builds the stage functions.
        sizes: number of elements of every parameter by canonical name, in the order of the model.
        trainable: names of the parameters with requires_grad.
        buffers: names of the buffers.
        loss: function of the last stage's outputs and the targets.
        targets: names of the data columns that the loss reads.
        metric_reads: outputs that metrics read, if the model returns its own loss.
        precision: number format that the stages compute in.
    """

    graph: ModelGraph
    stages: TracedRecipe | SequentialModel
    sizes: Mapping[str, int]
    trainable: frozenset[str]
    buffers: tuple[str, ...]
    loss: Loss
    targets: tuple[str, ...]
    metric_reads: MetricReads = MetricReads()  # noqa: RUF009  (immutable)
    precision: Precision = FP32

    def programs(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[StageProgram, ...]:
        """Build the program of every stage.

        Args:
            cuts: ascending positions in ``order``; a new stage begins at each.
            order: permutation of the graph's nodes (``Partition.order``); empty for the order of the graph. It only
                assigns nodes to stages: within a stage operations keep the order of the model.

        Raises:
            CaptureError: the cuts separate operations that must share a stage, the order is invalid, nothing is
                trainable, or the last stage of a loss-scaled precision has nothing to train.
        """
        if order:
            check_order(self.graph, cuts, order)
        trains, evals = self.stages.functions(cuts, order)
        for function in (*trains, *(evals or ())):
            function.precision = self.precision
        holders = self._holders(trains, evals or ())
        num_sites = Counter(site.parameter for function in trains for site in function.sites)
        shared = partial(
            StageProgram,
            num_stages=len(trains),
            num_sites=dict(num_sites),
            order={name: i for i, name in enumerate(self.sizes)},
            first_trainable=self._first_trainable(holders, num_sites),
            precision=self.precision,
        )
        read = {name for function in (*trains, *(evals or ())) for name in function.buffers}
        unread = tuple(name for name in self.buffers if name not in read)  # kept by stage 0
        programs = []
        for index, train in enumerate(trains):
            evaluation = None if evals is None else evals[index]
            held = tuple(name for name in self.sizes if index in holders[name])
            last = index == len(trains) - 1
            kept = (*train.buffers, *(evaluation.buffers if evaluation else ()), *(() if index else unread))
            programs.append(
                shared(
                    index=index,
                    train=train,
                    eval=evaluation,
                    parameters=held,
                    buffers=tuple(dict.fromkeys(kept)),
                    trainable=self.trainable & frozenset(held),
                    shared_with={name: tuple(holders[name]) for name in held if len(holders[name]) > 1},
                    loss=self.loss if last else None,
                    targets=self.targets if last else (),
                    metric_reads=self.metric_reads if last else MetricReads(),
                )
            )
        if self.precision.scaled and not programs[-1].trainable:
            raise CaptureError(
                f"precision={self.precision.name!r} keeps the loss scale with the optimizer of the last stage, which "
                "has nothing to train here. Move the last cut before a layer that learns, or take precision='bf16'."
            )
        return tuple(programs)

    def _first_trainable(self, holders: Mapping[str, Sequence[int]], used: Container[str]) -> int:
        """Return the index of the first stage that holds a trainable parameter in ``used``.

        Args:
            holders: stages that hold each parameter, by name, ascending.
            used: names of the parameters that a training forward uses.

        Raises:
            CaptureError: no trainable parameter is in ``used``.
        """
        first = min((holders[name][0] for name in self.trainable if name in used), default=None)
        if first is None:
            raise CaptureError(
                "No parameter that the model uses requires a gradient, so there is nothing to train. Set "
                "requires_grad=True on the parameters to be trained."
            )
        return first

    def _holders(self, trains: Sequence[StageFunction], evals: Sequence[StageFunction]) -> dict[str, list[int]]:
        """Map each parameter to the stages that use it in training, else in evaluation, else to stage 0."""
        holders: dict[str, list[int]] = {}
        for index, function in enumerate(trains):
            for name in dict.fromkeys(site.parameter for site in function.sites):
                holders.setdefault(name, []).append(index)
        for name in self.sizes:
            evaluating = [i for i, f in enumerate(evals) if any(site.parameter == name for site in f.sites)]
            holders.setdefault(name, evaluating or [0])
        return holders
