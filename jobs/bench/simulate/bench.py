"""How long the simulator takes, and how far its predictions are from measured steps.

Speed: generation, lowering and simulation of 1F1B, each trial in a process of its own; 64 stages and 4096
micro-batches are 1.6 million actions, 1024 stages 25 million. ``seconds_*`` is the sum of the three, as a planner
needs them for one candidate; a timeline with every span is timed apart.

Prediction: |predicted - measured| / measured, where predicted is the makespan of ``PipelineTrainer.simulate()``,
asked before the run, and measured the median step of that run. Median over runs of

    emulated   stages that sleep, each for a time of its own that jitters from call to call
    real       small models of uneven layers, stage times as the profile of the plan has them

With --handicap, the emulated runs repeat with that much more sleep in every forward and backward: the measured step
must move by what the simulator says.
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
from jobs.lib import common
from jobs.lib.common import machine_line, median
from jobs.lib.processes import in_child

CHILD_TIMEOUT_S = 600.0


QUICK = Settings(((64, 4096),), 1, ((2, 8, "1f1b"), (3, 8, "slack")), WARM_UP_STEPS + 4)


# Speed.
LAYOUT: dict[str, str] = {
    "seconds": r"seconds_(s\d+_m\d+)",
    "make": r"make_seconds_(s\d+_m\d+)",
    "lower": r"lower_seconds_(s\d+_m\d+)",
    "makespan": r"makespan_seconds_(s\d+_m\d+)",
    "timeline": r"timeline_seconds_(s\d+_m\d+)",
    "peak GB": r"peak_gbytes_(s\d+_m\d+)",
}


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
    """In a child: every phase once."""
    from raypipe.planner.schedule.lower import lower
    from raypipe.planner.schedule.sync import one_f_one_b
    from raypipe.planner.simulate.serial import Costs, makespan_s, simulate

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
    """All trials by shape, shapes in turn."""
    found: dict[tuple[int, int], list[Phases]] = {shape: [] for shape in settings.shapes}
    for _ in range(settings.rounds):
        for shape in settings.shapes:
            phases = Phases(*in_child(_simulate, shape, shape[0] <= 64, limit_s=CHILD_TIMEOUT_S))
            found[shape].append(phases)
            print(f"S={shape[0]} M={shape[1]}: {phases.total_s:.2f} s; {machine_line()}", flush=True)
    return found


def speed_figures(found: dict[tuple[int, int], list[Phases]]) -> dict[str, float]:
    """seconds_s64_m4096 and its kin."""
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
    """The figure: the median of their errors."""
    return median(p.error for p in predictions)


def main() -> int:
    """1 when a handicap did not show as predicted, else 0."""
    from jobs.bench.simulate import runs  # not above: children that time the simulator need no torch

    asked = common.arguments(__doc__, handicap=True)
    settings = QUICK if asked.quick else Settings()
    trials = speed(settings)
    figures = speed_figures(trials)
    found = {"emulated": runs.emulated(settings, 0.0, asked.quick), "real": runs.real(settings, asked.quick)}
    for kind, predictions in found.items():
        figures[f"prediction_error_{kind}"] = errors(predictions)
    seen = True
    if asked.handicap:
        found["handicapped"] = runs.emulated(settings, asked.handicap, asked.quick)
        for plain, slowed in zip(found["emulated"], found["handicapped"], strict=True):
            ratio, moved = plain.measured_s / plain.predicted_s, slowed.measured_s / plain.predicted_s
            by = (slowed.predicted_s - plain.predicted_s) / plain.predicted_s
            seen = common.handicap_seen(plain.name, asked.handicap, ratio, moved, by) and seen
    rows = [
        [f"S={s} M={m}", ts[0].actions, *(median(v) for v in zip(*(t[:4] for t in ts), strict=True)), t.total_s,
         t.peak_bytes / 1e9]
        for (s, m), ts in trials.items() for t in [min(ts, key=lambda t: t.total_s)]
    ]  # fmt: skip
    columns: tuple[str, ...] = (
        "shape",
        "actions",
        "make s",
        "lower s",
        "makespan s",
        "timeline s",
        "best total s",
        "GB",
    )
    print("\n" + common.table(f"simulator; {machine_line()}", columns, rows))
    lines = [
        [f"{kind} {p.name}", p.predicted_s * 1e3, p.measured_s * 1e3, p.error]
        for kind, predictions in found.items()
        for p in predictions
    ]
    columns = ("run", "predicted ms", "measured ms", "error")
    print("\n" + common.table(f"predictions; {machine_line()}", columns, lines))
    raw = {
        "speed": {"s{}_m{}".format(*shape): [t._asdict() for t in ts] for shape, ts in trials.items()},
        "predictions": {kind: [p._asdict() for p in predictions] for kind, predictions in found.items()},
    }
    common.finish("bench_simulate", figures, raw, asked)
    return 0 if seen else 1
