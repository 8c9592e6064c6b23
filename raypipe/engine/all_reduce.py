"""What replicas of a stage exchange at the end of an update: sums of lanes, to the same bits on all of them.

    replica 0   lanes 0 2      scatter: everybody's lanes of slice r go to replica r, which sums them in their order
    replica 1   lanes 1 3      gather:  the totals of slice r come back from replica r

Every element is summed once, lane after lane, wherever that is done, so that the result depends on the number of lanes
and not on the number of replicas. An element that a lane has nothing for (a use site that no micro-batch of it reached)
is left out of the sum, as it is where one worker has all lanes. With as many lanes as replicas R each of them sends
2 (R - 1) / R times the bytes of the gradients, as in a ring.

The gradients go chunk by chunk, so that little memory is needed beside the sums (``ir.exchange`` counts it). A replica
begins with a chunk once it has the totals of the one before from all others, so that no two messages of one name are on
their way. Totals are written over the sums of a lane, whose elements were copied for the exchange.

On links the two messages are known by actions of the stage: the scatter by its REDUCE_GRAD, the gather by its STEP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby

import torch

from raypipe.engine.gradients import GradientSink
from raypipe.engine.placement import Placement
from raypipe.ir.exchange import chunk_bytes
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
        self._chunks = list(_chunks(sink.trained, placement))
        self._peers = [worker for worker in placement.replicas if worker != placement.worker]

    def run(self, microbatch: int) -> None:
        """Close the sink with the totals over all lanes.

        Args:
            microbatch: last of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        sink = self._sink
        if not self._peers or not self._chunks:
            sink.close()
            return
        own = {lane: sink.sums(lane) for lane in self._placement.lanes_of(self._placement.worker)}
        scatter, gather = (Action(self._stage, op, microbatch) for op in (Op.REDUCE_GRAD, Op.STEP))
        into: list[torch.Tensor | None] = []
        for chunk in self._chunks:
            reached, total = self._summed(chunk, own, scatter)
            for peer in self._peers:
                self._send(peer, gather, (total,))
            totals = {self._placement.worker: total} | {peer: self._receive(peer, gather)[0] for peer in self._peers}
            if not into:
                into = sink.totals([any(of_lane) for of_lane in zip(*reached.values(), strict=True)])
            chunk.write([totals[worker] for worker in self._placement.replicas], into)
        sink.close_with(into)

    def _summed(
        self, chunk: _Chunk, own: dict[int, list[torch.Tensor | None]], scatter: Action
    ) -> tuple[dict[int, list[int]], torch.Tensor]:
        """Of every lane, for which use sites it has anything; this replica's slice of the chunk, summed."""
        me = self._placement.worker
        place = self._sink.trained[0].device
        there = torch.tensor([[x is not None for x in sums] for sums in own.values()], dtype=torch.uint8, device=place)
        flat = {lane: chunk.flattened(sums) for lane, sums in own.items()}
        for peer in self._peers:
            self._send(peer, scatter, [there, *(chunk.slice_of(peer, x) for x in flat.values())])
        slices = {lane: chunk.slice_of(me, x) for lane, x in flat.items()}
        reached: dict[int, list[int]] = dict(zip(own, there.tolist(), strict=True))
        for peer in self._peers:
            theirs, *pieces = self._receive(peer, scatter)
            assert theirs is not None
            lanes = self._placement.lanes_of(peer)
            reached |= zip(lanes, theirs.tolist(), strict=True)
            slices |= zip(lanes, pieces, strict=True)
        return reached, chunk.summed(me, [(slices[lane], reached[lane]) for lane in sorted(reached)])


def _chunks(trained: Sequence[torch.Tensor], placement: Placement) -> Iterator[_Chunk]:
    """All elements, by type, in parts of so many bytes."""
    most = chunk_bytes(placement.lanes, len(placement.replicas))
    for dtype in sorted({x.dtype for x in trained}, key=str):
        room, pieces = most // dtype.itemsize, list[_Piece]()
        left = room
        for site, tensor in enumerate(trained):
            first = 0
            while tensor.dtype == dtype and first < tensor.numel():
                stop = min(first + left, tensor.numel())
                pieces.append((site, first, stop))
                left -= stop - first
                first = stop
                if not left:
                    yield _Chunk(pieces, trained[site], placement)
                    pieces, left = [], room
        if pieces:
            yield _Chunk(pieces, trained[pieces[0][0]], placement)


_Piece = tuple[int, int, int]
"""Place among the sink's ``trained``; first element, and that behind the last, in the order of memory."""


class _Chunk:
    """Some elements of one type, and how replicas share them out.

    Args:
        like: a tensor of this type, on the device.
    """

    def __init__(self, pieces: Sequence[_Piece], like: torch.Tensor, placement: Placement) -> None:
        self._pieces, self._like = pieces, like
        self._sizes = [stop - first for _, first, stop in pieces]
        workers = placement.replicas
        count = sum(self._sizes)
        self._bounds = {
            worker: (count * place // len(workers), count * (place + 1) // len(workers))
            for place, worker in enumerate(workers)
        }

    def flattened(self, sums: Tensors) -> torch.Tensor | None:
        """A lane's sums as one vector, with zeros where there is none; None where there is none at all."""
        if all(sums[site] is None for site, _, _ in self._pieces):
            return None
        return torch.cat(
            [
                self._like.new_zeros(stop - first) if (x := sums[site]) is None else _flat(x)[first:stop]
                for site, first, stop in self._pieces
            ]
        )

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
        ends = [*accumulate(self._sizes, initial=0)]
        total = self._like.new_zeros(stop - first)
        # Neighbouring sites that the same lanes have something for are summed together: mostly all of them.
        patterns = [tuple(bool(reached[site]) for _, reached in lanes) for site, _, _ in self._pieces]
        for pattern, run in groupby(range(len(patterns)), key=patterns.__getitem__):
            places = list(run)
            low, high = max(ends[places[0]], first) - first, min(ends[places[-1] + 1], stop) - first
            if low < high:
                parts = [x[low:high] for (x, _), has in zip(lanes, pattern, strict=True) if has]  # type: ignore[index]
                for number, part in enumerate(parts):
                    if number:
                        total[low:high] += part
                    else:
                        total[low:high] = part
        return total

    def write(self, totals: Tensors, into: Tensors) -> None:
        """What all replicas summed, in their order, to the sites that any lane has something for."""
        whole = torch.cat([x for x in totals if x is not None])
        for (site, first, stop), total in zip(self._pieces, whole.split(self._sizes), strict=True):
            if (target := into[site]) is not None:
                _flat(target)[first:stop] = total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
