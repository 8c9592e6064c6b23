"""Gradient chunks of a stage, which its replicas exchange, and the slices of parameters that each replica updates.

    sites       a (large)   b (small)   c (larger than a chunk)        chunks   [c1] [c2] [a] [b]

A site is one use of a parameter in the model. Sites with large gradients come first, in the order in which a
backward computes them (the last site first), so that their chunks are sent while the backward runs. Sites with small
gradients come last, because those are added up after the backward. A site may continue in the next chunk; a chunk that
is at least one eighth full ends at the end of a site. A chunk has one dtype. Its gradients are summed over lanes, which
are partial sums: each replica adds the gradients of its micro-batches to its own lanes (``all_reduce``).

With a sharded optimizer (ZeRO, stage 1: Rajbhandari et al., SC'20), each replica sums the gradients of its own slice of
every chunk, updates this slice of the parameters, and sends the others updated parameters instead of gradients. Slices
then begin at a multiple of ``norms.BLOCK`` elements of their parameter. All uses of a parameter are divided at the same
elements, so that a replica adds up their gradients within its slice.

    chunk        |a: 0 ... 1024 ... 2048 ... 3000|b: 0 ... 1024 ... 1500|        blocks of 1024
    replica 0    [a 0:2048]                                                      updates these elements, and keeps their
    replica 1               [a 2048:3000] [b 0:1500]                             optimizer state

The optimizer is created with whole parameters, so that names and shapes select its groups as usual; then slices replace
the parameters in each group. Slices are views, so a step changes the parameter. Parameters that other stages hold too
are not sliced, because their gradients are summed over stages: every replica updates the whole parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from raypipe.engine.optim.norms import BLOCK
from raypipe.engine.stage.gradients import EARLY_BYTES
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.communication import CLOSED_AT, chunk_bytes

Tensors = Sequence[torch.Tensor | None]
Piece = tuple[int, int, int]
"""Range of a site's elements: (index of the site in ``GradientSink.trained``, first element, end)."""


UNSHARDED: Mapping[int, str] = MappingProxyType({})
"""Empty mapping: no optimizer state is sharded."""


def chunks_of(
    trained: Sequence[torch.Tensor], placement: Placement, sharded: Mapping[int, str] = UNSHARDED
) -> list[Chunk]:
    """Divide all gradient elements of a stage into chunks of at most ``chunk_bytes``.

    Args:
        trained: parameter of each site.
        sharded: maps indices in ``trained`` to the names of the parameters with sharded optimizer state.
    """
    most = chunk_bytes(placement.lanes, len(placement.replicas))
    uses = Counter(sharded.values())
    all_chunks = []
    for dtype in sorted({x.dtype for x in trained}, key=str):
        sites = [site for site, x in enumerate(trained) if x.dtype == dtype]
        room = most // dtype.itemsize
        rows = [([site for site in sites if site not in sharded], 1)]
        rows += [([site for site in sites if uses[sharded.get(site, "")] == 1], BLOCK)]
        rows += [([site], BLOCK) for site in sites if uses[sharded.get(site, "")] > 1]
        for row, grain in rows:
            early = [site for site in reversed(row) if trained[site].nbytes >= EARLY_BYTES]
            late = [site for site in row if trained[site].nbytes < EARLY_BYTES]
            for part in (early, late):
                all_chunks += [
                    Chunk(pieces, trained, placement, grain) for pieces in _parted(part, trained, room, grain)
                ]
    if sharded:  # rows of one dtype become complete in parallel: large sites from the last on, then small ones
        all_chunks.sort(key=lambda chunk: (trained[chunk.sites[0]].nbytes < EARLY_BYTES, -min(chunk.sites)))
    return all_chunks


def once(chunks: Sequence[Chunk], sharded: Mapping[int, str]) -> list[Chunk]:
    """Select the sharded chunks of the parameters' first sites, so that each parameter occurs in one site only."""
    first = {name: place for place, name in reversed([*sharded.items()])}
    return [x for x in chunks if x.sharded and all(first[sharded[site]] == site for site in x.sites)]


def _parted(sites: Sequence[int], trained: Sequence[torch.Tensor], room: int, grain: int) -> list[list[Piece]]:
    """Divide the elements of these sites into chunks of at most ``room`` elements; return each chunk's ranges.

    The length of a range is a multiple of ``grain``, unless the range ends with the site.
    """
    parts: list[list[Piece]] = [[]]
    room = max(room, grain)
    left = room
    for site in sites:
        first, size = 0, trained[site].numel()
        while first < size:
            stop = min(first + left, size)
            stop -= stop % grain if stop < size else 0
            if stop > first:
                parts[-1].append((site, first, stop))
            left -= stop - first
            first = stop
            if first < size or not left or room - left >= room * CLOSED_AT:
                parts.append([])
                left = room
    return [pieces for pieces in parts if pieces]


