"""Half a day of real spot machines: the share of their steps that a run keeps, elastic or restarted.

    goodput    steps done and kept, over those that the same machines would have done if changes cost nothing

The trace is that of up to 24 AWS g4dn instances (jobs/data), at its own speed and 100 times as quick, where changes
cost as many seconds as ever.

    python jobs/bench/spot             computed (jobs/lib/spot.py), from seconds that were measured elsewhere
    python jobs/bench/spot --played    on raylets that come and go as the trace says, 100 times as quick (played.py)

What is computed:

    step            24 equal blocks of 30 ms on n machines, 8 micro-batches, at least 4 machines; 500 MB of state each
    changes         as measured.py has them from the record of jobs/bench/recovery
    restart         9 s in the same process, 21 s in a new one, before there was recovery (docs/design/0037); or as
                    long as Ray Train's group takes, where the record has it
    checkpoint      steps stand still for 0.24 s (docs/design/0038), as often as Young's formula says

Assumed: a machine that comes is of use after 10 s, when its worker has started; a restarted run grows right after it
has saved a checkpoint for that; whoever starts again notices a loss as late as the elastic run does. "noticed" is the
same trace where every machine says so before it goes, as AWS does. "copies free" is an elastic run whose copies of its
state take no time from its steps.
"""

from __future__ import annotations

import math
from typing import Any

from jobs.bench.spot.measured import measured
from jobs.lib import common, spot
from jobs.lib.spot import Costs

LAYOUT: dict[str, str] = {
    "elastic": r"goodput_elastic_(?!free_)(.+)",
    "elastic, copies free": r"goodput_elastic_free_(.+)",
    "restarted, same process": r"goodput_restarted_(?!new_)(.+)",
    "restarted, new process": r"goodput_restarted_new_(.+)",
    "restarted, Ray Train": r"goodput_ray_train_(.+)",
}
TARGETS: dict[str, str] = {r"ratio_.*": ">= 1.0", r"equal_played": ">= 1"}
"""Elastic over restarted in the same process; parameters of the played run are those of an undisturbed one."""
COMPUTED = r"python jobs/bench/spot"
BLOCKS, BLOCK_S, MICROBATCHES, LEAST = 24, 0.03, 8, 4
JOIN_S = 10.0
SAME_PROCESS_S, NEW_PROCESS_S, CHECKPOINT_S = 9.0, 21.0, 0.24


def step_s(machines: int) -> float:
    """A pipeline without overhead: all blocks once, and the fullest stage for each other micro-batch."""
    return (BLOCKS + (MICROBATCHES - 1) * math.ceil(BLOCKS / machines)) * BLOCK_S


def costs(speed: float, *, noticed: bool) -> Costs:
    """Of the elastic run; ``restart_s`` is that of one restarted in its process."""
    found = measured(step_s(12))
    return Costs(
        recover_s=found.recover_s,
        redone_steps=found.redone_steps,
        resize_s=found.resize_s,
        join_s=JOIN_S,
        restart_s=found.notice_s + SAME_PROCESS_S,
        checkpoint_s=CHECKPOINT_S,
        checkpoint_every_s=spot.young_interval_s(CHECKPOINT_S, spot.changes_of(speed=speed)),
        overhead=found.overhead,
        least=LEAST,
        noticed=noticed,
    )


def goodputs(name: str, speed: float, *, noticed: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of one replay, and what they are made of."""
    changes, given = spot.changes_of(speed=speed), costs(speed, noticed=noticed)
    best = spot.undisturbed_steps(changes, step_s, LEAST)
    again = given._replace(overhead=0.0)
    longer = given.restart_s - SAME_PROCESS_S + NEW_PROCESS_S
    runs = {
        "elastic": spot.elastic(changes, given, step_s),
        "elastic_free": spot.elastic(changes, again, step_s),
        "restarted": spot.restarting(changes, again, step_s),
        "restarted_new": spot.restarting(changes, again._replace(restart_s=longer), step_s),
    }
    if ray_train_s := measured(step_s(12)).ray_train_s:
        runs["ray_train"] = spot.restarting(changes, again._replace(restart_s=ray_train_s), step_s)
    figures = {f"goodput_{way}_{name}": run.steps / best for way, run in runs.items()}
    if runs["restarted"].steps:
        figures[f"ratio_{name}"] = runs["elastic"].steps / runs["restarted"].steps
    return figures, {"costs": given._asdict(), "best": best, **{way: run._asdict() for way, run in runs.items()}}


def computed(asked: Any) -> None:
    """Both speeds, without and with notices."""
    print(f"seconds of changes: {measured(step_s(12))}")
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    rows = []
    for name, speed, noticed in (
        ("1x", 1.0, False), ("1x_noticed", 1.0, True), ("100x", 100.0, False), ("100x_noticed", 100.0, True),
    ):  # fmt: skip
        found, raw[name] = goodputs(name, speed, noticed=noticed)
        figures |= found
        rows.append([name, *found.values()])
    columns = ["trace", *(name.removesuffix(f"_{rows[-1][0]}") for name in found)]
    print(common.table("steps kept, of those of the same machines undisturbed", columns, rows))
    common.finish("spot", figures, raw, asked)


def main() -> None:
    """What is asked for."""
    asked = common.arguments(
        __doc__,
        options={
            "--played": {"action": "store_true", "help": "by real runs, of the trace at 100 times its speed"},
            "--seconds": {"type": float, "default": 0.0, "help": "of the trace as it is played; all of it if left out"},
        },
    )
    if not asked.played:
        computed(asked)
        return
    from jobs.bench.spot.played import played  # needs torch and Ray

    asked.no_record = asked.no_record or asked.seconds > 0
    figures, raw = played(asked.seconds or (40.0 if asked.quick else math.inf))
    rows = [[name, value] for name, value in figures.items()]
    print(common.table("played", ["figure", "value"], rows))
    common.finish("spot", figures, raw, asked, variant="played")
