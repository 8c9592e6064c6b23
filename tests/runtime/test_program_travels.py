"""What ships to an actor, as Ray ships it: recipes without parameters."""

from __future__ import annotations

import pytest
from ray import cloudpickle

from tests.exactness import captured, programs


@pytest.mark.parametrize("name", ["gpt2", "unet", "dropout-sequential"])
def test_a_program_travels_without_its_parameters(name: str) -> None:
    made = captured(name)[1]
    contents = [p.detach().numpy().tobytes()[:64] for p in made.parameters.values() if p.numel() >= 16 and p.std() > 0]
    assert contents
    for program in programs(name, 2):
        packed = cloudpickle.dumps(program)
        assert len(packed) < 64 * 1024
        assert not any(content in packed for content in contents)
        restored = cloudpickle.loads(packed)
        assert restored.parameters == program.parameters
        assert restored.train.sites == program.train.sites
