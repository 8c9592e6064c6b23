"""Programs arrive whole at an actor, as Ray ships them."""

from __future__ import annotations

import pytest
import torch
from ray import cloudpickle

from raypipe.engine.stage.randomness import RandomKey
from tests.exactness import captured, programs
from tests.models import vectors

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("name", ["choosing", "vmapped", "cumulative"])
def test_operations_arrive_whole(name: str) -> None:
    """Bodies of regions, and operations of ours, are there in what arrives."""
    made = captured(name)[1]
    (program,) = programs(name, ())
    x, outputs = vectors(4)[:4][0], []
    for function in (program.train, cloudpickle.loads(cloudpickle.dumps(program)).train):
        leaves = [made.parameters[site.parameter] for site in function.sites]
        buffers = [made.buffers[buffer].clone() for buffer in function.buffers]
        outputs.append(function(leaves, buffers, (), (x,), RandomKey(0, 0, 0))[0])
    assert torch.equal(*outputs)
