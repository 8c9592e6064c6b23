"""Replicas of a stage that share out the optimizer's state: which elements each steps, and what steps them.

    parameters   |a ......... 3000|b .. 1500|          of every replica, whole
    replica 0    [a 0:2048]                            steps these, and keeps what the optimizer remembers of them
    replica 1              [a 2048:3000] [b 0:1500]

That is stage 1 of ZeRO (Rajbhandari et al., SC'20). The optimizer is made of whole parameters, so that names and shapes
make its groups as ever; then each group gets the slices in their place. They are views: a step changes the parameter.

A parameter that another stage holds too is stepped whole by every replica, for its gradients are summed over stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.norms import BLOCK
from raypipe.engine.placement import Placement
from raypipe.engine.replicas.chunks import chunks_of, flat, once
from raypipe.engine.stage import StageProgram
from raypipe.errors import StageError

__all__ = ["Part", "Slices", "parts_of", "shared_out"]


class Part(NamedTuple):
    """Elements of a parameter, in the order of memory."""

    name: str
    first: int
    stop: int


def shared_out(program: StageProgram, parameters: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """By place among the use sites that train, the name of the parameter, where replicas share out its state."""
    names = [site.parameter for site in program.train.sites if site.parameter in program.trainable]
    return {
        place: name
        for place, name in enumerate(names)
        if name not in program.shared_with and parameters[name].dim() and parameters[name].is_contiguous()
    }


def parts_of(
    program: StageProgram, parameters: Mapping[str, torch.Tensor], placement: Placement
) -> dict[int, list[Part]]:
    """By replica, what it steps, in the order of chunks."""
    trained = [parameters[x.parameter].detach() for x in program.train.sites if x.parameter in program.trainable]
    names = shared_out(program, parameters)
    chunks = once(chunks_of(trained, placement, names), names)
    return {
        worker: [Part(names[site], *ends) for chunk in chunks for site, *ends in chunk.pieces_of(worker)]
        for worker in placement.replicas
    }


class Slices:
    """What one replica steps of a stage.

    Attributes:
        parts: of all replicas, in their order.
        replica: this one.
        groups: names of the parameters of each of the optimizer's groups, those of other replicas included.
    """

    def __init__(
        self, parts: Sequence[Sequence[Part]], replica: int, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.parts, self.replica = [list(of_one) for of_one in parts], replica
        self.names = frozenset(part.name for of_one in parts for part in of_one)
        self.groups: list[tuple[str, ...]] = []
        self._parameters = parameters
        self.held = {part: torch.nn.Parameter(self._view(part)) for part in self.parts[replica]}
        """By part, what the optimizer steps."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer, as it was made of whole parameters, step this replica's parts."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_name: dict[str, list[tuple[Part, torch.nn.Parameter]]] = {}
        for part, parameter in self.held.items():
            by_name.setdefault(part.name, []).append((part, parameter))
        known = names | {id(parameter): part.name for part, parameter in self.held.items()}
        self.groups = [tuple(names[id(x)] for x in group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            stepped = []
            for whole in group["params"]:
                name = names[id(whole)]
                if name not in self.names:
                    stepped.append(whole)
                    continue
                begun = optimizer.state.pop(whole, None)
                for part, parameter in by_name.get(name, ()):
                    stepped.append(parameter)
                    if begun:
                        optimizer.state[parameter] = {key: sliced(x, whole, part) for key, x in begun.items()}
            group["params"] = stepped
            if "param_names" in group:
                group["param_names"] = [known[id(x)] for x in stepped]

    def part_of(self) -> dict[int, Part]:
        """By id of what the optimizer steps."""
        return {id(parameter): part for part, parameter in self.held.items()}

    def take_gradients(self) -> None:
        """Of the whole parameters, which hold the totals of this replica's parts."""
        for part, parameter in self.held.items():
            whole = self._parameters[part.name].grad
            parameter.grad = None if whole is None else flat(whole)[part.first : part.stop]

    def gradients(self) -> list[torch.Tensor]:
        """Of all parts that have one."""
        return [x.grad for x in self.held.values() if x.grad is not None]

    def follow(self) -> None:
        """After a step: an optimizer that assigned ``parameter.data`` has left the memory of the whole parameter."""
        for part, parameter in self.held.items():
            view = self._view(part)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def blocks(self, norms: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Norms of the blocks of every parameter that has a gradient, in their order.

        Args:
            norms: of all replicas, in their order: of each the blocks of its ``parts`` that have a gradient.
        """
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for parts, told in zip(self.parts, norms, strict=True):
            known = [part for part in parts if self._parameters[part.name].grad is not None]
            counts = [-(-(part.stop - part.first) // BLOCK) for part in known]
            assert told is not None, "every replica tells its norms"
            for part, of_part in zip(known, told.split(counts), strict=True):
                like = self._parameters[part.name]
                found.setdefault(part.name, []).append((part.first, of_part.to(like.device, like.dtype)))
        order = {name: sorted(of_name, key=lambda pair: pair[0]) for name, of_name in found.items()}
        return {name: torch.cat([norms for _, norms in of_name]) for name, of_name in order.items()}

    def _view(self, part: Part) -> torch.Tensor:
        return flat(self._parameters[part.name].data)[part.first : part.stop]


def sliced(value: Any, whole: torch.Tensor, part: Part) -> Any:
    """What an optimizer keeps for a parameter, of a part of it: of tensors of its shape these elements."""
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        made = torch.empty_like(whole, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
        return flat(made)[part.first : part.stop].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def checked(slices: Slices, known: Slices) -> None:
    """Refuse other slices than those whose state is held."""
    if slices.parts != known.parts or slices.replica != known.replica:
        raise StageError(
            "shard_optimizer=True: a replica is to step other slices than those whose optimizer state it holds. Start "
            "the run again, which reads its state from a checkpoint."
        )
