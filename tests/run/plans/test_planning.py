"""A run that goes on under another plan, made from what it holds, ends with the bits of one that was left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import PipelineTrainer
from raypipe.engine.local import LocalFleet
from raypipe.errors import PlanError
from raypipe.planner.elastic import with_spares
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.plans.plans import Plans, regroup, wanted_workers
from raypipe.run.requests import Requests
from raypipe.run.spec import RequestedSize
from tests.exactness import unequal
from tests.models import CASES, Paced
from tests.run.loops import Acts
from tests.trainers import adamw, trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

STEPS = 6


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def trainer(folder: Path, run: str, name: str, sample_seconds: float = 0.0, **pipeline: Any) -> PipelineTrainer:
    case = CASES[name]
    samples = case.data(30)  # the last mini-batch of an epoch is short
    return trainer_of(
        case.model(), folder, run, loss_fn=case.loss_fn, optimizer=adamw, lr_scheduler=halved,
        train_data=Paced(samples, sample_seconds) if sample_seconds else samples, **pipeline,
    )  # fmt: skip


SHAPES = {
    "1f1b": ({"num_replicas": 2}, [(2, None), (2, 1), (3, (2, 1, 1)), (1, 2)]),
    "zb-v": ({"num_replicas": 2, "num_stages": 4}, [(4, None), (4, 1), (2, 2)]),
}
"""What a run is configured with, and the stages and replicas that it has one after the other."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SHAPES)
def test_other_stages_and_replicas_in_the_same_lanes_go_on_with_the_same_bits(schedule: str, tmp_path: Path) -> None:
    given, shapes = SHAPES[schedule]
    made = trainer(tmp_path, "changed", "noisy", schedule=schedule, **given)
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    plans = Plans(blueprint, assemble(blueprint, job.planned))
    for number, (stages, replicas) in enumerate(shapes, 1):
        made_of = plans.made if number == 1 else plans.resized(stages, replicas)
        assert made_of.plan.partition.replicas == (
            (2,) * stages if replicas is None else replicas if isinstance(replicas, tuple) else (replicas,) * stages
        )
        assert made_of.setup.lanes == 2
        fleet, requests = LocalFleet(blueprint.setup, made_of.setup, job.tensors), Requests()
        try:
            watcher = Acts(requests, {STEPS * number // len(shapes): lambda asked: asked.stop("another plan")})
            run_loop(LoopSetup(fleet, blueprint.spec, made_of, watcher, requests))
        finally:
            fleet.stop()
    alone = trainer(tmp_path, "alone", "noisy", num_lanes=2).fit(STEPS, local=True, progress=False)
    assert unequal(tmp_path / "changed", alone.checkpoint) == []


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        ({"num_replicas": [2, 1]}, (3, None), r"\(2, 1\) has numbers for 2 stages. .* resize\(3, num_replicas=1\)"),
        ({"num_replicas": 2}, (2, (3, 1)), r"num_replicas=\(3, 1\): .* 2 lanes, .* than 2 replicas.* num_lanes=6"),
        ({}, (2, 2), "num_replicas=2: the run sums gradients in one lane, .* more than 1 replica. .* num_lanes=2"),
        (
            {"num_replicas": 2, "schedule": "pipedream"}, (2, 1),
            "num_replicas=2-2 with schedule='pipedream': how old weights are follows from stages and replicas",
        ),
        ({"num_replicas": 2, "schedule": "zb-v"}, (4, (2, 2, 1, 2)), "'zb-v'.* num_replicas=2"),
    ],
)  # fmt: skip
def test_a_resize_that_would_change_bits_is_refused_by_name(
    given: dict[str, Any], asked: tuple[int, Any], words: str, tmp_path: Path
) -> None:
    made = trainer(tmp_path, "run", "mlp", **given)
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    with pytest.raises(PlanError, match=words):
        Plans(blueprint, assemble(blueprint, job.planned)).resized(*asked)


def test_what_a_run_is_to_have_follows_what_was_asked_for_last(tmp_path: Path) -> None:
    """Also for a later driver, while replicas are missing; fewer workers than stages have fewer stages."""
    job = (made := trainer(tmp_path, "run", "mlp", num_replicas=[2, 1]))._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    plans = Plans(blueprint, assemble(blueprint, job.planned))
    assert (plans.replicas, plans.for_fewer(2).plan.partition.replicas) == ((2, 1), (1, 1))
    plans.made = plans.for_fewer(1)
    assert (plans.made.plan.partition.replicas, plans.replicas) == ((1,), ())
    assert with_spares(plans.made.setup.homes, plans.replicas, 2) == (1,), "a spare does not bring a stage back"
    plans.made = plans.resized(2, (1, 2))
    plans.requested = RequestedSize(2, 3, (1, 2))
    lost = plans.regrouped((1, 1))
    later = Plans(blueprint, lost, plans.requested)
    assert later.replicas == plans.replicas == (1, 2)
    assert wanted_workers(job.basis.request, lost.plan, plans.requested) == 3
    assert later.planned_for(2).plan.partition.replicas == (1, 1)
    plans.requested = RequestedSize(2, 2, (1, 1))
    assert plans.replicas == ()


@pytest.mark.parametrize("schedule", ["slack", "zb-h1", "pipedream"])
def test_slack_by_hop_is_the_planners_where_there_are_other_hops(schedule: str, tmp_path: Path) -> None:
    """After a resize, a growth or a loss; with as many stages as at first it is what was given."""
    job = (made := trainer(tmp_path, "run", "noisy", schedule=schedule, num_stages=3, slack=[2, 1]))._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    plans = Plans(blueprint, assemble(blueprint, job.planned))
    for stages in (2, 4, 1):
        spec = plans.resized(stages, None).plan.spec
        assert spec is not None
        assert len(spec.slack) == stages - 1
    assert plans.planned_for(2).plan.partition.num_stages == 2
    again = plans.resized(3, None).plan.spec
    assert again is not None
    assert again.slack == (2, 1)


def test_the_controller_of_those_that_are_left_knows_how_many_they_are(tmp_path: Path) -> None:
    made = trainer(tmp_path, "turned", "mlp", num_replicas=[2, 1], codec_forward="auto")
    job = made._prepared()
    whole = assemble(made._blueprint(job, STEPS, local=False), job.planned)
    assert whole.retune is not None
    assert whole.retune.choice.spec.replicas == (2, 1)
    less = regroup(whole, (1, 1), 1)
    assert less.retune is not None
    assert less.retune.choice.spec == less.plan.spec
    assert less.retune.choice.spec.replicas == (1, 1)
    assert replace(less.retune, choice=whole.retune.choice) == whole.retune
