"""kFkB and slack with the controller on contended links, against 1F1B: three levels of delays, and a shared wire.

Stages sleep 10 and 20 ms, M = 32; messages are held as the level says (jobs/lib/contention.py), the same
ones for every candidate. The first steps, in which the controller makes up its mind, are left out of all of them.
``contention_<level>_s<S>`` is 1F1B's seconds over kFkB's, over all steps that are left.

    p95         excess of the 95th percentile of a step over the median, kFkB's over 1F1B's
    best k      the memory-feasible k whose step is shortest on paper, with these very delays; ``k_near_best`` is the
                step on paper of the k that ran over that of the best
    simulated   the mean step on paper with these very delays and the stages' measured seconds over the mean measured
                one, of the steps that ran k
    prediction  the controller's last predictions, which are means over the delays it drew, over the same

Those delays are ours and say nothing of a network. ``lab_*`` are of real compute on two namespaces whose wire a real
flow takes in bursts, with kFkB's k and M chosen together under a memory limit (shared_link.py); it takes root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from jobs.bench.contention import shared_link
from jobs.lib import common
from jobs.lib.common import machine_line, median, quantile
from jobs.lib.contention import LEVELS, delay_s
from jobs.lib.held_links import contended
from jobs.lib.sleeping import Ran, run_sleeping
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control import UNKNOWN_IN_FLIGHT
from raypipe.planner.search.replay import Wire, compiled, step_s

FORWARD_S, BACKWARD_S, COUNT = 0.010, 0.020, 32
CANDIDATES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "kfkb": {"schedule": "kfkb"},
    "slack": {"schedule": "slack"},
}
LAYOUT: dict[str, str] = {
    "1F1B / kFkB": r"contention_(\w+_s\d+)",
    "p95 excess, kFkB's / 1F1B's": r"p95_(\w+_s\d+)",
    "k": r"k_((?:light|moderate|heavy)_s\d+)",
    "best k on paper": r"best_k_(\w+_s\d+)",
    "k's step / best k's, on paper": r"k_near_best_(\w+_s\d+)",
    "simulated / measured": r"simulated_(\w+_s\d+)",
    "predicted / measured": r"prediction_(\w+_s\d+)",
    "1F1B / slack": r"slack_((?:light|moderate|heavy)_s\d+)",
    "held, slack / kFkB": r"slack_held_vs_kfkb_(\w+_s\d+)",
    "shared wire: best 1F1B / kFkB": r"lab_gain_(light|moderate|heavy)",
    "1F1B with M = 8 / kFkB": r"lab_gain_m8_(light|moderate|heavy)",
    "kFkB's k": r"lab_k_(light|moderate|heavy)",
    "kFkB's M": r"lab_microbatches_(light|moderate|heavy)",
}
TARGETS: dict[str, str] = {
    r"contention_light_s\d+": ">= 1.04",
    r"contention_moderate_s\d+": ">= 1.15",
    r"contention_heavy_s\d+": ">= 1.30",
    r"p95_\w+": "<= 0.5",
    r"simulated_\w+": "0.95 to 1.05",
}


class Settings(NamedTuple):
    """How much is measured."""

    stages: tuple[int, ...] = (4, 8)
    levels: tuple[str, ...] = tuple(LEVELS)
    steps: int = 64
    left_out: int = 16
    candidates: tuple[str, ...] = tuple(CANDIDATES)


QUICK = Settings((4,), ("heavy",), 12, 4, ("1f1b", "kfkb"))


def on_paper_s(
    level: str, num_stages: int, group_size: int, steps: Sequence[int], stage_s: Sequence[tuple[float, float]] = ()
) -> float:
    """Mean step of kFkB with these very delays; stages take ``stage_s`` (F, B), or what they sleep."""
    program = compiled(ScheduleSpec("kfkb", COUNT, group_size=group_size), num_stages)
    forward_s, backward_s = zip(*(stage_s or [(FORWARD_S, BACKWARD_S)] * num_stages), strict=True)
    total_s = 0.0
    for step in steps:
        wires = [
            Wire(
                0.0,
                tuple(
                    delay_s(
                        LEVELS[level], FORWARD_S + BACKWARD_S, seed=1, hop=hop, forward=forward, step=step, microbatch=m
                    )
                    for m in range(COUNT)
                ),
            )
            for hop in range(num_stages - 1)
            for forward in (True, False)
        ]
        total_s += step_s(program, forward_s, backward_s, wires, (0.0,) * num_stages)
    return total_s / len(steps)


def excess(seconds: list[float]) -> float:
    """Of the 95th percentile over the median, relative."""
    return quantile(seconds, 0.95) / median(seconds) - 1.0


def judged(level: str, num_stages: int, runs: dict[str, Ran], settings: Settings) -> tuple[dict[str, float], list[Any]]:
    """Figures of one level, and the row."""
    kept = {name: ran.seconds[settings.left_out :] for name, ran in runs.items()}
    key = f"{level}_s{num_stages}"
    figures = {f"contention_{key}": sum(kept["1f1b"]) / sum(kept["kfkb"])}
    figures[f"p95_{key}"] = excess(kept["kfkb"]) / excess(kept["1f1b"])
    used = Counter(runs["kfkb"].schedules[settings.left_out :]).most_common(1)[0][0]
    k = 1 if used == "1f1b" else int(used.partition("k=")[2].split()[0])
    steps = range(settings.left_out, settings.steps)
    most = min(COUNT, UNKNOWN_IN_FLIGHT)  # k (S - s) micro-batches against 4 (S - s)
    paper = {k_: on_paper_s(level, num_stages, k_, steps) for k_ in range(1, most + 1)}
    best = min(paper, key=paper.__getitem__)
    figures[f"k_{key}"], figures[f"best_k_{key}"] = k, best
    figures[f"k_near_best_{key}"] = paper[k] / paper[best]
    same = [step for step in steps if runs["kfkb"].schedules[step] == used]
    measured_s = fmean(runs["kfkb"].seconds[step] for step in same)
    figures[f"simulated_{key}"] = on_paper_s(level, num_stages, k, same, runs["kfkb"].stage_s) / measured_s
    told = [event for event in runs["kfkb"].events if "predicted_s" in event and event["current"] == used]
    if told:
        figures[f"prediction_{key}"] = fmean(e["current_s"] for e in told[-5:]) / measured_s
    if "slack" in kept:
        figures[f"slack_{key}"] = sum(kept["1f1b"]) / sum(kept["slack"])
        figures[f"slack_held_vs_kfkb_{key}"] = max(runs["slack"].peaks) / max(runs["kfkb"].peaks)
    row = [key, median(kept["1f1b"]) * 1e3, figures[f"contention_{key}"], figures[f"p95_{key}"], f"{k} ({best})"]
    row += [figures[f"simulated_{key}"], figures.get(f"prediction_{key}", 0.0), figures.get(f"slack_{key}", 0.0)]
    row += [" / ".join(str(max(ran.peaks)) for ran in runs.values())]
    return figures, row


def levels(settings: Settings) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and raw numbers of every level at every number of stages; prints a table."""
    raw: dict[str, Any] = {"settings": settings._asdict()}
    figures: dict[str, float] = {}
    rows = []
    for num_stages in settings.stages:
        for level in settings.levels:
            delay = contended(level, FORWARD_S + BACKWARD_S)
            runs = {}
            for name in settings.candidates:
                times = [(FORWARD_S, BACKWARD_S)] * num_stages
                runs[name] = run_sleeping(times, COUNT, settings.steps, delay, **CANDIDATES[name])
                took = median(runs[name].seconds[settings.left_out :])
                last = runs[name].schedules[-1]
                print(f"S={num_stages} {level} {name}: {took * 1e3:.0f} ms, {last}; {machine_line()}", flush=True)
            raw[f"{level}_s{num_stages}"] = {name: ran._asdict() for name, ran in runs.items()}
            some, row = judged(level, num_stages, runs, settings)
            figures |= some
            rows.append(row)
    columns = (
        "level", "1F1B ms", "kFkB gain", "p95", "k (best)", "simulated", "predicted", "slack gain",
        "held 1F1B / k / r",
    )  # fmt: skip
    print("\n" + common.table(f"contended links; {machine_line()}", columns, rows))
    return figures, raw


def main() -> int:
    """Both parts, or the one that was asked for."""
    parts = {"choices": ("all", "levels", "lab"), "default": "all", "help": "one of the two; no record"}
    asked = common.arguments(__doc__, options={"--part": parts})
    asked.no_record |= asked.part != "all"
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    if asked.part != "lab":
        some, raw["levels"] = levels(QUICK if asked.quick else Settings())
        figures |= some
    if asked.part == "lab" or (asked.part == "all" and not asked.quick):
        raw["lab"] = shared_link.measure(shared_link.QUICK if asked.quick else shared_link.Settings())
        figures |= shared_link.figures_of(raw["lab"])
        print("\n" + shared_link.table_of(raw["lab"]))
    common.finish("bench_contention", figures, raw, asked)
    return 0
