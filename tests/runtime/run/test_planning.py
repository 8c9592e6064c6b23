"""A run that goes on under another plan, made from what it holds, ends with the bits of one that was left alone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.local import LocalFleet
from raypipe.errors import PlanError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.planning import another, plan_for
from raypipe.runtime.run.requests import Requests
from tests.exactness import same_bits
from tests.models import CASES, Paced

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

STEPS = 6


def adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def trainer(folder: Path, run: str, name: str, sample_seconds: float = 0.0, **pipeline: Any) -> PipelineTrainer:
    case = CASES[name]
    samples = case.data(30)  # the last mini-batch of an epoch is short
    return PipelineTrainer(
        case.model(),
        loss_fn=case.loss_fn,
        optimizer=adamw,
        lr_scheduler=halved,
        train_data=Paced(samples, sample_seconds) if sample_seconds else samples,
        pipeline=PipelineConfig(
            **{"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters", **pipeline}
        ),
        run_config=SimpleNamespace(name=run, storage_path=str(folder)),
    )


class StopsAfter(Journal):
    """Asks the run to stop after a step."""

    def __init__(self, requests: Requests, step: int) -> None:
        super().__init__("run", "")
        self._requests, self._last = requests, step

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        super().step(record, reports)
        if record.step + 1 == self._last:
            self._requests.stop("another plan")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("noisy", (2, 3, 2)), ("unet", (2, 1, 3)), ("buffers", (3, 2))])
def test_another_number_of_stages_goes_on_with_the_same_bits(
    name: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    made = trainer(tmp_path, "changed", name, num_stages=stages[0])
    job = made._prepared()
    blueprint = pickle.loads(cloudpickle.dumps(made._blueprint(job, STEPS, local=True)))  # as it travels
    planned = plan_for(blueprint.basis)
    assert planned == job.planned
    first, done = planned.plan, []
    for generation, count in enumerate(stages):
        if generation:
            planned = plan_for(another(blueprint.basis, first, num_stages=count), generation=generation)
        requests, (run, setup, plan) = Requests(), assemble(blueprint, planned)
        assert (len(setup.programs), setup.generation) == (count, generation)
        fleet = LocalFleet(run, setup, job.tensors)
        try:
            watcher = StopsAfter(requests, STEPS * (generation + 1) // len(stages))
            done.append(run_loop(fleet, blueprint.spec, plan, watcher, requests).step)
        finally:
            fleet.stop()
    assert done == [STEPS * (i + 1) // len(stages) for i in range(len(stages))]
    alone = trainer(tmp_path, "alone", name, num_stages=stages[0]).fit(STEPS, local=True, progress=False)
    found, wanted = load_state_dict(tmp_path / "changed"), load_state_dict(alone.checkpoint)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same_bits(found[key], wanted[key])] == []


def test_a_plan_that_parts_mini_batches_otherwise_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, "run", "mlp")
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    other = trainer(tmp_path, "run", "mlp", num_microbatches=2)._prepared()
    with pytest.raises(PlanError, match="8 samples in micro-batches of 2, but the plan made for it has 8 in 4"):
        assemble(blueprint, other.planned)
