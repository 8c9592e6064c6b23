"""Whether the number of micro-batches that raypipe chooses is the best one: all divisors swept, three models.

raypipe profiles a model at micro-batches of up to 8 samples, fits t(b) = sigma (b + b0), and plans. The stages of that
plan are then measured at every size, and emulated accelerators that take exactly those seconds (times one factor) run
through PipelineTrainer.fit at every divisor of the mini-batch, of half the mini-batch, and at the ends of the range:

    chosen_vs_best      the step at the chosen number / the best step of the sweep; the worst of all cases
    range_low, _high    the step at the last whole number within either end of the printed range / the best step
    number_kept         the chosen number kept while the mini-batch halves: how far its step / the best step moves;
                        number_kept_planned is that of the plans' own curves
    throughput_kept     the same change's samples per second, after / before: 1 where b0 is small beside b (Hu, 2024)
    chosen_x            chosen number / N*; chosen_x_half is that of the plan for half the mini-batch
    real_chosen_vs_best the two-stage models themselves on this machine's processors, overhead of the runtime included

    spread_by_number    throughput of four mini-batch sizes at every number: how far it varies where the number of
    spread_by_size      micro-batches is the same, and where their size is (grid.py)

With --handicap, the sweeps repeat with that much more in every forward and backward: the step at the chosen number,
over the simulated one, must move as the simulator says.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jobs.bench.microbatch.grid import figures_of as grid_figures_of
from jobs.bench.microbatch.grid import tables_of, throughputs
from jobs.bench.microbatch.sweeps import (
    MODELS,
    Case,
    Key,
    divisors,
    make_case,
    numbers_of,
    range_ends,
    real_steps_s,
    simulated_s,
    times_of,
)
from jobs.lib import common
from jobs.lib.common import machine_line, median
from jobs.lib.emulated import CPU_SHARE, run_in_turn

Steps = Mapping[Key, Sequence[float]]
LAYOUT: dict[str, str] = {
    "chosen": r"chosen_([a-z]+_\d)",
    "chosen / best": r"chosen_vs_best_([a-z]+_\d)",
    "range, low": r"range_low_([a-z]+_\d)",
    "range, high": r"range_high_([a-z]+_\d)",
    "number kept": r"number_kept_([a-z]+_\d)",
    "planned": r"number_kept_planned_([a-z]+_\d)",
    "throughput kept": r"throughput_kept_([a-z]+_\d)",
    "chosen / N*": r"chosen_x_([a-z]+_\d)",
    "of half": r"chosen_x_half_([a-z]+_\d)",
    "of half, chosen / best": r"half_chosen_vs_best_([a-z]+_\d)",
    "real, chosen / best": r"real_chosen_vs_best_([a-z]+_\d)",
    "spread by number": r"spread_by_number_([a-z]+_\d)",
    "spread by size": r"spread_by_size_([a-z]+_\d)",
}
TARGETS: dict[str, str] = {
    r"chosen_vs_best": "<= 1.03",
    r"range_(low|high)_[a-z]+_\d": "<= 1.07",
    r"number_kept_[a-z]+_\d": "<= 0.05",
}


class Settings(NamedTuple):
    """How much is measured.

    Attributes:
        sweeps: times that all numbers are run, one after the other.
        rounds: steps of each in every sweep.
        local: stages are threads of this process, which will do for stages that sleep.
        real: the two-stage models themselves are swept too.
        grid: mini-batch sizes whose throughput is compared.
    """

    models: tuple[str, ...] = tuple(MODELS)
    stages: tuple[int, ...] = (2, 4)
    minibatch_size: int = 64
    sweeps: int = 2
    rounds: int = 2
    repeats: int = 11
    local: bool = False
    real: bool = True
    grid: tuple[int, ...] = (16, 32, 64, 128)


QUICK = Settings(("mlp", "gpt"), (2,), 16, 1, 2, 5, local=True, real=False, grid=(8, 16))


def sweep(cases: Sequence[Case], settings: Settings, handicap_s: float) -> dict[str, dict[Key, list[float]]]:
    """Seconds of every step by case and key; cases of one number of stages and of micro-batches share a fleet."""
    found: dict[str, dict[Key, list[float]]] = {case.name: {} for case in cases}
    for _ in range(settings.sweeps):
        for count in settings.stages:
            alike = [case for case in cases if case.num_stages == count]
            wanted = numbers_of(alike, handicap_s > 0, settings.grid)
            for number, keys in wanted.items():
                plans = [
                    times_of(case, key.minibatch_size / number, handicap_s if key.slowed else 0.0) for case, key in keys
                ]
                steps = run_in_turn(plans, number, settings.rounds, local=settings.local)
                for (case, key), seconds in zip(keys, steps, strict=True):
                    found[case.name].setdefault(key, []).extend(seconds)
                print(f"S={count} N={number}: {len(keys)} plans; {machine_line()}", flush=True)
    return found


def best_s(steps: Steps, minibatch_size: int, *, slowed: bool = False) -> float:
    """The shortest step at any divisor, in medians; the ends of a range need not divide the mini-batch."""
    return min(median(steps[Key(minibatch_size, n, slowed)]) for n in divisors(minibatch_size))


def figures_of(case: Case, steps: Steps) -> dict[str, float]:
    """Of one case, without its name."""
    whole, half = case.minibatch_size, case.minibatch_size // 2
    best, best_of_half = best_s(steps, whole), best_s(steps, half)

    def step_s(number: int, samples: int = whole) -> float:
        return median(steps[Key(samples, number)])

    low, high = range_ends(case)
    in_range = min(best, step_s(low), step_s(high))
    figures = {
        "chosen": float(case.chosen),
        "chosen_vs_best": step_s(case.chosen) / best,
        "range_low": step_s(low) / in_range,
        "range_high": step_s(high) / in_range,
        "chosen_x": case.chosen / case.optimum,
        "chosen_x_half": case.half_chosen / case.half_optimum,
        "half_chosen_vs_best": step_s(case.half_chosen, half) / best_of_half,
    }
    if half % case.chosen == 0:  # the whole mini-batch has one divisor more
        kept_s = step_s(case.chosen, half)
        figures["number_kept"] = abs(kept_s / best_of_half - step_s(case.chosen) / best)
        figures["number_kept_planned"] = abs(over_best(case.half_predicted_s, case) - over_best(case.predicted_s, case))
        figures["throughput_kept"] = (half / kept_s) / (whole / step_s(case.chosen))
    return figures


def over_best(curve: Mapping[int, float], case: Case) -> float:
    """The plan's own curve at the chosen number, over its least."""
    return curve[case.chosen] / min(curve.values())


