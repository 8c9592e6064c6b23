"""The one sink of gradients: an accumulator per use site, summed once before the optimizer's step.

    backward --> add(gradients) --> an accumulator per use site --> sum over sites, in use order --> parameter.grad
        |-- a large one, as soon as it is known --^

A backward returns its gradients all at once, which would hold another copy of the weights beside the accumulators. So
a large parameter's gradient is added by a hook on its leaf and given back before the next one is computed; for small
ones, one call that adds them all is quicker.

With several lanes there is such a set of accumulators for each. Every micro-batch has its lane, whoever works on it,
and lanes are summed in their order: the same bits for any number of replicas (``all_reduce`` has what they exchange).
With one lane the order is that of the micro-batches, as in plain PyTorch.

    micro-batches 0 2 4 --> lane 0 --+
    micro-batches 1 3 5 --> lane 1 --+--> sum over sites --> parameter.grad

Where every lane has one micro-batch of an update, and all lanes are here, their sum in the order of lanes is that of
the micro-batches as they come: one set of accumulators will do, as for the last stage of 15-1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from raypipe.engine.stage import Site, StageProgram
from raypipe.ir.schedule import in_lane_order, lane_of

__all__ = ["EARLY_BYTES", "LARGE_BYTES", "Accumulators", "GradientSink"]

Accumulators = dict[Site, torch.Tensor | None]
"""By use site, over one update."""

LARGE_BYTES = 1 << 20
"""From here on adding a gradient takes so long that a hook's 5 us do not show."""
EARLY_BYTES = 1 << 16
"""The same where replicas wait for it: what is complete early is exchanged beside the rest of the backward."""


