"""The gradients of a stage in chunks, as its replicas exchange them.

    use sites   a (large)   b (small)   c (larger than a chunk)        chunks   [c1] [c2] [a] [b]

Large use sites stand in the order in which a backward completes them, the last first, and may go on in the next chunk.
A chunk need not be full: it ends where a site does once it is filled to an eighth. Behind them come the small sites,
whose gradients are added together when the backward is over. Of every type of number there is one such row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch

from raypipe.engine.gradients import EARLY_BYTES
from raypipe.engine.placement import Placement
from raypipe.ir.exchange import CLOSED_AT, chunk_bytes

__all__ = ["Chunk", "chunks_of"]

Tensors = Sequence[torch.Tensor | None]
Piece = tuple[int, int, int]
"""Place among the sink's ``trained``; first element, and that behind the last, in the order of memory."""


def chunks_of(trained: Sequence[torch.Tensor], placement: Placement) -> list[Chunk]:
    """All elements, in parts of so many bytes."""
    most = chunk_bytes(placement.lanes, len(placement.replicas))
    found = []
    for dtype in sorted({x.dtype for x in trained}, key=str):
        sites = [site for site, x in enumerate(trained) if x.dtype == dtype]
        early = [site for site in reversed(sites) if trained[site].nbytes >= EARLY_BYTES]
        late = [site for site in sites if trained[site].nbytes < EARLY_BYTES]
        for row in (early, late):
            found += [Chunk(pieces, trained, placement) for pieces in _parted(row, trained, most // dtype.itemsize)]
    return found


def _parted(sites: Sequence[int], trained: Sequence[torch.Tensor], room: int) -> list[list[Piece]]:
    """The elements of these sites, so many at a time."""
    found: list[list[Piece]] = [[]]
    left = room
    for site in sites:
        first, size = 0, trained[site].numel()
        while first < size:
            stop = min(first + left, size)
            found[-1].append((site, first, stop))
            left -= stop - first
            first = stop
            if not left or (first == size and room - left >= room * CLOSED_AT):
                found.append([])
                left = room
    return [pieces for pieces in found if pieces]


class Chunk:
    """Some elements of one type, and how replicas share them out.

    Attributes:
        sites: places among the sink's ``trained`` that it has elements of.
        place: the device of these.

    Args:
        trained: of the sink.
    """

    def __init__(self, pieces: Sequence[Piece], trained: Sequence[torch.Tensor], placement: Placement) -> None:
        self._pieces, self._like = pieces, trained[pieces[0][0]]
        self.sites = [site for site, _, _ in pieces]
        self.place = self._like.device
        self._sizes = [stop - first for _, first, stop in pieces]
        workers = placement.replicas
        count = sum(self._sizes)
        self._bounds = {
            worker: (count * place // len(workers), count * (place + 1) // len(workers))
            for place, worker in enumerate(workers)
        }

    def flattened(self, sums: Tensors) -> torch.Tensor | None:
        """A lane's sums as one vector, with zeros where there is none; None where there is none at all.

        Args:
            sums: for each of ``sites``.
        """
        if all(x is None for x in sums):
            return None
        return torch.cat(
            [
                self._like.new_zeros(stop - first) if x is None else _flat(x)[first:stop]
                for (_, first, stop), x in zip(self._pieces, sums, strict=True)
            ]
        )

    def slice_of(self, worker: int, flat: torch.Tensor | None) -> torch.Tensor | None:
        """What a replica sums."""
        first, stop = self._bounds[worker]
        return None if flat is None else flat[first:stop]

    def summed(self, worker: int, lanes: Sequence[tuple[torch.Tensor | None, Sequence[int]]]) -> torch.Tensor:
        """The slice of a replica, summed over lanes in their order.

        Args:
            lanes: of each, the slice, and for each of ``sites`` whether it has anything for it.
        """
        first, stop = self._bounds[worker]
        ends = [*accumulate(self._sizes, initial=0)]
        total = self._like.new_zeros(stop - first)
        # Neighbouring sites that the same lanes have something for are summed together: mostly all of them.
        patterns = [tuple(bool(reached[at]) for _, reached in lanes) for at in range(len(self._pieces))]
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
        """What all replicas summed, in their order, to the sites that any lane has something for.

        Args:
            into: for each of the sink's ``trained``.
        """
        whole = torch.cat([x for x in totals if x is not None])
        for (site, first, stop), total in zip(self._pieces, whole.split(self._sizes), strict=True):
            if (target := into[site]) is not None:
                _flat(target)[first:stop] = total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
