"""How to make stages of a captured model, as data: no tensor of the user's, no fx. It pickles and can be cut anywhere.

    Capture (client) --recipe--> ModelRecipe --programs(cuts, order)--> StagePrograms
                                 in the client, in the driver, in threads: the same ones

Both forms of a model cut in both modes: lines of source of what torch.export traced (lines.py), and the children of an
nn.Sequential (sequential.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from raypipe.engine.capture.cut import (
    assign_by_anchors,
    assign_by_owner,
    assign_by_position,
    check_order,
    slice_stages,
)
from raypipe.engine.capture.lines import Kind, Lines
from raypipe.engine.meter import Asked
from raypipe.engine.stage import Loss, StageFunction, StageProgram
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.precision import FP32, Precision

__all__ = ["ModelRecipe", "StagesOf", "TracedRecipe"]

Tensors = tuple[torch.Tensor, ...]


class StagesOf(Protocol):
    """What makes the functions of stages: TracedRecipe, or SequentialModel."""

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """The stages of both modes; None where nothing is evaluated."""


@dataclass(frozen=True, slots=True)
class TracedRecipe:
    """A model that torch.export traced.

    Attributes:
        eval: evaluation's mode, None where nothing is evaluated.
        together, cut_bytes: of evaluation's graph, as in ModelGraph.
        title: the model's class.
    """

    train: Lines
    eval: Lines | None
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
        held = _holders(train, stages)
        places = None if order else assign_by_anchors(self.eval, held, self.cut_bytes, num_stages)
        if places is None:
            places = assign_by_owner(self.eval, held, self.together)
        return trains, slice_stages(self.eval, places, num_stages, f"{self.title} eval")


def _holders(lines: Lines, stages: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    """By name, the stages that hold a parameter or a changing buffer."""
    unchanging = set(lines.of_kind(Kind.BUFFER)) - set(lines.changing_buffers)
    names = {number: name for number, name in lines.held_names().items() if number not in unchanging}
    found: dict[str, set[int]] = {}
    for number, stage in stages.items():
        for used in lines.values[number].inputs:
            if used in names:
                found.setdefault(names[used], set()).add(stage)
    return {name: tuple(sorted(holding)) for name, holding in found.items()}


class _Shared(NamedTuple):
    """What is the same in the programs of all stages; see StageProgram."""

    num_stages: int
    num_sites: dict[str, int]
    order: dict[str, int]
    first_trainable: int
    precision: Precision


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A model ready to be cut.

    Attributes:
        graph: what the planner sees.
        stages: makes their functions.
        sizes: elements of every parameter by canonical name, in the order of the model.
        trainable: names of the parameters with requires_grad.
        buffers: names of the buffers.
        loss: of the last stage's outputs and the targets.
        targets: columns that the loss reads.
        asked: what metrics read of a model that returns its own loss.
        precision: of what the stages compute.
    """

    graph: ModelGraph
    stages: StagesOf
    sizes: Mapping[str, int]
    trainable: frozenset[str]
    buffers: tuple[str, ...]
    loss: Loss
    targets: tuple[str, ...]
    asked: Asked = Asked()  # noqa: RUF009  (immutable)
    precision: Precision = FP32

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
        trains, evals = self.stages.functions(cuts, order)
        for function in (*trains, *(evals or ())):
            function.precision = self.precision
        holders = self._holders(trains, evals or ())
        num_sites = Counter(site.parameter for function in trains for site in function.sites)
        shared = _Shared(
            num_stages=len(trains),
            num_sites=dict(num_sites),
            order={name: i for i, name in enumerate(self.sizes)},
            first_trainable=self._first_trainable(holders, num_sites),
            precision=self.precision,
        )
        read = {name for function in (*trains, *(evals or ())) for name in function.buffers}
        unread = [name for name in self.buffers if name not in read]  # kept by stage 0
        programs = tuple(
            self._program(
                shared, index, train, None if evals is None else evals[index], holders, () if index else unread
            )
            for index, train in enumerate(trains)
        )
        if self.precision.scaled and not programs[-1].trainable:
            raise CaptureError(
                f"precision={self.precision.name!r} keeps the loss scale with the optimizer of the last stage, which "
                "has nothing to train here. Move the last cut before a layer that learns, or take precision='bf16'."
            )
        return programs

    def _first_trainable(self, holders: Mapping[str, Sequence[int]], used: Container[str]) -> int:
        """The lowest stage with a parameter that learns."""
        found = min((holders[name][0] for name in self.trainable if name in used), default=None)
        if found is None:
            raise CaptureError(
                "No parameter that the model uses requires a gradient, so there is nothing to train. "
                "Set requires_grad=True on the parameters that shall move."
            )
        return found

    def _program(
        self,
        shared: _Shared,
        index: int,
        train: StageFunction,
        evaluation: StageFunction | None,
        holders: Mapping[str, Sequence[int]],
        unread: Sequence[str],
    ) -> StageProgram:
        """One stage.

        Args:
            unread: buffers that no stage reads, and this one keeps.
        """
        held = tuple(name for name in self.sizes if index in holders[name])
        last = index == shared.num_stages - 1
        of_eval = () if evaluation is None else evaluation.buffers
        return StageProgram(
            index=index,
            train=train,
            eval=evaluation,
            parameters=held,
            buffers=tuple(dict.fromkeys((*train.buffers, *of_eval, *unread))),
            trainable=self.trainable & frozenset(held),
            shared_with={name: tuple(holders[name]) for name in held if len(holders[name]) > 1},
            loss=self.loss if last else None,
            targets=self.targets if last else (),
            asked=self.asked if last else Asked(),
            **shared._asdict(),
        )

    def _holders(self, trains: Sequence[StageFunction], evals: Sequence[StageFunction]) -> dict[str, list[int]]:
        """Stages that hold each parameter: those that train with it, else those that evaluate with it, else stage 0."""
        found: dict[str, list[int]] = {}
        for index, function in enumerate(trains):
            for name in dict.fromkeys(site.parameter for site in function.sites):
                found.setdefault(name, []).append(index)
        for name in self.sizes:
            evaluating = [i for i, f in enumerate(evals) if any(site.parameter == name for site in f.sites)]
            found.setdefault(name, evaluating or [0])
        return found