class GradientSink:
    """Accumulators for the backward, totals for the optimizer; one accumulator per use site that trains, and lane.

    Args:
        lanes: into which gradients are summed.
        exchanged: replicas wait for gradients, so that smaller ones are added as soon as they are known.
        apart: sums of lanes are wanted one by one: they are rounded, or an update may join the next one.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, torch.nn.Parameter],
        lanes: int = 1,
        *,
        exchanged: bool = False,
        apart: bool = False,
    ) -> None:
        self._program = program
        self._parameters = parameters
        self._sites = program.train.sites
        self._trained_at = [
            position for position, site in enumerate(self._sites) if site.parameter in program.trainable
        ]
        self._sums_of_lanes: list[list[torch.Tensor | None]] = [[None] * len(self._sites) for _ in range(lanes)]
        self._kept: list[list[torch.Tensor]] = [[] for _ in self._sites]  # memory that any lane may use again
        self.use_lane(0)
        self._at_once = not (exchanged or apart)
        self._large_bytes = EARLY_BYTES if exchanged else LARGE_BYTES
        self._told: Callable[[int], None] | None = None
        self._number = {position: number for number, position in enumerate(self._trained_at)}
        self._early: set[int] = set()
        self._positions: dict[str, list[int]] = {}
        for position, site in enumerate(self._sites):
            self._positions.setdefault(site.parameter, []).append(position)
        # Used once and held here alone, as most are: the sum of its one site is its gradient.
        self._alone = [
            (parameters[name], self._positions[name][0])
            for name in program.trainable
            if len(self._positions.get(name, ())) == 1 and name not in program.shared_with
        ]
        self._shared = program.trainable - {self._sites[position].parameter for _, position in self._alone}

    def use_lane(self, lane: int) -> None:
        """What is added from now on belongs to this lane; 0 at first, and after ``close``."""
        self._sums = self._sums_of_lanes[lane]

    def enter(self, microbatch: int, interval: int) -> None:
        """What is added from now on is of this micro-batch, and micro-batches come in their order.

        Args:
            microbatch: counted as in ``lane_of``.
            interval: micro-batches per update.
        """
        lanes = len(self._sums_of_lanes)
        at_once = self._at_once and in_lane_order(microbatch, interval, lanes)
        self.use_lane(0 if at_once else lane_of(microbatch, interval, lanes))

    def watch(self, position: int, leaf: torch.Tensor) -> None:
        """Add the gradients of this leaf as soon as they are known, if they are large.

        Args:
            position: of its use site.
        """
        # By what is summed: leaves may be of 16 bits.
        if leaf.requires_grad and self._parameters[self._sites[position].parameter].nbytes >= self._large_bytes:
            # What stands in for a gradient that was taken: its shape, without its memory.
            nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
            leaf.register_hook(partial(self._take, position, nothing))

    def tell(self, told: Callable[[int], None] | None) -> None:
        """From now on have this called with the place among ``trained`` of what a hook has added; None calls nobody."""
        self._told = told

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one micro-batch's gradients of the ring's ``trained``; the order of calls is the order of the sums.

        The first one is copied into the parameter's own layout, as torch's AccumulateGrad does: it may be a view
        or shared with another leaf, and the norm's bits depend on the layout.
        """
        totals = [self._sums[position] for position in self._trained_at]
        if totals and not self._early and all(x is not None for x in (*totals, *gradients)):
            torch._foreach_add_(totals, gradients)  # type: ignore[arg-type]
            return  # nothing is new, and no hook has taken anything
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for position, gradient in zip(self._trained_at, gradients, strict=True):
            if gradient is None or position in self._early:
                continue
            total, is_new = self._total(position)
            into, what = copies if is_new else sums
            into.append(total)
            what.append(gradient)
        self._early.clear()
        if copies[0]:
            torch._foreach_copy_(*copies)
        if sums[0]:
            torch._foreach_add_(*sums)

    def _take(self, position: int, nothing: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The hook of a large leaf."""
        total, is_new = self._total(position)
        if is_new:
            total.copy_(gradient)
        else:
            total.add_(gradient)
        self._early.add(position)
        if self._told is not None:
            self._told(self._number[position])
        return nothing

    def _total(self, position: int) -> tuple[torch.Tensor, bool]:
        """The accumulator of a site, and whether nothing was added to it yet."""
        total = self._sums[position]
        if total is not None:
            return total, False
        total = self._sums[position] = self._free(position)
        return total, True

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters whose use sites train, one for each site."""
        return [self._parameters[self._sites[position].parameter].detach() for position in self._trained_at]

    def close(self) -> None:
        """No more gradients come for this update: sum the lanes in their order."""
        self.use_lane(0)
        for position in self._trained_at if len(self._sums_of_lanes) > 1 else ():
            parts = [sums[position] for sums in self._sums_of_lanes]
            used = [part for part in parts if part is not None]
            for part in used[1:]:
                used[0].add_(part)
            total = used[0] if used else None
            self._keep_lanes(position, total)
            self._sums[position] = total

    def sums_of(self, lane: int, sites: Sequence[int]) -> list[torch.Tensor | None]:
        """The accumulators of a lane for these places among ``trained``; None where nothing was added."""
        return [self._sums_of_lanes[lane][self._trained_at[site]] for site in sites]

    def total_of(self, site: int, *, reached: bool) -> torch.Tensor | None:
        """Where the sum of a site over all lanes is to go, those of other replicas included, before ``close_with``.

        Its memory is that of the first lane with sums of it here: what is written there overwrites them.

        Args:
            site: place among ``trained``.
            reached: whether any lane anywhere has something for it; None is given if not.
        """
        position = self._trained_at[site]
        found = next((x for sums in self._sums_of_lanes if (x := sums[position]) is not None), None)
        return self._free(position) if reached and found is None else found

    def close_with(self, totals: Sequence[torch.Tensor | None]) -> None:
        """No more gradients come for this update: these are the sums over all lanes.

        Args:
            totals: for each of ``trained``, what ``total_of`` gave, filled.
        """
        self.use_lane(0)
        for position, total in zip(self._trained_at, totals, strict=True):
            self._keep_lanes(position, total)
            self._sums[position] = total

    def _keep_lanes(self, position: int, total: torch.Tensor | None) -> None:
        """Forget the lanes' sums of a site, but keep their memory unless the total lies there."""
        for sums in self._sums_of_lanes:
            if (x := sums[position]) is not None and x is not total:
                self._kept[position].append(x)
            sums[position] = None

    def _free(self, position: int) -> torch.Tensor:
        """Memory for the sums of a site."""
        if kept := self._kept[position]:
            return kept.pop()
        return torch.empty_like(self._parameters[self._sites[position].parameter].detach())

    def exported(self, stages: Collection[int]) -> list[torch.Tensor | None]:
        """Sums of what is shared with any of these stages, as ``StageProgram.shared_sites`` reads them.

        They are complete after ``close``.
        """
        return [self._sums[p] for name in self._program.shared_names(stages) for p in self._positions.get(name, ())]

    def finish(self, imported: Iterable[Accumulators]) -> None:
        """Sum over sites into ``parameter.grad``; shared parameters get the same total on every holder.

        Args:
            imported: of other stages, what their ``exported`` gave.
        """
        foreign: Accumulators = {}
        for sites in imported:
            foreign |= sites
        for parameter, position in self._alone:
            parameter.grad = self._sums[position]
        for name in self._shared:
            own = {self._sites[p].index: self._sums[p] for p in self._positions.get(name, ())}
            own |= {site.index: tensor for site, tensor in foreign.items() if site.parameter == name}
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
            total = self._sums[position]
            if total is not None and site.parameter not in self._program.shared_with:
                self._kept[position].append(total)
            self._sums[position] = None
