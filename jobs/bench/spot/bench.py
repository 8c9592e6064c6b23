"""Half a day of real spot machines, computed: the share of their steps that a run keeps, elastic or restarted.

    goodput    steps done and kept, over those that the same machines would have done if changes cost nothing

The trace is that of up to 24 AWS g4dn instances (jobs/data), at its own speed and 100 times as quick, where changes
cost as many seconds as ever. Nothing runs here: jobs/lib/spot.py computes it from seconds that were measured elsewhere.

    step            24 equal blocks of 30 ms on n machines, 8 micro-batches, at least 4 machines; 500 MB of state each
    copies          0.2 s each (docs/design/0038) as if steps stood still meanwhile, at the interval of
                    planner/copies.py, which insures against 60 losses an hour, where this trace has 4; or free
    done again      half of that interval, and two steps that were ordered ahead
    loss noticed    1.4 s, Ray's health checks of 0.5 s; 13.7 s by default. Whoever starts again waits for it as well
    shrink          2.1 s, growing 1.0 s: a run of the elastic sequence in tests/runtime/workers/test_growth.py, of
                    little state on a busy machine, and 500 MB at 200 MB/s
    restart         9 s in the same process, 21 s in a new one, before there was recovery (docs/design/0037)
    checkpoint      steps stand still for 0.24 s (docs/design/0038), as often as Young's formula says

Assumed: a machine that comes is of use after 10 s, when its worker has started; a restarted run grows right after it
has saved a checkpoint for that. "noticed" is the same trace where every machine says so before it goes, as AWS does.
"""

from __future__ import annotations

import math
from typing import Any

from jobs.lib import common, spot
from jobs.lib.spot import Costs
from raypipe.planner.copies import CopyCosts, copy_interval
from raypipe.planner.elastic import MOVED_BYTES_S

LAYOUT: dict[str, str] = {
    "elastic": r"goodput_elastic_(?!free_)(.+)",
    "elastic, copies free": r"goodput_elastic_free_(.+)",
    "restarted, same process": r"goodput_restarted_(?!new_)(.+)",
    "restarted, new process": r"goodput_restarted_new_(.+)",
}
TARGETS: dict[str, str] = {r"ratio_.*": ">= 1.0"}
"""Elastic over restarted in the same process."""
BLOCKS, BLOCK_S, MICROBATCHES, LEAST = 24, 0.03, 8, 4
NOTICE_S, SHRINK_S, GROW_S, JOIN_S = 1.4, 2.1, 1.0, 10.0
SAME_PROCESS_S, NEW_PROCESS_S, CHECKPOINT_S = 9.0, 21.0, 0.24
COPY_S, STATE_BYTES = 0.2, 500e6


def step_s(machines: int) -> float:
    """A pipeline without overhead: all blocks once, and the fullest stage for each other micro-batch."""
    return (BLOCKS + (MICROBATCHES - 1) * math.ceil(BLOCKS / machines)) * BLOCK_S


def costs(speed: float, *, noticed: bool) -> Costs:
    """Of the elastic run; ``restart_s`` is that of one restarted in its process."""
    typical_s = step_s(12)
    every = copy_interval(CopyCosts(typical_s, COPY_S))
    move_s = STATE_BYTES / MOVED_BYTES_S
    return Costs(
        recover_s=NOTICE_S + SHRINK_S + move_s,
        redone_steps=every / 2 + 2,
        resize_s=GROW_S + move_s,
        join_s=JOIN_S,
        restart_s=NOTICE_S + SAME_PROCESS_S,
        checkpoint_s=CHECKPOINT_S,
        checkpoint_every_s=spot.young_interval_s(CHECKPOINT_S, spot.changes_of(speed=speed)),
        overhead=COPY_S / (every * typical_s),
        least=LEAST,
        noticed=noticed,
    )


def goodputs(name: str, speed: float, *, noticed: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of one replay, and what they are made of."""
    changes, given = spot.changes_of(speed=speed), costs(speed, noticed=noticed)
    best = spot.undisturbed_steps(changes, step_s, LEAST)
    again = given._replace(overhead=0.0)
    runs = {
        "elastic": spot.elastic(changes, given, step_s),
        "elastic_free": spot.elastic(changes, again, step_s),
        "restarted": spot.restarting(changes, again, step_s),
        "restarted_new": spot.restarting(changes, again._replace(restart_s=NOTICE_S + NEW_PROCESS_S), step_s),
    }
    figures = {f"goodput_{way}_{name}": run.steps / best for way, run in runs.items()}
    if runs["restarted"].steps:
        figures[f"ratio_{name}"] = runs["elastic"].steps / runs["restarted"].steps
    return figures, {"costs": given._asdict(), "best": best, **{way: run._asdict() for way, run in runs.items()}}


def main() -> None:
    """Both speeds, without and with notices."""
    asked = common.arguments(__doc__)
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    rows = []
    for name, speed, noticed in (
        ("1x", 1.0, False), ("1x_noticed", 1.0, True), ("100x", 100.0, False), ("100x_noticed", 100.0, True),
    ):  # fmt: skip
        found, raw[name] = goodputs(name, speed, noticed=noticed)
        figures |= found
        rows.append([name, *found.values()])
    columns = [
        "trace",
        "elastic",
        "copies free",
        "restarted, same process",
        "restarted, new process",
        "elastic / restarted",
    ]
    print(common.table("steps kept, of those of the same machines undisturbed", columns, rows))
    common.finish("spot", figures, raw, asked)
