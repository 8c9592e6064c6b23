"""Gradient accumulation: one accumulator per use of a parameter (site), summed once before the optimizer's step.

    backward --> add(gradients) --> an accumulator per site --> sum over sites, in execution order --> parameter.grad
        |-- a large one, as soon as it is known --^

A backward returns its gradients all at once, which would hold another copy of the weights besides the accumulators. So
a large parameter's gradient is added by a hook on its leaf and freed before the next one is computed; for small ones,
one call that adds them all is faster.

A lane is a partial sum of gradients, with its own accumulators. Micro-batches are assigned to the lanes round-robin.
Lanes are summed in their order, so results are bitwise equal for any number of replicas (``all_reduce`` has the
exchange). With one lane the order is that of the micro-batches, as in plain PyTorch.

    micro-batches 0 2 4 --> lane 0 --+
    micro-batches 1 3 5 --> lane 1 --+--> sum over sites --> parameter.grad

If every lane has one micro-batch of an update, and this worker has all lanes, the sum in the order of lanes is the sum
in the order of micro-batches. One set of accumulators is then enough, as for the last stage of a 15-1 pipeline (15
replicas of stage 0, and one worker for stage 1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from raypipe.engine.stage.stage import Site, StageProgram
from raypipe.ir.schedule import in_lane_order, lane_of

Accumulators = dict[Site, torch.Tensor | None]
"""Gradient sums of one update, by site (use of a parameter); None for a site without a gradient."""

LARGE_BYTES = 1 << 20
"""Bytes of the smallest gradient that a hook adds; the 5 us of a hook are short compared with this addition."""
LARGE_ON_DEVICE_BYTES = 32 << 20
"""LARGE_BYTES on a device, where a hook and a kernel for each gradient only save memory; smaller ones share kernels."""
EARLY_BYTES = 1 << 16
"""LARGE_BYTES for stages with replicas, where gradients are exchanged in parallel with the backward."""


class GradientSink:
    """Gradient sums of one stage: an accumulator per lane and use of a trained parameter; totals for the optimizer.

    Attributes:
        program: program of the stage.
        lanes: number of gradient-accumulation lanes.

    Args:
        exchanged: True if replicas exchange gradients, so that hooks add smaller gradients too (EARLY_BYTES).
        on_device: True if kernels run apart from the host, so that hooks add larger ones only (LARGE_ON_DEVICE_BYTES).
        apart: True if lanes must not share accumulators, because their sums are rounded or an update may be deferred.
        fixed: True if each sum keeps its address, because graphs of the device add to it; with one lane only.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, torch.nn.Parameter],
        lanes: int = 1,
        *,
        exchanged: bool = False,
        on_device: bool = False,
        apart: bool = False,
        fixed: bool = False,
    ) -> None:
        self.program, self.lanes, self._fixed = program, lanes, fixed
        self._parameters = parameters
        self._sites = program.train.sites
        self._trained_at = [
            position for position, site in enumerate(self._sites) if site.parameter in program.trainable
        ]
        self._sums_of_lanes: list[list[torch.Tensor | None]] = [[None] * len(self._sites) for _ in range(lanes)]
        self._kept: list[list[torch.Tensor]] = [[] for _ in self._sites]  # memory that any lane may reuse
        self.use_lane(0)
        self._at_once = not (exchanged or apart)
        self._large_bytes = EARLY_BYTES if exchanged else LARGE_ON_DEVICE_BYTES if on_device else LARGE_BYTES
        self._observer: Callable[[int], None] | None = None
        self._number = {position: number for number, position in enumerate(self._trained_at)}
        self._early: set[int] = set()
        self._positions: dict[str, list[int]] = {}
        for position, site in enumerate(self._sites):
            self._positions.setdefault(site.parameter, []).append(position)
        # Most parameters are used once and held by one stage: the sum of the one site is the gradient.
        self._alone = [
            (parameters[name], self._positions[name][0])
            for name in program.trainable
            if len(self._positions.get(name, ())) == 1 and name not in program.shared_with
        ]
        self._shared = program.trainable - {self._sites[position].parameter for _, position in self._alone}

    def use_lane(self, lane: int) -> None:
        """Select the lane to which the following gradients are added: lane 0 at first, and again after ``close``."""
        self._sums = self._sums_of_lanes[lane]

    def enter(self, microbatch: int, interval: int) -> None:
        """Select the lane of a micro-batch for the following gradients.

        Args:
            microbatch: number counted from the first micro-batch of the segment; must increase from call to call.
            interval: number of micro-batches in an update.
        """
        at_once = self._at_once and in_lane_order(microbatch, interval, self.lanes)
        self.use_lane(0 if at_once else lane_of(microbatch, interval, self.lanes))

    def watch(self, position: int, leaf: torch.Tensor) -> None:
        """Register a hook that adds each gradient of the leaf once it is computed; small leaves get no hook.

        ``position``, here and in private methods, is the index of the parameter's use in ``StageFunction.sites``.
        """
        # Size of the sum: leaves may be of 16 bits.
        if leaf.requires_grad and self._parameters[self._sites[position].parameter].nbytes >= self._large_bytes:
            # Replacement for a gradient that the hook has added: its shape, without its memory.
            nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
            leaf.register_hook(partial(self._take, position, nothing))

    def observe(self, observer: Callable[[int], None] | None) -> None:
        """Set the function to call with the index in ``trained`` of each gradient that a hook adds; None removes it."""
        self._observer = observer

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of one micro-batch to the selected lane, in the order of the calls.

        The first gradient of a use is copied into the layout of the parameter, as torch's AccumulateGrad does. The
        gradient may be a view or shared with another leaf, and rounding of the norm depends on the layout.

        Args:
            gradients: one per leaf of ``WeightRing.trained``; None for a leaf without a gradient.
        """
        totals = [self._sums[position] for position in self._trained_at]
        if totals and not self._early and all(x is not None for x in (*totals, *gradients)):
            torch._foreach_add_(totals, gradients)  # type: ignore[arg-type]
            return  # all accumulators exist, and no hook has added a gradient
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

    def _take(
        self, position: int, nothing: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:  # fmt: skip
        """Add a large leaf's gradient, as its hook; return ``nothing`` instead, so that torch frees the gradient.

        The gradient is None if a graph of the device has added it.
        """
        if gradient is None:
            return None
        total, is_new = self._total(position)
        if is_new:
            total.copy_(gradient)
        else:
            total.add_(gradient)
        self._early.add(position)
        if self._observer is not None:
            self._observer(self._number[position])
        return nothing

    def _total(self, position: int) -> tuple[torch.Tensor, bool]:
        """Return (accumulator of a use in the selected lane, True if it is new and its memory uninitialized)."""
        total = self._sums[position]
        if total is not None:
            return total, False
        total = self._sums[position] = self._free(position)
        return total, True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let every sum exist inside the context, where a graph of additions is recorded; restore them afterwards."""
        none: list[torch.Tensor | None] = [None] * len(self._sites)
        before, self._sums = self._sums, none
        for position in self._trained_at:
            self._total(position)
        try:
            yield
        finally:
            self._sums = before

    def open(self, uses: Sequence[int]) -> None:
        """Begin the sums of these uses, given by index in ``trained``, to which a graph is about to add.

        -0.0 is the number to which any other one can be added without a change, -0.0 included.
        """
        new = [total for use in uses for total, is_new in (self._total(self._trained_at[use]),) if is_new]
        if new:
            torch._foreach_zero_(new)
            torch._foreach_neg_(new)

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameter of each use of a trained parameter, in the order of ``StageFunction.sites``; one entry per use."""
        return [self._parameters[self._sites[position].parameter].detach() for position in self._trained_at]

    def close(self) -> None:
        """Sum the lanes of this worker in their order, after the last gradient of an update."""
        self.use_lane(0)
        for position in self._trained_at if self.lanes > 1 else ():
            parts = [sums[position] for sums in self._sums_of_lanes]
            used = [part for part in parts if part is not None]
            for part in used[1:]:
                used[0].add_(part)
            total = used[0] if used else None
            self._keep_lanes(position, total)
            self._sums[position] = total

    def sums_of(self, lane: int, sites: Sequence[int]) -> list[torch.Tensor | None]:
        """Return the accumulators of a lane for these indices in ``trained``; None for a use without a gradient."""
        return [self._sums_of_lanes[lane][self._trained_at[site]] for site in sites]

    def total_of(self, site: int, *, reached: bool) -> torch.Tensor | None:
        """Return the tensor for the sum of a use over the lanes of all replicas; None if no lane has a sum.

        The caller fills the tensor and passes it to ``close_with``. The tensor is the accumulator of the first local
        lane with a sum of the use, if there is one.

        Args:
            site: index of the use in ``trained``.
            reached: True if a lane of any replica has a sum.
        """
        position = self._trained_at[site]
        total = next((x for sums in self._sums_of_lanes if (x := sums[position]) is not None), None)
        return self._free(position) if reached and total is None else total

    def close_with(self, totals: Sequence[torch.Tensor | None]) -> None:
        """Set the sums over all lanes to the tensors of ``total_of``, after the last gradient of this update."""
        self.use_lane(0)
        for position, total in zip(self._trained_at, totals, strict=True):
            self._keep_lanes(position, total)
            self._sums[position] = total

    def _keep_lanes(self, position: int, total: torch.Tensor | None) -> None:
        """Clear the sums of one use in all lanes. Their memory is kept for reuse, except for that of ``total``."""
        for sums in self._sums_of_lanes:
            if (x := sums[position]) is not None and x is not total:
                self._kept[position].append(x)
            sums[position] = None

    def _free(self, position: int) -> torch.Tensor:
        """Return memory for the gradient sum of a use, reused memory if possible; its values are undefined."""
        kept = self._kept[position]
        if not kept:
            kept.append(torch.empty_like(self._parameters[self._sites[position].parameter].detach()))
        return kept[0] if self._fixed else kept.pop()

    def exported(self, stages: Collection[int]) -> list[torch.Tensor | None]:
        """List the gradient sums of parameters that one of ``stages`` holds too, after ``close``.

        There is one entry per use, in the order of ``StageProgram.shared_sites``.
        """
        return [self._sums[p] for name in self.program.shared_names(stages) for p in self._positions.get(name, ())]

    def finish(self, imported: Iterable[Accumulators]) -> None:
        """Set every ``parameter.grad`` to the sum over the parameter's uses, equal on all stages that hold it.

        Args:
            imported: for each other stage with shared parameters, the stage's ``exported`` sums, by use.
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
        """Clear the sums after the optimizer's step.

        Their memory is kept for reuse, except for shared parameters, whose sums a link may still be sending.
        """
        for position, site in enumerate(self._sites):
            total = self._sums[position]
            if total is not None and not self._fixed and site.parameter not in self.program.shared_with:
                self._kept[position].append(total)
            self._sums[position] = None
