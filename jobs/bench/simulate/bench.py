"""Time of the simulator, and error of its predictions against measured steps.

Speed: generation, lowering and simulation of 1F1B, each trial in a process of its own; 64 stages and 4096
micro-batches are 1.6 million actions, 1024 stages 25 million. ``seconds_*`` is the sum of the three, which a planner
needs for one candidate; a timeline with every span is timed separately.

Prediction: |predicted - measured| / measured, where predicted is the makespan of ``PipelineTrainer.simulate()``,
computed before the run, and measured the median step of that run. Median over runs of

    emulated   stages that sleep, each for a time of its own that jitters from call to call
    real       small models of uneven layers, stage times as the profile of the plan has them

With --handicap, the emulated runs repeat with that much more sleep in every forward and backward: the measured step
must move by what the simulator predicts.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jobs.bench.simulate.predictions import WARM_UP_STEPS, Prediction, Settings
from jobs.lib.common import Bench, machine_line, median
from jobs.lib.processes import in_child

CHILD_TIMEOUT_S = 600.0
BENCH = Bench(
    "bench_simulate",
    __doc__,
    settings=Settings(),
    quick=Settings(((64, 4096),), 1, ((2, 8, "1f1b"), (3, 8, "slack")), WARM_UP_STEPS + 4),
    layout={
        "seconds": r"seconds_(s\d+_m\d+)",
        "make": r"make_seconds_(s\d+_m\d+)",
        "lower": r"lower_seconds_(s\d+_m\d+)",
        "makespan": r"makespan_seconds_(s\d+_m\d+)",
        "timeline": r"timeline_seconds_(s\d+_m\d+)",
        "peak GB": r"peak_gbytes_(s\d+_m\d+)",
    },
    handicap=True,
)

# Speed.


class Phases(NamedTuple):
    """One trial: seconds, actions, processor seconds of the whole process and its largest size."""

    make_s: float
    lower_s: float
    makespan_s: float
    timeline_s: float
    actions: int
    cpu_s: float
    peak_bytes: int

    @property
    def total_s(self) -> float:
        return self.make_s + self.lower_s + self.makespan_s


def _simulate(shape: tuple[int, int], timeline: bool, file: str) -> None:
    """Run every phase once, in a child."""
    from raypipe.planner.schedule.lower import lower
    from raypipe.planner.schedule.sync import one_f_one_b
    from raypipe.planner.simulator import Costs, makespan_s, simulate

    draw = random.Random(0)
    stages, microbatches = shape
    forward, backward = (tuple(draw.uniform(0.5, 1.5) for _ in range(stages)) for _ in range(2))
    latency = tuple(draw.uniform(0.0, 0.2) for _ in range(stages - 1))
    costs = Costs(forward, backward, forward_latency_s=latency, backward_latency_s=latency)
    marks = [time.perf_counter()]
    schedule = one_f_one_b(stages, microbatches)
    marks.append(time.perf_counter())
    lowered = lower(schedule)
    marks.append(time.perf_counter())
    makespan_s(lowered, costs)
    marks.append(time.perf_counter())
    if timeline:
        simulate(lowered, costs)
        marks.append(time.perf_counter())
    took = [after - before for before, after in itertools.pairwise(marks)]
    used = resource.getrusage(resource.RUSAGE_SELF)
    phases = Phases(
        make_s=took[0],
        lower_s=took[1],
        makespan_s=took[2],
        timeline_s=took[3] if timeline else 0.0,
        actions=sum(map(len, lowered.body)),
        cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,
    )
    Path(file).write_text(json.dumps(phases))


def speed(settings: Settings) -> dict[tuple[int, int], list[Phases]]:
    """Run all trials by shape, shapes in turn."""
    found: dict[tuple[int, int], list[Phases]] = {shape: [] for shape in settings.shapes}
    for _ in range(settings.rounds):
        for shape in settings.shapes:
            phases = Phases(*in_child(_simulate, shape, shape[0] <= 64, limit_s=CHILD_TIMEOUT_S))
            found[shape].append(phases)
            print(f"S={shape[0]} M={shape[1]}: {phases.total_s:.2f} s; {machine_line()}", flush=True)
    return found


def speed_figures(found: dict[tuple[int, int], list[Phases]]) -> dict[str, float]:
    """Compute figures such as seconds_s64_m4096."""
    figures = {}
    for (stages, microbatches), trials in found.items():
        name = f"s{stages}_m{microbatches}"
        figures[f"seconds_{name}"] = median(t.total_s for t in trials)
        for phase in ("make", "lower", "makespan"):
            figures[f"{phase}_seconds_{name}"] = median(getattr(t, f"{phase}_s") for t in trials)
        if trials[0].timeline_s:
            figures[f"timeline_seconds_{name}"] = median(t.timeline_s for t in trials)
        figures[f"peak_gbytes_{name}"] = max(t.peak_bytes for t in trials) / 1e9
    return figures


# Prediction.


def errors(predictions: Iterable[Prediction]) -> float:
    """Compute the figure: the median of the predictions' errors."""
    return median(p.error for p in predictions)


def main() -> int:
    """Return 1 if a handicap did not show as predicted, else 0."""
    from jobs.bench.simulate import runs  # not above: children that time the simulator need no torch

    run = BENCH.begin()
    quick, handicap_s = run.options.quick, run.options.handicap
    trials = speed(run.settings)
    run.figures |= speed_figures(trials)
    predictions = {"emulated": runs.emulated(run.settings, 0.0, quick), "real": runs.real(run.settings, quick)}
    for kind, of_kind in predictions.items():
        run.figures[f"prediction_error_{kind}"] = errors(of_kind)
    seen = True
    if handicap_s:
        predictions["handicapped"] = runs.emulated(run.settings, handicap_s, quick)
        for plain, slowed in zip(predictions["emulated"], predictions["handicapped"], strict=True):
            ratio, moved = plain.measured_s / plain.predicted_s, slowed.measured_s / plain.predicted_s
            by = (slowed.predicted_s - plain.predicted_s) / plain.predicted_s
            seen = run.handicap_seen(plain.name, ratio, moved, by) and seen
    rows = [
        [f"S={s} M={m}", ts[0].actions, *(median(v) for v in zip(*(t[:4] for t in ts), strict=True)), t.total_s,
         t.peak_bytes / 1e9]
        for (s, m), ts in trials.items() for t in [min(ts, key=lambda t: t.total_s)]
    ]  # fmt: skip
    columns = ("shape", "actions", "make s", "lower s", "makespan s", "timeline s", "best total s", "GB")
    run.table("simulator", columns, rows)
    lines = [
        [f"{kind} {p.name}", p.predicted_s * 1e3, p.measured_s * 1e3, p.error]
        for kind, of_kind in predictions.items()
        for p in of_kind
    ]
    run.table("predictions", ("run", "predicted ms", "measured ms", "error"), lines)
    run.raw["speed"] = {"s{}_m{}".format(*shape): [t._asdict() for t in ts] for shape, ts in trials.items()}
    run.raw["predictions"] = {kind: [p._asdict() for p in of_kind] for kind, of_kind in predictions.items()}
    run.end()
    return 0 if seen else 1
