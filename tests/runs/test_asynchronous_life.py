"""Asynchronous runs drain before a checkpoint, an evaluation and a stop, and go on as if that had been planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe
from raypipe import PipelineTrainer
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.plan import Plan
from raypipe.run.plans.blueprint import predicted_step
from raypipe.run.plans.planning import RECORDED_GAP
from tests.emulators.nets import frozen_first
from tests.exactness import unequal
from tests.given_times import with_times
from tests.models import CASES
from tests.prepare.test_resume import cosine, outcome
from tests.trainers import adamw, trainer_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]

STEPS, SAVED = 9, 4
MODES: dict[str, dict[str, Any]] = {
    "stashing": {"schedule": "pipedream"},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True},
    "bounded": {"schedule": "pipedream", "weight_versions": 2},
    "back-pressure": {"schedule": "pipedream", "weight_versions": 2, "update_interval": 1},
    "2bw": {"schedule": "2bw"},
    "2bw, clipped": {"schedule": "2bw", "max_grad_norm": 0.1},
    "stashing, clipped": {"schedule": "pipedream", "max_grad_norm": 0.1},
    "2bw, predicted": {"schedule": "2bw", "stale_correction": "predict"},
    "back-pressure, predicted": {
        "schedule": "pipedream",
        "weight_versions": 2,
        "update_interval": 1,
        "stale_correction": "predict",
    },
    "discounted": {"schedule": "pipedream", "stale_correction": "discount", "discount_updates": 6},
}


def trainer(
    folder: Path,
    run: str,
    *,
    stages: int = 3,
    name: str = "mlp",
    samples: int = 80,
    loss_fn: Any = None,
    resume: bool | None = None,
    **pipeline: Any,
) -> Any:
    case = CASES[name]
    return trainer_of(
        case.model(), folder, run, loss_fn=loss_fn or case.loss_fn, optimizer=adamw, lr_scheduler=cosine,
        train_data=case.data(samples), eval_data=case.data(10), resume=resume, num_stages=stages, **pipeline,
    )  # fmt: skip


def fit(found: PipelineTrainer, steps: int) -> Any:
    return found.fit(num_steps=steps, local=True, progress=False)


@pytest.mark.parametrize("mode", MODES)
def test_resuming_equals_a_run_that_drained_at_the_same_steps(mode: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path, "whole", checkpoint_interval_steps=SAVED, **MODES[mode])
    result = fit(whole, STEPS)
    assert "eval_loss" in result.metrics
    fit(trainer(tmp_path, "run", checkpoint_interval_steps=SAVED, **MODES[mode]), SAVED)
    fit(trainer(tmp_path, "run", checkpoint_interval_steps=SAVED, **MODES[mode]), STEPS)
    rows, state = outcome(tmp_path / "run")
    expected_rows, expected = outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert unequal(state, expected) == []


@pytest.mark.parametrize(
    ("mode", "other", "words"),
    [
        ("stashing", {"stages": 2}, "num_stages: was 3, is 2\n"),
        ("vertical sync", {"stages": 2}, "num_stages: was 3, is 2\n"),
        ("stashing", {"slack": 2}, "slack: was 1, 1, is 2, 2\n"),
        ("stashing", {"stale_correction": "predict"}, "stale_correction: was none, is predict\n"),
        ("stashing", {"partitioner": ["layers.1", "layers.2"]}, "first operations of the stages: was"),
    ],
)
def test_what_decides_how_old_weights_are_does_not_change_in_silence(
    mode: str, other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    fit(trainer(tmp_path, "run", **MODES[mode]), 2)
    other = {**MODES[mode], **other}
    with pytest.raises(ConfigError, match="with other settings") as error:
        fit(trainer(tmp_path, "run", **other), 3)
    assert words in str(error.value)
    fit(trainer(tmp_path, "run", resume=True, **other), 3)


@pytest.mark.parametrize("mode", ["stashing", "2bw"])
def test_a_stop_in_the_middle_loses_and_repeats_nothing(mode: str, tmp_path: Path) -> None:
    handle = trainer(tmp_path, "run", samples=80_000, checkpoint_interval_steps=100_000, **MODES[mode]).start(
        num_steps=5_000, local=True
    )
    wait_until(lambda: handle.status().step >= 7)
    handle.stop()
    result = handle.wait()
    step = len(result.records)
    assert 7 <= step < 5_000
    assert [r.step for r in result.records] == list(range(step))
    rows, state = outcome(tmp_path / "run")
    # The run that was told from the beginning to end there drained at the same step.
    fit(trainer(tmp_path, "told", samples=80_000, checkpoint_interval_steps=100_000, **MODES[mode]), step)
    expected_rows, expected = outcome(tmp_path / "told")
    assert rows == expected_rows
    assert unequal(state, expected) == []


def test_2bw_predicts_the_same_on_any_number_of_stages(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"schedule": "2bw", "stale_correction": "predict", "checkpoint_interval_steps": SAVED}
    for run, stages in (("alone", (2, 2)), ("resized", (3, 1))):
        for steps, count in zip((SAVED, STEPS), stages, strict=True):
            fit(trainer(tmp_path, run, stages=count, **fields), steps)
    (rows, state), (others, resized) = outcome(tmp_path / "alone"), outcome(tmp_path / "resized")
    assert [row[:3] for row in others] == [row[:3] for row in rows]  # norms are totals of the stages' norms
    assert unequal(resized, state) == []


def test_an_epoch_of_one_small_mini_batch_is_synchronous(tmp_path: Path) -> None:
    for schedule in ("pipedream", "1f1b"):
        fit(trainer(tmp_path, schedule, samples=7, schedule=schedule), 6)
    assert unequal(outcome(tmp_path / "pipedream")[1], outcome(tmp_path / "1f1b")[1]) == []


def test_the_plan_says_what_is_late_and_survives_json(tmp_path: Path) -> None:
    plan = trainer(tmp_path, "run", schedule="pipedream", max_grad_norm=1.0).plan()
    assert "weights are updated every micro-batch with gradients that are 0 to 2 updates late" in str(plan)
    text = plan.explain()
    assert "stages keep 3, 2, 1 versions of their weights, and their gradients are 2, 1, 0 updates late" in text
    assert "AdamW is known to suffer from late gradients" in text
    assert "by the norm of each stage" in text
    assert sum(plan.weights.shares) == pytest.approx(1.0)
    assert Plan.from_json(plan.to_json()) == plan
    assert "late" not in str(trainer(tmp_path, "run", schedule="1f1b").plan())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "2bw", "stale_correction": "predict"}, "forwards use weights that are predicted from the last"),
        ({"schedule": "pipedream", "stale_correction": "discount"}, "divided by their delay to a power that falls to"),
    ],
)
def test_a_plan_describes_its_correction(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    plan = trainer(tmp_path, "run", **fields).plan()
    assert words in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("fields", "late"),
    [({"stages": 1, "stale_correction": "predict"}, "0"), ({"stages": 2, "stale_correction": "discount"}, "1")],
)
def test_a_correction_without_effect_is_refused(fields: dict[str, Any], late: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"stale_correction='.*' has no effect.* are {late} updates late at most"):
        trainer(tmp_path, "run", schedule="pipedream", **fields).plan()


def test_a_correction_where_late_stages_are_frozen_is_refused(tmp_path: Path) -> None:
    net = frozen_first("mlp", 2)
    with pytest.raises(PlanError, match=r"stale_correction='predict' has no effect.* are 0 updates late"):
        trainer_of(
            net.model(), tmp_path, "run", loss_fn=net.loss_fn, optimizer=adamw, train_data=net.data(80), num_stages=2,
            partitioner=tuple(map(str, net.cuts[2])), schedule="pipedream", stale_correction="predict",
        ).plan()  # fmt: skip


def test_a_discount_needs_learning_rates(tmp_path: Path) -> None:
    class Stepping(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"step_size": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["step_size"])

    case = CASES["mlp"]
    with pytest.raises(ConfigError, match="stale_correction='discount' multiplies learning rates"):
        trainer_of(
            case.model(), tmp_path, "run", loss_fn=case.loss_fn, optimizer=Stepping, train_data=case.data(80),
            num_stages=3, schedule="pipedream", stale_correction="discount",
        ).plan()  # fmt: skip


def test_a_parameter_on_two_stages_needs_updates_that_are_far_apart(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"belongs to several stages.*schedule='2bw'"):
        trainer(tmp_path, "run", name="tied-sequential", stages=2, schedule="pipedream").plan()
    result = fit(trainer(tmp_path, "run", name="tied-sequential", stages=2, schedule="2bw"), 3)
    assert all(torch.isfinite(torch.tensor(r.loss)) for r in result.records)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (MODES["stashing"], "so it refused the update"),
        (MODES["2bw, clipped"], "no stage took"),
        ({"schedule": "zb-h1"}, "so it refused the update"),
        ({"schedule": "zb-h1", "max_grad_norm": 0.5}, "so no stage took"),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run_with_a_sentence(
    mode: dict[str, Any], words: str, tmp_path: Path
) -> None:
    case = CASES["mlp"]
    calls = iter(range(100))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert case.loss_fn is not None
        loss = case.loss_fn(output, target)
        return loss * (float("nan") if next(calls) == 30 else 1.0)

    with pytest.raises(StageError, match=words):
        fit(trainer(tmp_path, "run", loss_fn=loss_fn, loss_reduction="mean", **mode), STEPS)


@pytest.mark.parametrize("fields", [{"schedule": "2bw"}, {"schedule": "zb-h1", "slack": 1}], ids=str)
def test_a_step_that_waits_for_no_norm_is_predicted_without_a_flush(fields: dict[str, Any], tmp_path: Path) -> None:
    found = trainer(tmp_path, "run", **fields)
    plan = found.plan(profiled=with_times(found.profile()))
    one_step = predicted_step(plan)
    assert one_step is not None
    assert plan.prediction is not None
    assert 0.0 < plan.prediction.step_s < one_step.makespan_s


def test_a_plan_with_an_open_schedule_has_the_price_of_2bw(tmp_path: Path) -> None:
    def reasons(**fields: Any) -> dict[str, str]:
        found = trainer(tmp_path, "run", num_microbatches=8, **fields)
        return dict(found.plan(profiled=with_times(found.profile())).reasons)

    open_one = reasons(schedule="auto")["2bw"]
    price = f"With AdamW that added {RECORDED_GAP['AdamW'][0]:.2f} nats"
    share = re.search(rf"schedule='2bw' would take (0\.\d\d) of the step, .* {price}", open_one)
    assert share is not None
    steps = {}
    for schedule in ("auto", "2bw"):
        found = trainer(tmp_path, "run", num_microbatches=8, schedule=schedule)
        prediction = found.plan(profiled=with_times(found.profile())).prediction
        assert prediction is not None
        steps[schedule] = prediction.step_s
    assert float(share[1]) == pytest.approx(steps["2bw"] / steps["auto"], abs=0.02)
    for fields in ({"schedule": "1f1b"}, {"schedule": "auto", "stages": 1}):
        assert "2bw" not in reasons(**fields)


def test_the_price_is_that_of_the_record() -> None:
    runs = json.loads((Path(raypipe.__file__).parents[1] / "docs/results/convergence.json").read_text())["runs"]
    for optimizer, gaps in RECORDED_GAP.items():
        for gap, correction in zip(gaps, ("", "_predict"), strict=True):
            name = f"own_rate_loss_gap_text_2bw_{optimizer.lower()}{correction}"
            assert gap == pytest.approx(next(run["figures"][name] for run in runs if name in run["figures"]), abs=0.005)


@pytest.mark.parametrize(
    ("fields", "overlaps"),
    [
        ({}, True),
        ({"max_grad_norm": 0.5}, False),
        ({"on_nonfinite": "skip"}, False),
        ({"name": "tied-sequential"}, False),
    ],
    ids=str,
)
def test_steps_overlap_unless_an_update_needs_the_norm_of_all(
    fields: dict[str, Any], overlaps: bool, tmp_path: Path
) -> None:
    plan = trainer(tmp_path, "run", schedule="zb-h1", **fields).plan()
    assert plan.schedule.wiring.norm_per_stage is overlaps
