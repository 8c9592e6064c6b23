"""The race of bench/vs_dp: torch's DDP and raypipe's plans train the same, and figures are what they say."""

from __future__ import annotations

import pytest

from jobs.bench.vs_dp import race
from jobs.bench.vs_dp.ddp import run_ddp
from jobs.bench.vs_dp.models import MODELS
from jobs.bench.vs_dp.run import Asked, Ran, plan_of, run_plan, shape_of
from jobs.check.replicated_steps import simulated_s

SCENE = Asked("parameters", 2, 200.0, 5)


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the race sets for its process is as it was afterwards."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", "set anew by every plan")


@pytest.fixture
def quick_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that hardly sleep, in this process; what the planner finds depends on it no more than on the machine."""
    for name, model in list(MODELS.items()):
        monkeypatch.setitem(MODELS, name, model._replace(sample_s=1e-6))


@pytest.mark.usefixtures("quick_layers")
def test_plans_train_as_ddp_does() -> None:
    """The same losses, to the order of sums, whoever trains; in bf16 nearly so."""
    ddp = run_ddp(SCENE._replace(mbit=100_000.0), 0.0)
    assert ddp.reached == 5
    assert ddp.step_bytes == pytest.approx(2 * 4 * sum(p.numel() for p in MODELS["parameters"].build().parameters()))
    for shape in ((2,), (1, 1)):
        plan = plan_of(SCENE, shape)
        assert shape_of(plan).startswith("-".join(map(str, shape)))
        ran = run_plan(SCENE, plan, 0.0, local=True)
        race.check_losses(shape_of(plan), ddp, ran)
        assert ran.accuracy == pytest.approx(ddp.accuracy, abs=0.01)
        assert len(ran.stage_s) == len(shape)
        assert all(0 < seconds < ran.step_s * 10 for stage in ran.stage_s for seconds in stage)
    with pytest.raises(RuntimeError, match="after step 1 the losses"):
        race.check_losses("another", ddp, ddp._replace(losses=[ddp.losses[0], 0.0]))


def test_exact_training_stops_two_evaluations_behind_ddp() -> None:
    asked = Asked("parameters", 2, 200.0, 200)
    assert race.steps_of(asked, Ran(0.1, 1.0, [], 90, 0.9)).steps == 100
    assert race.steps_of(asked, Ran(0.1, 1.0, [], 5, 0.9)).steps == race.FEW_STEPS
    assert race.steps_of(asked, Ran(0.1, 1.0, [], 195, 0.9)).steps == 200
    assert race.steps_of(asked, Ran(0.1, 1.0, [], 0, 0.5)).steps == 200


def test_figures_follow_from_what_ran() -> None:
    chosen = plan_of(Asked("parameters", 4, 50.0, 5))
    assert {"data parallelism"} <= {each.kind for each in chosen.candidates}
    others = race.candidates_of(chosen)
    assert chosen.partition.replicas not in others.values()
    assert others["data parallelism"] == (4,)
    plans = {"choice": chosen, "data parallelism": plan_of(Asked("parameters", 4, 50.0, 5), (4,))}
    prediction = plans["data parallelism"].prediction
    assert prediction is not None
    (stage,) = prediction.stages
    computes_s = -(-plans["data parallelism"].num_microbatches // 4) * stage.busy_s
    ran = {
        "ddp": Ran(0.4, 8e6, [], 100, 0.9),
        "ddp bf16": Ran(0.3, 4e6, [], 110, 0.9),
        "choice": Ran(0.1, 1e6, [], 100, 0.9),
        "data parallelism": Ran(computes_s + stage.exchange_s, 8e6, [], 0, 0.0),
    }
    found = race.figures_of(Asked("parameters", 4, 50.0, 5), chosen, plans, ran)
    name = "parameters_4w_50mbit"
    assert found[f"step_{name}"] == pytest.approx(4.0)
    assert found[f"bf16_step_{name}"] == pytest.approx(3.0)
    assert found[f"time_to_accuracy_{name}"] == pytest.approx(4.0)
    assert found[f"choice_{name}"] == pytest.approx(1.0)
    assert found[f"hidden_{name}"] == pytest.approx(0.0, abs=1e-6)
    assert found[f"limit_{name}"] > 2.0
    assert found[f"mb_ddp_{name}"] == pytest.approx(8.0)


def test_a_step_is_simulated_anew_from_its_actions() -> None:
    """With the profile's own seconds it is the plan's; some twice as long where all forwards and backwards are."""
    plan = plan_of(SCENE._replace(workers=3, mbit=10_000.0), (2, 1))  # no plan with replicas splits backwards
    assert plan.prediction is not None
    profiled = [(stage.forward_s, stage.backward_s) for stage in plan.prediction.stages]
    assert simulated_s(plan, profiled) == pytest.approx(plan.prediction.step_s)
    twice_s = simulated_s(plan, [(2 * f_s, 2 * b_s) for f_s, b_s in profiled])
    assert 1.8 < twice_s / plan.prediction.step_s < 2.001
