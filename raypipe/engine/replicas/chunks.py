"""The gradients of a stage in chunks, as its replicas exchange them.

    use sites   a (large)   b (small)   c (larger than a chunk)        chunks   [c1] [c2] [a] [b]

Large use sites stand in the order in which a backward completes them, the last first, and may go on in the next chunk.
A chunk need not be full: it ends where a site does once it is filled to an eighth. Behind them come the small sites,
whose gradients are added together when the backward is over. Of every type of number there is one such row.

Where replicas share out the optimizer's state (``slices``), each keeps its slice of the totals, steps it, and gives
parameters back in place of gradients. Slices then begin with a block of their parameter (``norms.BLOCK``), and
those of a parameter that is used several times are the same for each use, so that uses are summed slice by slice.

    chunk   |a: 0 ... 1024 ... 2048 ... 3000|b: 0 ... 1024 ... 1500|        blocks of 1024
    slices  [     replica 0      ][          replica 1             ]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType

import torch

from raypipe.engine.gradients import EARLY_BYTES
from raypipe.engine.norms import BLOCK
from raypipe.engine.placement import Placement
from raypipe.ir.exchange import CLOSED_AT, chunk_bytes

__all__ = ["NOBODY", "Chunk", "Piece", "chunks_of", "flat", "once"]

Tensors = Sequence[torch.Tensor | None]
Piece = tuple[int, int, int]
"""Place among the sink's ``trained``; first element, and that behind the last, in the order of memory."""


NOBODY: Mapping[int, str] = MappingProxyType({})
"""No optimizer state is shared out."""


def chunks_of(
    trained: Sequence[torch.Tensor], placement: Placement, shared_out: Mapping[int, str] = NOBODY
) -> list[Chunk]:
    """All elements, in parts of so many bytes.

    Args:
        shared_out: names of the parameters whose optimizer state replicas share out, by place among ``trained``.
    """
    most = chunk_bytes(placement.lanes, len(placement.replicas))
    uses = Counter(shared_out.values())
    found = []
    for dtype in sorted({x.dtype for x in trained}, key=str):
        sites = [site for site, x in enumerate(trained) if x.dtype == dtype]
        room = most // dtype.itemsize
        rows = [([site for site in sites if site not in shared_out], 1)]
        rows += [([site for site in sites if uses[shared_out.get(site, "")] == 1], BLOCK)]
        rows += [([site], BLOCK) for site in sites if uses[shared_out.get(site, "")] > 1]
        for row, grain in rows:
            early = [site for site in reversed(row) if trained[site].nbytes >= EARLY_BYTES]
            late = [site for site in row if trained[site].nbytes < EARLY_BYTES]
            for part in (early, late):
                found += [Chunk(pieces, trained, placement, grain) for pieces in _parted(part, trained, room, grain)]
    if shared_out:  # the rows of one type are complete beside each other: large sites from the last on, then small ones
        found.sort(key=lambda chunk: (trained[chunk.sites[0]].nbytes < EARLY_BYTES, -min(chunk.sites)))
    return found


def once(chunks: Sequence[Chunk], shared_out: Mapping[int, str]) -> list[Chunk]:
    """Those that are shared out, with every parameter in them once: of one that is used several times the first use."""
    first = {name: place for place, name in reversed([*shared_out.items()])}
    return [x for x in chunks if x.shared_out and all(first[shared_out[site]] == site for site in x.sites)]


def _distance(one: int, other: int) -> int:
    return abs(one - other)


def _parted(sites: Sequence[int], trained: Sequence[torch.Tensor], room: int, grain: int) -> list[list[Piece]]:
    """The elements of these sites, so many at a time.

    Args:
        grain: of which a piece that does not end its site has a multiple.
    """
    found: list[list[Piece]] = [[]]
    room = max(room, grain)
    left = room
    for site in sites:
        first, size = 0, trained[site].numel()
        while first < size:
            stop = min(first + left, size)
            stop -= stop % grain if stop < size else 0
            if stop > first:
                found[-1].append((site, first, stop))
            left -= stop - first
            first = stop
            if first < size or not left or room - left >= room * CLOSED_AT:
                found.append([])
                left = room
    return [pieces for pieces in found if pieces]


class Chunk:
    """Some elements of one type, and how replicas share them out.

    Attributes:
        sites: places among the sink's ``trained`` that it has elements of.
        place: the device of these.
        shared_out: each replica steps its slice.

    Args:
        trained: of the sink.
        grain: slices begin at multiples of so many elements of a site; with more than one they are shared out.
    """

    def __init__(
        self, pieces: Sequence[Piece], trained: Sequence[torch.Tensor], placement: Placement, grain: int = 1
    ) -> None:
        self._pieces, self._like = pieces, trained[pieces[0][0]]
        self.shared_out = grain > 1
        self.sites = [site for site, _, _ in pieces]
        self.place = self._like.device
        self._sizes = [stop - first for _, first, stop in pieces]
        workers = placement.replicas
        count = sum(self._sizes)
        ends = [count * place // len(workers) for place in range(len(workers) + 1)]
        if grain > 1:
            starts = accumulate(self._sizes, initial=0)
            cuts = [
                at for start, size in zip(starts, self._sizes, strict=False) for at in range(start, start + size, grain)
            ]
            ends = [min((*cuts, count), key=partial(_distance, end)) for end in ends]
        self._bounds = dict(zip(workers, pairwise(ends), strict=True))

    def flattened(self, sums: Tensors) -> torch.Tensor | None:
        """A lane's sums as one vector, with zeros where there is none; None where there is none at all.

        Args:
            sums: for each of ``sites``.
        """
        if all(x is None for x in sums):
            return None
        return torch.cat(
            [
                self._like.new_zeros(stop - first) if x is None else flat(x)[first:stop]
                for (_, first, stop), x in zip(self._pieces, sums, strict=True)
            ]
        )

    def slice_of(self, worker: int, flat: torch.Tensor | None) -> torch.Tensor | None:
        """What a replica sums."""
        first, stop = self._bounds[worker]
        return None if flat is None else flat[first:stop]

    def pieces_of(self, worker: int) -> list[Piece]:
        """What its slice has of each site; empty parts are left out."""
        low, high = self._bounds[worker]
        found = []
        for (site, first, stop), start in zip(self._pieces, accumulate(self._sizes, initial=0), strict=False):
            begin, end = max(first, first + low - start), min(stop, first + high - start)
            if begin < end:
                found.append((site, begin, end))
        return found

    def taken(self, worker: int, tensors: Tensors) -> torch.Tensor:
        """The slice of a replica.

        Args:
            tensors: for each of the sink's ``trained``, none of them None.
        """
        parts = [flat(tensors[site])[begin:end] for site, begin, end in self.pieces_of(worker)]  # type: ignore[arg-type]
        return torch.cat(parts) if parts else self._like.new_empty(0)

    def put(self, worker: int, slice_: torch.Tensor, into: Tensors) -> None:
        """Write the slice of a replica; elements of sites without a target are left out.

        Args:
            into: for each of the sink's ``trained``.
        """
        pieces = self.pieces_of(worker)
        for (site, begin, end), part in zip(pieces, slice_.split([e - b for _, b, e in pieces]), strict=True):
            if (target := into[site]) is not None:
                flat(target)[begin:end] = part

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
                flat(target)[first:stop] = total


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
