"""What replicas of a stage exchange at the end of an update: sums of lanes, to the same bits on all of them.

    replica 0   lanes 0 2      scatter: everybody's lanes of slice r go to replica r, which sums them in their order
    replica 1   lanes 1 3      gather:  the totals of slice r come back from replica r

Every element is summed once, lane after lane, wherever that is done, so that the result depends on the number of lanes
and not on the number of replicas. An element that a lane has nothing for (a use site that no micro-batch of it reached)
is left out of the sum, as it is where one worker has all lanes. With as many lanes as replicas R each of them sends
2 (R - 1) / R times the bytes of the gradients, as in a ring.

On links the two messages are known by actions of the stage: the scatter by its REDUCE_GRAD, the gather by its STEP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

import torch

from raypipe.engine.gradients import GradientSink
from raypipe.engine.placement import Placement
from raypipe.ir.schedule import Action, Op

__all__ = ["AllReduce"]

Tensors = Sequence[torch.Tensor | None]


class AllReduce:
    """Of one stage, on one of its replicas.

    Args:
        placement: who the replicas are, and which lanes each has.
        sink: of the stage.
        send: (worker, action, tensors) hands a message to another worker.
        receive: (worker, the sender's action) waits for one.
    """

    def __init__(
        self,
        stage: int,
        placement: Placement,
        sink: GradientSink,
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
    ) -> None:
        self._stage, self._placement, self._sink = stage, placement, sink
        self._send, self._receive = send, receive
        self._parts = [_Part(sink.trained, dtype, placement) for dtype in _dtypes(sink.trained)]

    def run(self, microbatch: int) -> None:
        """Close the sink with the totals over all lanes.

        Args:
            microbatch: last of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        me, sink = self._placement.worker, self._sink
        peers = [worker for worker in self._placement.replicas if worker != me]
        if not peers or not self._parts:
            sink.close()
            return
        scatter, gather = (Action(self._stage, op, microbatch) for op in (Op.REDUCE_GRAD, Op.STEP))
        reached, slices = self._scattered(scatter, peers)
        order = sorted(reached)
        sums = [
            part.summed(me, [(of_part[lane], reached[lane]) for lane in order])
            for part, of_part in zip(self._parts, slices, strict=True)
        ]
        for peer in peers:
            self._send(peer, gather, sums)
        by_worker: dict[int, Tensors] = {me: sums, **{peer: self._receive(peer, gather) for peer in peers}}
        totals: list[torch.Tensor | None] = [None] * len(sink.trained)
        for number, part in enumerate(self._parts):
            whole = torch.cat([by_worker[worker][number] for worker in self._placement.replicas])  # type: ignore[misc]
            for site, total in zip(part.sites, whole.split(part.sizes), strict=True):
                totals[site] = total if any(reached[lane][site] for lane in order) else None
        sink.close_with(totals)

    def _scattered(
        self, scatter: Action, peers: Sequence[int]
    ) -> tuple[dict[int, list[int]], list[dict[int, torch.Tensor | None]]]:
        """Of every lane, for which use sites it has anything; by type and lane, what this replica sums."""
        me = self._placement.worker
        own = {lane: self._sink.sums(lane) for lane in self._placement.lanes_of(me)}
        place = self._sink.trained[0].device
        there = torch.tensor([[x is not None for x in sums] for sums in own.values()], dtype=torch.uint8, device=place)
        flat = [{lane: part.flattened(sums) for lane, sums in own.items()} for part in self._parts]
        pairs = list(zip(self._parts, flat, strict=True))
        for peer in peers:
            self._send(
                peer, scatter, [there, *(part.slice_of(peer, x) for part, by_lane in pairs for x in by_lane.values())]
            )
        slices = [{lane: part.slice_of(me, x) for lane, x in by_lane.items()} for part, by_lane in pairs]
        reached: dict[int, list[int]] = dict(zip(own, there.tolist(), strict=True))
        for peer in peers:
            theirs, *pieces = self._receive(peer, scatter)
            assert theirs is not None
            lanes = self._placement.lanes_of(peer)
            reached |= zip(lanes, theirs.tolist(), strict=True)
            for number, of_part in enumerate(slices):
                of_part |= zip(lanes, pieces[number * len(lanes) : (number + 1) * len(lanes)], strict=True)
        return reached, slices


def _dtypes(trained: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return sorted({x.dtype for x in trained}, key=str)


class _Part:
    """All elements of one type, site after site, and how replicas share them out.

    Attributes:
        sites: places among the sink's ``trained``.
        sizes: elements of each.
    """

    def __init__(self, trained: Sequence[torch.Tensor], dtype: torch.dtype, placement: Placement) -> None:
        self._dtype = dtype
        self.sites = [site for site, x in enumerate(trained) if x.dtype == dtype]
        self.sizes = [trained[site].numel() for site in self.sites]
        workers = placement.replicas
        count = sum(self.sizes)
        self._bounds = {
            worker: (count * place // len(workers), count * (place + 1) // len(workers))
            for place, worker in enumerate(workers)
        }

    def flattened(self, sums: Tensors) -> torch.Tensor | None:
        """The accumulators of a lane as one vector, with zeros where there is none; None where there is none at all."""
        mine = [sums[site] for site in self.sites]
        there = next((x for x in mine if x is not None), None)
        if there is None:
            return None
        flat = [
            there.new_zeros(size) if x is None else x.as_strided((size,), (1,))
            for x, size in zip(mine, self.sizes, strict=True)
        ]
        return torch.cat(flat)

    def slice_of(self, worker: int, flat: torch.Tensor | None) -> torch.Tensor | None:
        """What a replica sums."""
        first, stop = self._bounds[worker]
        return None if flat is None else flat[first:stop]

    def summed(self, worker: int, lanes: Sequence[tuple[torch.Tensor | None, Sequence[int]]]) -> torch.Tensor:
        """The slice of a replica, summed over lanes in their order.

        Args:
            lanes: of each, the slice, and by site whether it has anything for it.
        """
        first, stop = self._bounds[worker]
        ends = [*accumulate(self.sizes, initial=0)]
        place = next((x for x, _ in lanes if x is not None), None)
        total = torch.zeros(stop - first, dtype=self._dtype, device=None if place is None else place.device)
        # Neighbouring sites that the same lanes have something for are summed together: mostly all of them.
        patterns = [tuple(bool(reached[site]) for _, reached in lanes) for site in self.sites]
        for pattern, run in groupby(range(len(self.sites)), key=patterns.__getitem__):
            sites = list(run)
            low, high = max(ends[sites[0]], first) - first, min(ends[sites[-1] + 1], stop) - first
            if low < high:
                parts = [x[low:high] for (x, _), has in zip(lanes, pattern, strict=True) if has]  # type: ignore[index]
                for number, part in enumerate(parts):
                    if number:
                        total[low:high] += part
                    else:
                        total[low:high] = part
        return total
