"""Several stages on a worker change no bit either, whatever sits beside what."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.engine.stage.placement import Placement
from raypipe.ir.schedule import single_homes
from tests.exactness import (
    SHAPES,
    differences,
    expected,
    faults,
    programs,
    train,
)
from tests.models import CASES, TIED

SCHEDULES = ("interleaved", "zb-v")
NAMES = [name for name in CASES if name not in TIED]
MANNER: dict[str, Any] = {"max_grad_norm": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_model(name: str) -> None:
    """Four stages on two workers: of a V, stages 1 and 2 are beside each other on one of them."""
    more = {**MANNER, **({"loss_reduction": "valid_tokens"} if name == "masked" else {})}
    for number, schedule in enumerate(SCHEDULES):
        shape = SHAPES[list(SHAPES)[(NAMES.index(name) + 2 * number) % len(SHAPES)]]
        run = train(name, 4, shape, schedule, "adamw", **more)
        assert faults(name, run, expected(name, shape, "adamw", **more)) == []
        assert {report.worker for report in run.reports[0]} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TIED, "gpt2"])
def test_tied_parameters(name: str) -> None:
    """In a V the embedding and the head that shares its weights are on one worker, as two copies with one gradient."""
    shape = SHAPES["ragged-epoch"]
    one = train(name, 1, shape, "1f1b", "sgd", **MANNER)
    for schedule in SCHEDULES:
        assert differences(train(name, 4, shape, schedule, "sgd", **MANNER), one) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "workers", "schedule"),
    [(2, 1, "zb-v"), (3, 1, "interleaved"), (4, 1, "interleaved"), (6, 2, "interleaved"), (6, 3, "zb-v"),
     (4, 4, "interleaved")],
)  # fmt: skip
def test_any_number_of_workers(stages: int, workers: int, schedule: str) -> None:
    shape = SHAPES["ragged-microbatch"]
    run = train("unet", stages, shape, schedule, "sgd", workers=workers)
    assert faults("unet", run, expected("unet", shape, "sgd")) == []
    assert len({report.worker for report in run.reports[0]}) == workers


@pytest.mark.slow
def test_what_crosses_no_link_is_no_traffic() -> None:
    shape = SHAPES["even"]
    told = train("sequential", 4, shape, "zb-v", "sgd").reports[-1]
    apart = train("sequential", 4, shape, "1f1b", "sgd").reports[-1]
    assert [report.sent_bytes[0] > 0 for report in told] == [True, False, True, False]
    norm_and_loss = 8  # which stage 2 hands to stage 3 where that is on another worker
    assert told[2].sent_bytes[0] == apart[2].sent_bytes[0] - norm_and_loss


def test_a_team_knows_its_neighbours() -> None:
    cut = programs("sequential", 4)
    there_and_back = Placement(single_homes((0, 1, 1, 0)), 1)
    assert there_and_back.stages == (1, 2)
    assert there_and_back.co_located(1) == {2}
    assert there_and_back.co_located(0) == frozenset()
    assert there_and_back.neighbours(cut) == {0}
    assert there_and_back.name_of(0) == "stages 0 and 3"
    round_and_round = [Placement(single_homes((0, 1, 2, 0, 1, 2)), worker) for worker in range(3)]
    six = programs("unet", 6)
    # The last worker hands on to the first.
    assert [placement.neighbours(six) for placement in round_and_round] == [{1, 2}, {0, 2}, {0, 1}]
    assert round_and_round[0].message_capacity(six, 2) == round_and_round[2].message_capacity(six, 0)
