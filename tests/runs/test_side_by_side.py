"""Replicas of workers that hold several stages change no bit: neither of one worker each, nor of one stage on each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness import SHAPES, differences, train

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

MANNER: dict[str, Any] = {"max_grad_norm": 0.5}


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "replicas", "lanes", "shape", "more"),
    [
        ("mlp", "zb-v", 4, 2, 2, "even", {}),
        ("mlp", "interleaved", 4, 2, 2, "even", {}),
        ("mlp", "interleaved", 4, 3, 6, "ragged-epoch", {}),
        ("mlp", "zb-v", 4, 2, 5, "ragged-epoch", {}),
        ("tied-lm", "interleaved", 4, 2, 2, "even", {}),
        ("tied-lm", "zb-v", 2, 2, 2, "ragged-microbatch", {}),
        ("frozen-below", "zb-v", 4, 2, 4, "ragged-epoch", {}),
        ("frozen-middle", "interleaved", 4, 2, 2, "indivisible-by-k", {}),
        ("masked", "zb-v", 4, 2, 2, "ragged-microbatch", {"loss_reduction": "valid_tokens"}),
        ("dropout-sequential", "interleaved", 4, 2, 2, "even", {"recompute": "always"}),
    ],
)
def test_the_same_bits(
    name: str, schedule: str, stages: int, replicas: int, lanes: int, shape: str, more: dict[str, Any]
) -> None:
    """Losses, norms, gradients, parameters and buffers, to the unreplicated run of the same lanes."""
    workers = stages // 2
    run = train(name, stages, SHAPES[shape], schedule, "adamw", workers=replicas * workers, replicas=replicas,
                lanes=lanes, **MANNER, **more)  # fmt: skip
    one = train(name, stages, SHAPES[shape], schedule, "adamw", workers=workers, lanes=lanes, **MANNER, **more)
    plain = train(name, stages, SHAPES[shape], "1f1b", "adamw", lanes=lanes, **MANNER, **more)
    assert differences(run, one) == []
    assert differences(one, plain) == []
    assert {report.worker for report in run.reports[0]} == set(range(replicas * workers))
