"""Sources of state by name: what several of them have together, and what is missing."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.io.checkpoint import GivenTensors, read_all
from raypipe.errors import CheckpointError


def test_each_tensor_comes_from_the_first_source_that_has_it() -> None:
    one, other = GivenTensors({"a": torch.ones(2)}), GivenTensors({"a": torch.zeros(2), "b": torch.full((3,), 7.0)})
    tensors = read_all([one, other], ("b", "a"))
    assert list(tensors) == ["b", "a"]
    assert torch.equal(tensors["a"], torch.ones(2))
    assert torch.equal(tensors["b"], torch.full((3,), 7.0))


def test_a_tensor_that_no_source_has_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"The initial state lacks 'b', so no stage can hold it\."):
        read_all([GivenTensors({"a": torch.ones(2)})], ("a", "b"))
