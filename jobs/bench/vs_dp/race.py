"""The race of bench/vs_dp: DDP, its bf16 hook, the planner's choice, and the best plan of every other kind.

    time_to_accuracy_<scene>   DDP's seconds to the held-out accuracy over those of the planner's choice
    step_<scene>               DDP's seconds per step over the choice's; bf16_step_ against its bf16 hook
    choice_<scene>             seconds per step of the best candidate over the choice's: 1 where it is the best
    limit_<scene>              what arithmetic allows: data parallelism's step on paper over the choice's
    data_parallel_<scene>      DDP's seconds per step over those of our own data parallelism
    hidden_<scene>             share of min(exchange, last backward) that our data parallelism did not wait for

A scene is a model, so many workers and a rate; it is measured as a whole, so that its candidates meet the same machine,
and kept (kept_cells.py). Steps are timed with layers and links that are SLOWER, all alike: at a scene's own speed half
of a step of eight workers was what two processors compute for them, and that says nothing of accelerators. Seconds to
accuracy are steps to it times the median step. DDP and the choice train until they are there, with layers that hardly
sleep: it takes them as many steps. All candidates begin with the same weights and see the same mini-batches, so that
exact ones have the same losses, but for the order of sums; where those of the first steps are not, the race is off.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from jobs.bench.vs_dp.ddp import run_ddp
from jobs.bench.vs_dp.models import MODELS
from jobs.bench.vs_dp.run import EVAL_EVERY, FEW_STEPS, Asked, Ran, plan_of, run_plan, shape_of
from jobs.lib import common
from jobs.lib.kept_cells import KeptCells
from raypipe.ir.plan import Plan

__all__ = ["candidates_of", "check_losses", "figures_of", "measure", "run", "steps_of"]

ENOUGH = 0.90
"""Of held-out accuracy; exact training gets there in some hundred steps."""
STEPS = 200
"""In which accuracy has to be enough."""
SLOWER, QUICKLY = 10.0, 0.01
"""Times as slow: what is timed, and what is trained to accuracy."""
WORKERS, RATES_MBIT = (2, 4, 8), (1000.0, 200.0)


def candidates_of(chosen: Plan) -> dict[str, tuple[int, ...]]:
    """Of every kind in the plan's table the quickest that is not the choice, by kind."""
    found: dict[str, tuple[int, ...]] = {}
    for each in sorted((c for c in chosen.candidates if not c.refused), key=lambda c: c.step_s):
        if not each.chosen and each.kind != "one worker":
            found.setdefault(each.kind, each.workers)
    return found


def check_losses(name: str, one: Ran, other: Ran) -> None:
    """See to it that two exact candidates did the same, but for the order of sums.

    That order is told after a hundred steps and more, when it has grown beyond 0.001 of a loss; so later ones are not
    compared, but for the accuracy that they lead to.

    Raises:
        RuntimeError: their losses part.
    """
    for step, (a, b) in enumerate(zip(one.losses[:FEW_STEPS], other.losses[:FEW_STEPS], strict=False)):
        if not math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4):
            raise RuntimeError(f"{name}: after step {step} the losses are {a} and {b}; they did not train the same")


