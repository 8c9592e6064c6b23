"""A copy of state that some worker has, as the driver names it to the others, and how these read it.

RemoteCopy(A, stage 1, step 21).opened()  --header-->  CopySource  --names-->  only the bytes of these, in parcels
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from ray.exceptions import RayError

from raypipe.engine.checkpoint import TensorInfo
from raypipe.engine.copy import COMMON, CopyHeader, CopySource
from raypipe.engine.messages.layout import raw_bytes
from raypipe.errors import StageLostError
from raypipe.runtime.workers.fetching import fetched

__all__ = ["RemoteCopy", "Tally"]

PARCEL_BYTES = 4 << 20
"""That travel at once: a stage waits for them."""
AHEAD = 3
"""Parcels that are asked for at a time."""
READ_TIMEOUT_S = 120.0
"""For one parcel; a worker that has died is known at once."""


@dataclass(slots=True)
class Tally:
    """Bytes that were read of other workers' copies so far."""

    total: int = 0


@dataclass(frozen=True, slots=True)
class RemoteCopy:
    """See the module.

    Attributes:
        actor: that has it.
        key: of the actor, by which it knows itself.
        names: of parameters and buffers in it; of slices those of their stage.
        piece: of the stage's copy, see CopyHeader.
    """

    actor: Any
    key: str
    generation: int
    stage: int
    step: int
    names: tuple[str, ...]
    piece: int = COMMON

    @property
    def of(self) -> tuple[int, int, int, int]:
        """Generation, stage, step and piece, by which it is known wherever it is."""
        return self.generation, self.stage, self.step, self.piece

    def opened(self, moved: Tally) -> CopySource:
        """Its header; tensors come when they are asked for.

        Args:
            moved: counts their bytes.

        Raises:
            StageLostError: the worker that has it died, or does not answer; also when tensors are asked for.
        """
        header = self._get(self.actor.copy_header.remote(*self.of))
        return CopySource(CopyHeader.from_json(header), partial(self._fetch, moved))

    def _fetch(self, moved: Tally, infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
        """These tensors, in this order."""
        parcels = list(_parcels(infos))
        calls = (
            self.actor.copy_data.remote(*self.of, [(begin, end) for _, begin, end in parcel]) for parcel in parcels
        )
        asked = deque(islice(calls, AHEAD))
        tensor = torch.empty(0)
        for parcel in parcels:
            data, at = memoryview(self._get(asked.popleft())), 0
            moved.total += len(data)
            asked.extend(islice(calls, 1))
            for info, begin, end in parcel:
                if begin == info.begin:
                    tensor = torch.empty(info.shape, dtype=info.dtype)
                if end > begin:
                    target = raw_bytes(tensor, info.size_bytes).cast("B")
                    target[begin - info.begin : end - info.begin] = data[at : at + end - begin]
                    at += end - begin
                if end == info.end:
                    yield tensor

    def _get(self, ref: Any) -> Any:
        try:
            return fetched(ref, READ_TIMEOUT_S)
        except RayError as error:
            raise StageLostError(
                f"The copy of stage {self.stage} after step {self.step} cannot be read: {str(error).splitlines()[0]}"
            ) from None


def _parcels(infos: Sequence[TensorInfo]) -> Iterator[list[tuple[TensorInfo, int, int]]]:
    """Pieces of tensors, as (tensor, begin, end) in the block, a parcel's worth at a time."""
    parcel: list[tuple[TensorInfo, int, int]] = []
    room_bytes = PARCEL_BYTES
    for info in infos:
        begin = info.begin
        while True:
            end = min(info.end, begin + room_bytes)
            parcel.append((info, begin, end))
            room_bytes -= end - begin
            if room_bytes == 0:
                yield parcel
                parcel, room_bytes = [], PARCEL_BYTES
            if end == info.end:
                break
            begin = end
    if parcel:
        yield parcel