class Chunk:
    """Chunk of elements of one dtype, divided into one slice per replica.

    Attributes:
        sites: sites with elements in the chunk, as indices in ``GradientSink.trained``.
        place: torch device of the elements.
        sharded: True if each replica steps its slice.

    Args:
        pieces: ranges of sites that form the chunk.
        trained: parameter of each site of the stage.
        grain: slices begin at multiples of this number of elements of a site; more than 1 for a sharded chunk.
    """

    def __init__(
        self, pieces: Sequence[Piece], trained: Sequence[torch.Tensor], placement: Placement, grain: int = 1
    ) -> None:
        self._pieces, self._like = pieces, trained[pieces[0][0]]
        self.sharded = grain > 1
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
            ends = [min((abs(cut - end), cut) for cut in (*cuts, count))[1] for end in ends]
        self._bounds = dict(zip(workers, pairwise(ends), strict=True))

    def flattened(self, sums: Tensors) -> torch.Tensor | None:
        """Concatenate the chunk's elements of a lane's sums; return None if the lane has no sum.

        Args:
            sums: one sum per entry of ``sites``; None counts as zeros.
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
        """Return the slice of a flattened chunk that the replica on ``worker`` sums; None if ``flat`` is None."""
        first, stop = self._bounds[worker]
        return None if flat is None else flat[first:stop]

    def pieces_of(self, worker: int) -> list[Piece]:
        """List the ranges of sites in the slice of the replica on ``worker``."""
        low, high = self._bounds[worker]
        pieces = []
        for (site, first, stop), start in zip(self._pieces, accumulate(self._sizes, initial=0), strict=False):
            begin, end = max(first, first + low - start), min(stop, first + high - start)
            if begin < end:
                pieces.append((site, begin, end))
        return pieces

    def taken(self, worker: int, tensors: Tensors) -> torch.Tensor:
        """Concatenate the slice of the replica on ``worker`` from ``tensors``, one per site of the stage."""
        parts = [flat(tensors[site])[begin:end] for site, begin, end in self.pieces_of(worker)]  # type: ignore[arg-type]
        return torch.cat(parts) if parts else self._like.new_empty(0)

    def put(self, worker: int, slice_: torch.Tensor, into: Tensors) -> None:
        """Copy the slice of the replica on ``worker`` into the tensors ``into``, one per site of the stage or None."""
        pieces = self.pieces_of(worker)
        for (site, begin, end), part in zip(pieces, slice_.split([e - b for _, b, e in pieces]), strict=True):
            if (target := into[site]) is not None:
                flat(target)[begin:end] = part

    def summed(self, worker: int, lanes: Sequence[tuple[torch.Tensor | None, Sequence[int]]]) -> torch.Tensor:
        """Sum the slice of the replica on ``worker`` over lanes, in their order.

        Args:
            lanes: for each lane (its elements of the slice; by entry of ``sites``, 1 if the lane has a sum, else 0).
        """
        first, stop = self._bounds[worker]
        ends = [*accumulate(self._sizes, initial=0)]
        total = self._like.new_zeros(stop - first)
        # Consecutive sites with sums in the same lanes are summed together: mostly all sites of the chunk.
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
        """Copy the slices ``totals`` of all replicas, in order, into the tensors ``into``, as ``put`` copies one."""
        whole = torch.cat([x for x in totals if x is not None])
        for (site, first, stop), total in zip(self._pieces, whole.split(self._sizes), strict=True):
            if (target := into[site]) is not None:
                flat(target)[first:stop] = total


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of all elements of a dense tensor in the order of memory, shape (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


class ParameterSlice(NamedTuple):
    """Range of elements of a parameter in the order of memory: from ``first`` up to, and not including, ``stop``."""

    name: str
    first: int
    stop: int


def sharded_names(program: StageProgram, parameters: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Find the parameters whose optimizer state is sharded; return {index: name}.

    The index is the position among the places in the stage's modules that hold a trained parameter. A parameter that
    several modules share has several places.
    """
    names = [site.parameter for site in program.train.sites if site.parameter in program.trainable]
    return {
        place: name
        for place, name in enumerate(names)
        if name not in program.shared_with and parameters[name].dim() and parameters[name].is_contiguous()
    }