def figures_of(asked: Asked, chosen: Plan, plans: dict[str, Plan], ran: dict[str, Ran]) -> dict[str, float]:
    """Of one scene.

    Args:
        plans: of ours, by name; "choice" among them.
        ran: all candidates by name: "ddp", "ddp bf16", and ours.
    """
    name, choice, ddp = asked.name, ran["choice"], ran["ddp"]
    assert chosen.prediction is not None
    figures = {
        f"step_{name}": ddp.step_s / choice.step_s,
        f"bf16_step_{name}": ran["ddp bf16"].step_s / choice.step_s,
        f"choice_{name}": min(each.step_s for each in ran.values()) / choice.step_s,
        f"mb_choice_{name}": choice.step_bytes / 1e6,
        f"mb_ddp_{name}": ddp.step_bytes / 1e6,
    }
    if ddp.reached and choice.reached:
        figures[f"time_to_accuracy_{name}"] = ddp.reached * ddp.step_s / (choice.reached * choice.step_s)
    parallel = next((key for key, plan in plans.items() if plan.partition.replicas == (asked.workers,)), None)
    if parallel is not None:
        found = plans[parallel].prediction
        assert found is not None
        (stage,) = found.stages
        figures[f"limit_{name}"] = found.step_s / chosen.prediction.step_s
        figures[f"data_parallel_{name}"] = ddp.step_s / ran[parallel].step_s
        rounds = -(-plans[parallel].num_microbatches // asked.workers)
        waited_s = ran[parallel].step_s - rounds * stage.busy_s
        figures[f"hidden_{name}"] = (stage.exchange_s - waited_s) / min(stage.exchange_s, stage.backward_s)
    return figures


def run(kept: KeptCells, *, quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """All scenes; figures, and what every candidate did.

    Args:
        kept: scenes that were measured before.
    """
    scenes = [Asked(*scene, STEPS) for scene in itertools.product(MODELS, WORKERS, RATES_MBIT)]
    if quick:
        scenes = [Asked("parameters", 2, 200.0, 10)]
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    for asked in scenes:
        if not kept.counts(f"race-{asked.name}"):
            continue
        known = [asked, MODELS[asked.model], FEW_STEPS, ENOUGH, SLOWER, quick]
        found = kept.measured(f"race-{asked.name}", known, functools.partial(measure, asked, quick=quick))
        figures |= found["figures"]
        raw[asked.name] = found["raw"]
    return figures, raw


def measure(asked: Asked, *, quick: bool) -> dict[str, dict[str, Any]]:
    """One scene: its figures, and what every candidate did.

    Args:
        quick: the choice and DDP only.
    """
    timed = asked._replace(slower=SLOWER, steps=min(FEW_STEPS, asked.steps))
    chosen = plan_of(timed)
    print(
        f"\n{asked.name}: {shape_of(chosen)}, {dict(chosen.reasons)['replicas']}; {common.machine_line()}", flush=True
    )
    plans = {"choice": chosen}
    plans |= {kind: plan_of(timed, shape) for kind, shape in candidates_of(chosen).items() if not quick}
    ran = {"ddp": run_ddp(timed, ENOUGH), "ddp bf16": run_ddp(timed, ENOUGH, bf16=True)}
    for name, plan in plans.items():
        ran[name] = run_plan(timed, plan, ENOUGH)
        check_losses(f"{asked.name}, {name}", ran["ddp"], ran[name])
    trained = _trained(asked._replace(slower=QUICKLY), chosen)
    ran |= {n: ran[n]._replace(reached=each.reached, accuracy=each.accuracy) for n, each in trained.items()}
    print(
        common.table(asked.name, COLUMNS, [_row(name, plans.get(name), each) for name, each in ran.items()]), flush=True
    )
    raw = {
        "plans": {name: shape_of(plan) for name, plan in plans.items()},
        "predicted_s": {name: plan.prediction and plan.prediction.step_s for name, plan in plans.items()},
        "ran": {name: each._asdict() for name, each in ran.items()},
    }
    return {"figures": figures_of(asked, chosen, plans, ran), "raw": raw}


def _trained(asked: Asked, chosen: Plan) -> dict[str, Ran]:
    """DDP and the choice, until their accuracy is enough."""
    ddp = run_ddp(asked, ENOUGH)
    choice = run_plan(steps_of(asked, ddp), chosen, ENOUGH)
    if ddp.reached and not choice.reached:  # later than expected: see when
        choice = run_plan(asked, chosen, ENOUGH)
    check_losses(f"{asked.name}, choice", ddp, choice)
    return {"ddp": ddp, "choice": choice}


def steps_of(asked: Asked, ddp: Ran) -> Asked:
    """As many as exact training needs, by what DDP needed, and two evaluations more: it trains the same."""
    return (
        asked._replace(steps=min(asked.steps, max(FEW_STEPS, ddp.reached + 2 * EVAL_EVERY))) if ddp.reached else asked
    )


COLUMNS = ("candidate", "plan", "ms per step", "predicted", "MB per step", "steps to accuracy", "accuracy")


def _row(name: str, plan: Plan | None, ran: Ran) -> list[Any]:
    predicted = "-" if plan is None or plan.prediction is None else f"{1e3 * plan.prediction.step_s:.1f}"
    shape = "-" if plan is None else shape_of(plan)
    accuracy = (ran.reached, f"{ran.accuracy:.3f}") if ran.reached else ("-", "-")
    return [name, shape, f"{1e3 * ran.step_s:.1f}", predicted, ran.step_bytes / 1e6, *accuracy]
