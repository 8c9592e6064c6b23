"""Plans with replicas, run on emulated stages: whether a step takes what its plan predicts.

    python jobs/check/replicated_steps.py        2-1, 1-2, 2-2, 3-1 and data parallelism on 4 workers, at 333 Mbit/s

Layers are those of bench/vs_dp, which sleep as an accelerator works, thirty times as long, and each worker's messages
wait before its one way out, for three times as long as at 1000 Mbit/s. So what all workers compute on the few
processors of this machine is small, though it counts: where everything that sleeps took a third of it, steps of 400 to
700 ms took 3 to 10 % more than predicted. The exit status is 1 where a step takes 5 % more or less than predicted.

    step_of_prediction_<shape>     the median step over the plan's: the product of the next two
    step_of_actions_<shape>        the median step over one that is simulated from forwards and backwards as they ran
    actions_of_profile_<shape>     that simulated step over the plan's, whose forwards and backwards were profiled

So a step is off by the second where the model of a step leaves something out (messages, what replicas wait for, the
optimizer), and by the third where stages ran at another speed than their profile, as they do on a machine that is busy.

    --folder FOLDER    shapes that have been run are kept there, with their load and commit, and not run again
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.bench.vs_dp.run import Asked, plan_of, run_plan, shape_of
from jobs.lib import common
from jobs.lib.kept_cells import OPTION, KeptCells
from raypipe.ir.plan import Plan
from raypipe.planner.schedule.lower import lower
from raypipe.planner.tune.predict import costs_of, step_of

SHAPES = ((2, 1), (1, 2), (2, 2), (3, 1), (4,))
MBIT, STEPS, SLOWER = 333.0, 24, 30
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
    return Asked("parameters", sum(shape), MBIT * SLOWER, steps, SLOWER)


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


def measure(shape: tuple[int, ...], on: Asked) -> dict[str, Any]:
    """Plan a shape, and run it: seconds of a step as predicted, as simulated from its actions, and as measured."""
    plan = plan_of(on, shape)
    assert plan.prediction is not None
    ran = run_plan(on, plan, 1.0)
    profiled = [(stage.forward_s, stage.backward_s) for stage in plan.prediction.stages]
    seconds = plan.prediction.step_s, simulated_s(plan, ran.stage_s), ran.step_s
    return {"plan": shape_of(plan), "seconds": seconds, "profiled_s": profiled, **ran._asdict()}


def main() -> int:
    """1 where a prediction did not hold."""
    asked = common.arguments(__doc__, options=OPTION)
    kept = KeptCells(asked.folder)
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    rows: list[list[Any]] = []
    for shape in SHAPES[:1] if asked.quick else SHAPES:
        on = scene(shape, 8 if asked.quick else STEPS)
        name = "_".join(map(str, shape))
        found = kept.measured(f"shape-{name}", [shape, on, on.layers], functools.partial(measure, shape, on))
        predicted_s, from_actions_s, measured_s = found["seconds"]
        ratios = measured_s / predicted_s, measured_s / from_actions_s, from_actions_s / predicted_s
        for figure, ratio in zip(FIGURES, ratios, strict=True):
            figures[f"{figure}_{name}"] = ratio
        raw[name] = found
        rows.append([found["plan"], *(1e3 * s for s in found["seconds"]), *ratios])
        print(f"{found['plan']}: {1e3 * measured_s:.0f} ms a step, {ratios[0]:.3f} of its prediction", flush=True)
    columns = (
        "workers by stage x micro-batches", "predicted, ms", "from its actions", "measured",
        "measured / predicted", "measured / from actions", "from actions / predicted",
    )  # fmt: skip
    print(common.table(f"steps of replicated plans; {common.machine_line()}", columns, rows))
    kept.date(asked)
    common.finish("check_replicated_steps", figures, {**raw, "measured": kept.told}, asked)
    return (
        0 if all(abs(ratio - 1) <= TOLERANCE for name, ratio in figures.items() if name.startswith(FIGURES[0])) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
