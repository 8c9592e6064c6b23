"""A copy of a stage in pieces: read as a whole or a part of it, and refused where a piece is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from raypipe.engine.copy import CopyHeader, CopyPiece, copy_source, views_of
from raypipe.engine.io.checkpoint import TensorInfo
from raypipe.engine.optim.slices import ParameterSlice, flat
from raypipe.errors import CheckpointError
from tests.engine.test_lost_slices import Copying, segments
from tests.exactness import same_bits

STEP = 2


class Counted:
    """Pieces of stage 0 on three replicas after two steps, and the bytes that were read of them."""

    def __init__(self) -> None:
        workers = Copying((3, 1))
        for segment in segments()[:STEP]:
            workers.run(segment)
        workers.copy(STEP, send=False)
        self.read_bytes = 0
        self.pieces = [
            self._source(*copies[0].copy(STEP, piece))
            for at, copies in enumerate(workers.copies[:3])
            for piece in ([0, 1] if at == 0 else [1 + at])
        ]

    def _source(self, header: CopyHeader, block: torch.Tensor) -> CopyPiece:
        views = views_of(block)

        def fetch(infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
            self.read_bytes += sum(info.size_bytes for info in infos)
            return views(infos)

        return CopyPiece(CopyHeader.from_json(header.to_json()), fetch)


def test_a_part_is_read_without_the_rest() -> None:
    counted = Counted()
    source = copy_source(counted.pieces)
    names = [name for name in source.names if source.info(name).shape]
    kept = source.kept(names)
    counted.read_bytes = wanted_bytes = 0
    for name in names:
        size = source.info(name).size_bytes // 4
        for part in (
            ParameterSlice(name, 0, size),
            ParameterSlice(name, 0, min(7, size)),
            ParameterSlice(name, size // 3, max(size // 2, 1)),
        ):
            found = source.kept_part(part)
            assert found.keys() == kept[name].keys() == {"exp_avg", "exp_avg_sq", "step"}
            assert same_bits(found["step"], kept[name]["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(found[key], flat(kept[name][key])[part.first : part.stop])
            wanted_bytes += 2 * 4 * (part.stop - part.first) + 4  # and the number of its steps
    assert counted.read_bytes == wanted_bytes


def test_pieces_that_make_no_whole_are_refused() -> None:
    common, *slices = Counted().pieces
    with pytest.raises(CheckpointError, match=r"The copy of stage 0 after step 2 is in 3 pieces, .* \[0, 1\] are here"):
        copy_source([common, *slices[:2]])
    with pytest.raises(CheckpointError, match=r"replicas \[\] are here"):
        copy_source([common])
    with pytest.raises(CheckpointError, match=r"replicas \[0, 0, 1, 2\] are here"):
        copy_source([common, *slices, slices[0]])
    with pytest.raises(CheckpointError, match="Of the copy of stage 0 there are only slices"):
        copy_source(slices)
