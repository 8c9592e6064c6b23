"""The one sink of gradients: an accumulator per use site, summed once before the optimizer's step.

    backward --> add(gradients) --> an accumulator per use site --> sum over sites, in use order --> parameter.grad

Replicas and deferred weight gradients attach here, not in the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raypipe.engine.stage import StageProgram

__all__ = ["GradientSink"]


class GradientSink:
    """Accumulators for the backward, totals for the optimizer; one accumulator per use site that trains."""

    def __init__(self, program: StageProgram, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._program = program
        self._parameters = parameters
        self._sites = program.train.sites
        self._trained_at = [
            position for position, site in enumerate(self._sites) if site.parameter in program.trainable
        ]
        self._sums: list[torch.Tensor | None] = [None] * len(self._sites)
        self._kept: list[torch.Tensor | None] = [None] * len(self._sites)
        self._positions: dict[str, list[int]] = {}
        for position, site in enumerate(self._sites):
            self._positions.setdefault(site.parameter, []).append(position)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one micro-batch's gradients of the ring's ``trained``; the order of calls is the order of the sums.

        The first one is copied into the parameter's own layout, as torch's AccumulateGrad does: it may be a view
        or shared with another leaf, and the norm's bits depend on the layout.
        """
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for position, gradient in zip(self._trained_at, gradients, strict=True):
            if gradient is None:
                continue
            total = self._sums[position]
            if total is None:
                total = self._kept[position]
                if total is None:
                    total = torch.empty_like(self._parameters[self._sites[position].parameter].detach())
                self._sums[position], self._kept[position] = total, None
                copies[0].append(total)
                copies[1].append(gradient)
            else:
                sums[0].append(total)
                sums[1].append(gradient)
        if copies[0]:
            torch._foreach_copy_(*copies)
        if sums[0]:
            torch._foreach_add_(*sums)

    def exported(self, peer: int) -> list[torch.Tensor | None]:
        """Accumulators of the parameters shared with stage ``peer``, for it to add to its own."""
        names = self._shared_names(peer)
        return [self._sums[p] for name in names for p in self._positions.get(name, ())]

    def finish(self, imported: Mapping[int, Sequence[torch.Tensor | None]], peers: Mapping[int, StageProgram]) -> None:
        """Sum over sites into ``parameter.grad``; shared parameters get the same total on every holder.

        Args:
            imported: by stage, what its ``exported`` gave.
            peers: the programs of those stages.
        """
        foreign: dict[tuple[str, int], torch.Tensor | None] = {}
        for stage, tensors in imported.items():
            names = self._shared_names(stage)
            sites = [s for name in names for s in peers[stage].train.sites if s.parameter == name]
            for site, tensor in zip(sites, tensors, strict=True):
                foreign[site.parameter, site.index] = tensor
        for name in self._program.trainable:
            own = {self._sites[p].index: self._sums[p] for p in self._positions.get(name, ())}
            own |= {index: tensor for (parameter, index), tensor in foreign.items() if parameter == name}
            parts = [own[index] for index in sorted(own)]
            used = [part for part in parts if part is not None]
            if len(parts) <= 1:
                total = used[0] if used else None
            else:
                total = used[0].clone() if used else None
                for part in used[1:]:
                    total.add_(part)  # type: ignore[union-attr]
            self._parameters[name].grad = total

    def reset(self) -> None:
        """Forget the sums after the optimizer's step, keeping the memory of those that no link may still be sending."""
        for position, site in enumerate(self._sites):
            if self._sums[position] is not None and site.parameter not in self._program.shared_with:
                self._kept[position] = self._sums[position]
            self._sums[position] = None

    def _shared_names(self, peer: int) -> list[str]:
        shared = self._program.shared_with
        return [
            name
            for name in self._program.parameters
            if name in self._program.trainable and peer in shared.get(name, ())
        ]
