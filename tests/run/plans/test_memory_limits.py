"""A stage that runs out of memory: the run goes on with a plan in which it holds less, or says what was not enough."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import FailureConfig
from torch import nn

from raypipe import PipelineTrainer
from raypipe.errors import StageError
from raypipe.ir.plan import Plan, peak_in_flight
from raypipe.prepare import prepare
from tests.exactness import unequal
from tests.given_times import with_times
from tests.mishaps import Crowd
from tests.models import vectors
from tests.runtime.fleet.test_recovery import events
from tests.trainers import adamw, trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 10
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def given_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that take a tenth of a message's way, so that plans let stages run ahead, on any machine."""
    measured = prepare.profile_of
    monkeypatch.setattr(prepare, "profile_of", lambda *given, **more: with_times(measured(*given, **more), 1e-5))


def trainer(folder: Path, name: str, places: int, **pipeline: Any) -> PipelineTrainer:
    """Two stages, the first of which has memory for so many micro-batches."""
    torch.manual_seed(0)
    block = [nn.Linear(6, 6), Crowd(name, places), nn.Tanh()]
    model = nn.Sequential(*block, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    run = SimpleNamespace(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1))
    given = {"num_microbatches": 8, "partitioner": "prefix_sum", **pipeline}
    return trainer_of(model, optimizer=adamw, train_data=vectors(32), run_config=run, **given)


def test_a_stage_without_memory_for_its_micro_batches_gets_fewer(local_ray: None, tmp_path: Path) -> None:
    made = trainer(tmp_path, "crowded", 2)
    assert peak_in_flight(made.plan().schedule) == (3, 1)  # slack 2, which holds one more than 1F1B
    result = made.fit(STEPS, progress=False)
    (failure,) = events(tmp_path / "crowded", "failure")
    assert failure["reason"].startswith("Stage 0 ran out of memory in 0F2, with ")
    (recovery,) = events(tmp_path / "crowded", "recovery")
    assert recovery["replaced"] == []  # the process lives
    plan = Plan.from_json((tmp_path / "crowded" / "plan.json").read_text())
    assert peak_in_flight(plan.schedule) == (2, 1)
    assert plan.generation == 1
    alone = trainer(tmp_path, "alone", 8).fit(STEPS, local=True, progress=False)
    assert unequal(result.checkpoint, alone.checkpoint) == []


def test_where_no_plan_needs_less_stage_bytes_and_fields_are_named(local_ray: None, tmp_path: Path) -> None:
    made = trainer(tmp_path, "hopeless", 2, num_stages=1, schedule="gpipe")
    words = r"(?s)Stage 0 ran out of memory in 0F2, with .*MiB in use.*memory_limit_bytes.*The run ends: a plan that"
    with pytest.raises(StageError, match=words):
        made.fit(STEPS, progress=False)
    assert len(events(tmp_path / "hopeless", "give up")) == 1
