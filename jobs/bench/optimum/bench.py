"""Distance of schedules from the shortest possible step, which CP-SAT proves for small pipelines.

    pip install ortools
    python jobs/bench/optimum
    python jobs/bench/optimum --quick

Cases are drawn at random: 2 to 4 unequal stages, one per worker, 2 to 8 micro-batches, and links from free to slower
than a stage. Memory is for S micro-batches per stage (as the first stage of 1F1B and every stage of ZB-H1 hold), for
more, or for a different number on every stage. Two optima are proven for each case: with whole backwards, and with
backwards that are split into input and weight gradients. A figure of 1.03 is a step 3 % longer than the optimum; all
steps are the simulator's.

    auto      the planner's choice of an order, from the kinds with whole backwards or from all
    listed    the best of a dozen list schedules, which the planner does not have yet (listed.py)
    either    the better of the two

The record has every case with its optimal schedules in the CSV form of torch.distributed.pipelining, so that other
schedulers can be compared with the same optima.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.bench.optimum.exact import Case, Optimum, optimum
from jobs.bench.optimum.listed import listed
from jobs.lib.common import Bench
from raypipe.ir.schedule import Action, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.candidates import ScheduleQuery, candidates
from raypipe.planner.dependency_tables import build
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.text import from_csv, to_csv
from raypipe.planner.simulator import makespan_s

NAMES = {"whole": ("gpipe", "1f1b", "auto"), "split": ("1f1b", "zb_h1", "auto")}
"""Kinds of schedules that are compared with each of the two optima."""


@dataclass(frozen=True)
class Settings:
    """Number of drawn cases, seed, and seconds that the proof of one optimum may take."""

    cases: int = 200
    seed: int = 41
    limit_s: float = 60.0


BENCH = Bench(
    "optimum",
    __doc__,
    settings=Settings(),
    quick=Settings(cases=12, limit_s=10.0),
    layout={
        "mean": r"over_optimum_(\w+)_mean",
        "worst": r"over_optimum_(\w+)_worst",
        "cases that fit": r"over_optimum_(\w+)_cases",
    },
    targets={r"over_optimum_auto_\w+_mean": "<= 1.03", r"over_optimum_auto_\w+_worst": "<= 1.08"},
)


def draw(drawn: random.Random) -> Case:
    """Draw a case; a forward takes 100 to 200 units of time."""
    stages, microbatches = drawn.randint(2, 4), drawn.randint(2, 8)
    uneven = drawn.choice((1.0, 1.3, 2.0))
    forward = tuple(round(100 * drawn.uniform(1, uneven)) for _ in range(stages))
    inputs, weights = (tuple(round(f * drawn.uniform(0.8, 1.2)) for f in forward) for _ in range(2))
    slow = drawn.choice((0.0, 0.2, 0.6, 1.2))
    occupancy, latency = (
        tuple(round(100 * slow * drawn.uniform(least, 1)) for _ in range(stages - 1)) for least in (0.3, 0.0)
    )
    most = drawn.choice((stages, stages, stages + 1, stages + 2, microbatches))
    limit = (most,) * stages
    if drawn.random() < 0.2:
        limit = tuple(stages - stage + drawn.randint(0, 2) for stage in range(stages))
    return Case(microbatches, forward, inputs, weights, occupancy, latency, tuple(min(n, microbatches) for n in limit))


def steps_of(case: Case) -> dict[str, dict[str, float]]:
    """Simulate the schedules that fit into the memory of a case: step by optimum and name, as in NAMES."""
    stages = len(case.forward)
    spec = ScheduleSpec("1f1b", case.microbatches)
    question = ScheduleQuery(
        schedule="auto",
        now=spec,
        busy_s=[f + b for f, b in zip(case.costs.forward_s, case.costs.backward_s, strict=True)],
        round_trip_s=[2.0 * (busy + late) for busy, late in zip(case.occupancy, case.latency, strict=True)],
        fits=lambda one: _fits(case, one),
        score=lambda one: _step(case, schedule_of(one, stages)),
    )
    fixed = {
        "gpipe": [spec.as_kind("gpipe")],
        "1f1b": [spec],
        "zb_h1": [spec.as_kind("zb-h1", slack=(1,) * (stages - 1))],
    }
    steps: dict[str, dict[str, float]] = {}
    for kind, names in NAMES.items():
        split = kind == "split"
        tried = fixed | {"auto": list(candidates(question._replace(split_backward=split)))}
        steps[kind] = {
            name: min(question.score(one) for one in fitting)
            for name in names
            if (fitting := [one for one in tried[name] if _fits(case, one)])
        }
        steps[kind]["listed"] = listed_s = min(_step(case, _checked(case, rows)) for rows in listed(case, split=split))
        steps[kind]["either"] = min(steps[kind]["auto"], listed_s)
    return steps


def _fits(case: Case, spec: ScheduleSpec) -> bool:
    held = build(lower(schedule_of(spec, len(case.forward)))).peak_in_flight()
    return all(count <= limit for count, limit in zip(held, case.limit, strict=True))


def _step(case: Case, schedule: Schedule) -> float:
    return makespan_s(lower(schedule), case.costs)


def proven(case: Case, kind: str, limit_s: float, known: float) -> tuple[Optimum, str]:
    """Find an optimum, and check its order of actions with the validator and the simulator; returns the order as CSV.

    Args:
        known: step of some schedule that fits.

    Raises:
        AssertionError: the simulator takes longer than CP-SAT computed, so that one of the two is wrong.
    """
    best = optimum(case, split=kind == "split", limit_s=limit_s, known=math.ceil(known))
    schedule = _checked(case, best.rows)
    if _step(case, schedule) > best.step:
        raise AssertionError(f"The simulator has {_step(case, schedule):g}, CP-SAT {best.step} for {case}:\n{best}")
    return best, to_csv(schedule)


def _checked(case: Case, rows: Sequence[Sequence[Action]]) -> Schedule:
    """Make a schedule of rows of actions, and check that it is valid and fits into the memory."""
    schedule = from_csv("".join(",".join(map(str, row)) + "\n" for row in rows))
    validate(lower(schedule))
    held = build(lower(schedule)).peak_in_flight()
    if any(count > most for count, most in zip(held, case.limit, strict=True)):
        raise AssertionError(f"{held} micro-batches are held, {case.limit} may be: {rows}")
    return schedule


def main() -> int:
    """Prove the optima of all cases, and compare."""
    run = BENCH.begin()
    drawn = random.Random(run.settings.seed)
    over: dict[str, list[float]] = defaultdict(list)
    raw, unproven = [], 0
    for _ in range(run.settings.cases):
        case = draw(drawn)
        row: dict[str, Any] = dataclasses.asdict(case)
        for kind, steps in steps_of(case).items():
            best, text = proven(case, kind, run.settings.limit_s, min(steps.values()))
            unproven += best.step > best.bound
            row[kind] = {"optimum": best.step, "bound": best.bound, "schedule": text, "steps": steps}
            for name, step in steps.items():
                over[f"{name}_{kind}"].append(step / best.step)
        raw.append(row)
    run.raw["cases"] = raw
    rows = []
    for name, ratios in over.items():
        mean, worst = statistics.mean(ratios), max(ratios)
        run.figures |= {
            f"over_optimum_{name}_mean": mean, f"over_optimum_{name}_worst": worst,
            f"over_optimum_{name}_cases": len(ratios),
        }  # fmt: skip
        rows.append(
            [name, len(ratios), mean, statistics.median(ratios), worst, sum(ratio < 1.0001 for ratio in ratios)]
        )
    run.figures["unproven"] = unproven
    run.table("step over optimum", ("schedule, optimum", "cases", "mean", "median", "worst", "optimal"), rows)
    run.end()
    return 0