def handicap_seen(case: Case, steps: Steps, handicap_s: float) -> bool:
    """Whether the step at the chosen number, over the simulated one without a handicap, moved as the simulator says."""
    whole, number = case.minibatch_size, case.chosen
    ideal_s, slowed_s = (simulated_s(times_of(case, whole / number, extra_s), number) for extra_s in (0.0, handicap_s))
    plain, slowed = (median(steps[Key(whole, number, slow)]) / ideal_s for slow in (False, True))
    return common.handicap_seen(case.name, handicap_s, plain, slowed, slowed_s / ideal_s - 1)


def curve_table(case: Case, steps: Steps, real: Mapping[int, Sequence[float]]) -> str:
    """Every number of the whole mini-batch: what was measured, and what the plan had predicted."""
    whole, (low, high) = case.minibatch_size, range_ends(case)
    best, planned_best = best_s(steps, whole), min(case.predicted_s.values())
    real_best = min(map(median, real.values())) if real else 0.0
    rows = []
    for number in sorted(key.num_microbatches for key in steps if key.minibatch_size == whole and not key.slowed):
        measured = median(steps[Key(whole, number)])
        planned, here = case.predicted_s.get(number), real.get(number)
        names = {case.chosen: "chosen", low: "low", high: "high"}
        ideal = simulated_s(times_of(case, whole / number), number)
        rows.append(
            [number, whole / number, measured * 1e3, measured / ideal, measured / best,
             planned / planned_best if planned else "-", median(here) / real_best if here else "-",
             names.get(number, "")]
        )  # fmt: skip
    columns = ("N", "samples", "step ms", "/ simulated", "/ best", "planned / best", "real / best", "")
    title = (
        f"{case.name}: N* {case.optimum:.3g}, within {case.epsilon:.0%} from {case.low:.3g} to {case.high:.3g}; "
        f"seconds x {case.factor:.3g}"
    )
    return common.table(title, columns, rows)


def main() -> int:
    """1 when a handicap did not show as predicted, else 0."""
    asked = common.arguments(__doc__, handicap=True)
    settings = QUICK if asked.quick else Settings()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    real: dict[str, dict[int, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-microbatch-"))
        os.environ["RAYPIPE_CACHE_DIR"] = folder  # profiles of today, not those that an earlier run has left
        cases = [
            make_case(model, count, settings.minibatch_size, settings.repeats, max(settings.grid))
            for model in settings.models
            for count in settings.stages
        ]
        if not settings.local:
            from raypipe.runtime.driver.client import connected

            stack.enter_context(connected(max(settings.stages), {"CPU": CPU_SHARE}))  # one Ray for all runs
        for case in cases if settings.real else ():
            if case.num_stages == 2:  # as many as small machines have processors
                real[case.name] = real_steps_s(case, folder)
                print(f"{case.name}: real stages swept; {machine_line()}", flush=True)
        found = sweep(cases, settings, asked.handicap)
    seen = True
    for case in cases:
        steps = found[case.name]
        print("\n" + curve_table(case, steps, real.get(case.name, {})))
        compared = throughputs(steps, settings.grid)
        print("\n" + tables_of(case.name, compared))
        some = figures_of(case, steps) | grid_figures_of(compared)
        figures |= {f"{name}_{case.name}": value for name, value in some.items()}
        if asked.handicap:
            seen = handicap_seen(case, steps, asked.handicap) and seen
    for name, sweeps in real.items():
        chosen = next(case.real_chosen for case in cases if case.name == name)
        figures[f"real_chosen_vs_best_{name}"] = median(sweeps[chosen]) / min(map(median, sweeps.values()))
    figures["chosen_vs_best"] = max(figures[f"chosen_vs_best_{case.name}"] for case in cases)
    print("\n" + summary(cases, figures))
    raw: dict[str, Any] = {
        "cases": [case._asdict() for case in cases],
        "steps_s": {name: [[*key, seconds] for key, seconds in steps.items()] for name, steps in found.items()},
        "real_steps_s": real,
    }
    common.finish("bench_microbatch", figures, raw, asked)
    return 0 if seen else 1


def summary(cases: Sequence[Case], figures: Mapping[str, float]) -> str:
    """A line per case."""
    names = (
        "chosen", "chosen_vs_best", "range_low", "range_high", "number_kept", "number_kept_planned", "throughput_kept",
        "chosen_x", "chosen_x_half", "real_chosen_vs_best", "spread_by_number", "spread_by_size",
    )  # fmt: skip
    rows = [[case.name, *(figures.get(f"{name}_{case.name}", "-") for name in names)] for case in cases]
    return common.table(f"micro-batches; {machine_line()}", ("case", *names), rows)
