"""Weights that are read where they lie, later than they were found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raypipe.engine.initial.weight_files import WeightFiles, weights_in
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError
from tests.exactness import same_bits

pytestmark = pytest.mark.engine

TENSORS = {"a": torch.arange(5000.0), "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0)}


def found(file: Path) -> WeightFiles:
    save_file(TENSORS, file)
    return WeightFiles.as_stored(weights_in(Place.of(file), "init_from"), "weights")


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    read = dict(found(tmp_path / "x.safetensors").read(TENSORS))
    assert all(same_bits(read[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_a_file_that_was_replaced_since_is_refused(tmp_path: Path, place: int) -> None:
    """The header is the same, so that only the numbers differ."""
    source = found(tmp_path / "x.safetensors")
    other = TENSORS["a"].clone()
    other[place] += 1
    save_file({**TENSORS, "a": other}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="changed since the run was planned: 'a' is another there"):
        dict(source.read(TENSORS))
