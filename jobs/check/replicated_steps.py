"""Plans with replicas, run on emulated stages: whether a step takes what its plan predicts.

    python jobs/check/replicated_steps.py        2-1, 1-2, 2-2, 3-1 and data parallelism on 4 workers, at 1000 Mbit/s

Layers are those of bench/vs_dp, which sleep as an accelerator works, ten times as long, and each worker's messages wait
before its one way out; so what Python takes besides is small, though it counts. The exit status is 1 where a step takes
5 % more or less than predicted.

    step_of_prediction_<shape>     the median step over the plan's: the product of the next two
    step_of_actions_<shape>        the median step over one that is simulated from forwards and backwards as they ran
    actions_of_profile_<shape>     that simulated step over the plan's, whose forwards and backwards were profiled

So a step is off by the second where the model of a step leaves something out (messages, what replicas wait for, the
optimizer), and by the third where stages ran at another speed than their profile, as they do on a machine that is busy.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.bench.vs_dp.models import MODELS
from jobs.bench.vs_dp.run import Asked, plan_of, run_plan, shape_of
from jobs.lib import common
from raypipe.ir.plan import Plan
from raypipe.planner.schedule.lower import lower
from raypipe.planner.tune.predict import costs_of, step_of

SHAPES = ((2, 1), (1, 2), (2, 2), (3, 1), (4,))
MBIT, STEPS, SLOWER = 1000.0, 24, 10
TOLERANCE = 0.05
FIGURES = ("step_of_prediction", "step_of_actions", "actions_of_profile")
LAYOUT: dict[str, str] = {
    "step / prediction": r"step_of_prediction_([\d_]+)",
    "step / simulated from its actions": r"step_of_actions_([\d_]+)",
    "that / prediction": r"actions_of_profile_([\d_]+)",
}
TARGETS: dict[str, str] = {r"step_of_prediction_[\d_]+": "0.95 to 1.05"}


def scene(shape: tuple[int, ...], steps: int) -> Asked:
    """The slow layers on as many workers as the shape has."""
    plain = MODELS["parameters"]
    MODELS["slow"] = plain._replace(sample_s=plain.sample_s * SLOWER)
    return Asked("slow", sum(shape), MBIT, steps)


def simulated_s(plan: Plan, stage_s: Sequence[tuple[float, float]]) -> float:
    """The plan's step, had its stages been profiled with these seconds.

    Args:
        stage_s: (forward, backward) of a micro-batch, by stage.
    """
    assert plan.prediction is not None
    forward_s, backward_s = zip(*stage_s, strict=True)
    # Only whole backwards run here, so how these split into two is not asked for.
    costs = dataclasses.replace(
        costs_of(plan.prediction.stages, plan.prediction.hops),
        forward_s=forward_s, backward_s=backward_s, backward_input_s=(), backward_weight_s=(),
    )  # fmt: skip
    return step_of(lower(plan.schedule), costs)[0]


def main() -> int:
    """1 where a prediction did not hold."""
    asked = common.arguments(__doc__)
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    rows: list[list[Any]] = []
    for shape in SHAPES[:1] if asked.quick else SHAPES:
        on = scene(shape, 8 if asked.quick else STEPS)
        plan = plan_of(on, shape)
        assert plan.prediction is not None
        ran = run_plan(on, plan, 1.0)
        name = "_".join(map(str, shape))
        seconds = plan.prediction.step_s, simulated_s(plan, ran.stage_s), ran.step_s
        ratios = seconds[2] / seconds[0], seconds[2] / seconds[1], seconds[1] / seconds[0]
        for figure, ratio in zip(FIGURES, ratios, strict=True):
            figures[f"{figure}_{name}"] = ratio
        profiled = [(stage.forward_s, stage.backward_s) for stage in plan.prediction.stages]
        raw[name] = {"plan": shape_of(plan), "predicted_s": seconds[0], "profiled_s": profiled, **ran._asdict()}
        rows.append([shape_of(plan), *(1e3 * s for s in seconds), *ratios])
    columns = (
        "workers by stage x micro-batches", "predicted, ms", "from its actions", "measured",
        "measured / predicted", "measured / from actions", "from actions / predicted",
    )  # fmt: skip
    print(common.table(f"steps of replicated plans; {common.machine_line()}", columns, rows))
    common.finish("check_replicated_steps", figures, raw, asked)
    return (
        0 if all(abs(ratio - 1) <= TOLERANCE for name, ratio in figures.items() if name.startswith(FIGURES[0])) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
