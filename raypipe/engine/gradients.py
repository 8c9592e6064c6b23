"""The one sink of gradients: an accumulator per use site, summed once before the optimizer's step.

    backward --> leaf.grad of every use site --> sum over sites, in use order --> parameter.grad

autograd adds a micro-batch's gradient to its leaf's, in the order of the backwards and in the parameter's own
layout, exactly as it does for a plain parameter.
Replicas, weight versions and deferred weight gradients attach here, not in the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raypipe.engine.stage import StageProgram

__all__ = ["GradientSink"]


class GradientSink:
    """Leaves for the forward, accumulators for the backward, totals for the optimizer.

    Attributes:
        leaves: one tensor per use site, in the order of ``program.train.sites``; each shares its parameter's
            memory and is a leaf of its own, so that autograd tells the sites apart. Their ``grad`` are the
            accumulators.
    """

    def __init__(self, program: StageProgram, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._program = program
        self._parameters = parameters
        self._sites = program.train.sites
        self.leaves = [
            parameters[site.parameter].detach().requires_grad_(site.parameter in program.trainable)
            for site in self._sites
        ]
        self._positions: dict[str, list[int]] = {}
        for position, site in enumerate(self._sites):
            self._positions.setdefault(site.parameter, []).append(position)

    def exported(self, peer: int) -> list[torch.Tensor | None]:
        """Accumulators of the parameters shared with stage ``peer``, for it to add to its own."""
        names = self._shared_names(peer)
        return [self.leaves[p].grad for name in names for p in self._positions[name]]

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
            own = {self._sites[p].index: self.leaves[p].grad for p in self._positions.get(name, ())}
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
        """Forget the sums after the optimizer's step; a link may still be sending some of them."""
        for leaf in self.leaves:
            leaf.grad = None

    def _shared_names(self, peer: int) -> list[str]:
        shared = self._program.shared_with
        return [
            name
            for name in self._program.parameters
            if name in self._program.trainable and peer in shared.get(name, ())
        ]
