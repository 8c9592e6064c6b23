"""Plans with replicas, run on emulated stages: whether a step takes what its plan predicts.

    python jobs/check/replicated_steps.py        2-1, 1-2, 2-2, 3-1 and data parallelism on 4 workers, at 1000 Mbit/s

Layers are those of bench/vs_dp, which sleep as an accelerator works, ten times as long, and each worker's messages wait
before its one way out; so what Python takes besides is small, though it counts. The exit status is 1 where a step takes
5 % more or less than predicted.

    step_of_prediction_<shape>     the median step over the plan's
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.bench.vs_dp.models import MODELS
from jobs.bench.vs_dp.run import Asked, plan_of, run_plan, shape_of
from jobs.lib import common

SHAPES = ((2, 1), (1, 2), (2, 2), (3, 1), (4,))
MBIT, STEPS, SLOWER = 1000.0, 24, 10
TOLERANCE = 0.05
LAYOUT: dict[str, str] = {"step / prediction": r"step_of_prediction_([\d_]+)"}
TARGETS: dict[str, str] = {r"step_of_prediction_[\d_]+": "0.95 to 1.05"}


def scene(shape: tuple[int, ...], steps: int) -> Asked:
    """The slow layers on as many workers as the shape has."""
    plain = MODELS["parameters"]
    MODELS["slow"] = plain._replace(sample_s=plain.sample_s * SLOWER)
    return Asked("slow", sum(shape), MBIT, steps)


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
        figures[f"step_of_prediction_{name}"] = ran.step_s / plan.prediction.step_s
        raw[name] = {"plan": shape_of(plan), "predicted_s": plan.prediction.step_s, **ran._asdict()}
        seconds = plan.prediction.step_s, ran.step_s
        rows.append([shape_of(plan), *(1e3 * s for s in seconds), figures[f"step_of_prediction_{name}"]])
    columns = ("workers by stage x micro-batches", "predicted, ms", "measured, ms", "measured / predicted")
    print(common.table(f"steps of replicated plans; {common.machine_line()}", columns, rows))
    common.finish("check_replicated_steps", figures, raw, asked)
    return 0 if all(abs(ratio - 1) <= TOLERANCE for ratio in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