def parts_of(
    program: StageProgram, parameters: Mapping[str, torch.Tensor], placement: Placement
) -> dict[int, list[ParameterSlice]]:
    """Return {worker: slices of parameters that its optimizer steps} for all replicas."""
    trained = [parameters[x.parameter].detach() for x in program.train.sites if x.parameter in program.trainable]
    names = sharded_names(program, parameters)
    chunks = once(chunks_of(trained, placement, names), names)
    return {
        worker: [ParameterSlice(names[site], *ends) for chunk in chunks for site, *ends in chunk.pieces_of(worker)]
        for worker in placement.replicas
    }


class Slices:
    """Slices of a stage's parameters that one replica steps.

    Attributes:
        parts: for each replica, in order, the slices that it steps.
        replica: index of this replica.
        groups: for each parameter group of the optimizer, the names of the group's whole parameters, even if only other
            replicas step slices of them; empty before ``take_over``.
    """

    def __init__(
        self, parts: Sequence[Sequence[ParameterSlice]], replica: int, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.parts, self.replica = [list(of_one) for of_one in parts], replica
        self.names = frozenset(part.name for of_one in parts for part in of_one)
        self.groups: list[tuple[str, ...]] = []
        self._parameters = parameters
        self.held = {part: torch.nn.Parameter(self._view(part)) for part in self.parts[replica]}
        """Tensors that the optimizer steps, by slice."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace whole parameters in an optimizer's groups and state by this replica's slices of these parameters."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_name: dict[str, list[tuple[ParameterSlice, torch.nn.Parameter]]] = {}
        for part, parameter in self.held.items():
            by_name.setdefault(part.name, []).append((part, parameter))
        names_by_id = names | {id(parameter): part.name for part, parameter in self.held.items()}
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
                group["param_names"] = [names_by_id[id(x)] for x in stepped]

    def part_of(self) -> dict[int, ParameterSlice]:
        """Return {id of a tensor that the optimizer steps: the slice that the tensor is}."""
        return {id(parameter): part for part, parameter in self.held.items()}

    def take_gradients(self) -> None:
        """Set the gradient of each slice to a view of its part of the parameter's gradient; None if that has none.

        The part must have been summed over the replicas before.
        """
        for part, parameter in self.held.items():
            whole = self._parameters[part.name].grad
            parameter.grad = None if whole is None else flat(whole)[part.first : part.stop]

    def gradients(self) -> list[torch.Tensor]:
        """List the gradients of this replica's slices, without slices that have no gradient."""
        return [x.grad for x in self.held.values() if x.grad is not None]

    def follow(self) -> None:
        """Copy new values of slices into the parameters after a step, and make the slices views of them again.

        This is needed only for an optimizer that assigns ``parameter.data`` instead of changing it in place.
        """
        for part, parameter in self.held.items():
            view = self._view(part)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def blocks(self, norms: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the norms of each parameter's blocks, in order, by name; only of parameters that have a gradient.

        Args:
            norms: for each replica, the norms of the blocks of its slices (``Update.part_norms``).
        """
        by_name: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for parts, of_replica in zip(self.parts, norms, strict=True):
            with_gradient = [part for part in parts if self._parameters[part.name].grad is not None]
            counts = [-(-(part.stop - part.first) // BLOCK) for part in with_gradient]
            assert of_replica is not None, "every replica sends its norms"
            for part, of_part in zip(with_gradient, of_replica.split(counts), strict=True):
                like = self._parameters[part.name]
                by_name.setdefault(part.name, []).append((part.first, of_part.to(like.device, like.dtype)))
        order = {name: sorted(of_name, key=lambda pair: pair[0]) for name, of_name in by_name.items()}
        return {name: torch.cat([norms for _, norms in of_name]) for name, of_name in order.items()}

    def _view(self, part: ParameterSlice) -> torch.Tensor:
        return flat(self._parameters[part.name].data)[part.first : part.stop]


def sliced(value: Any, whole: torch.Tensor, part: ParameterSlice) -> Any:
    """Return the part of one value of a parameter's optimizer state that belongs to a slice.

    Args:
        value: the value. A tensor of the parameter's shape is sliced; any other tensor is cloned.
        whole: the parameter.
    """
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        whole_value = torch.empty_like(whole, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
        return flat(whole_value)[part.first : part.stop].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value
