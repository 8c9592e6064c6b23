"""Steps of the policies on paper: the simulator with the stages' seconds and the links' occupancy, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from jobs.bench.lv.chain import Chain, Cut, stages_of
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.asynchronous import continuous
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune import step_of

__all__ = ["LOADS", "paper_s", "ratios_by_load"]

SHRINKS = {"none": 1.0, "bf16": 2.0, "int8": 512 / 132}
"""Times by which a codec makes a message smaller; int8 has a scale of four bytes for 128 numbers."""
LOADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def paper_s(chain: Chain, cut: Cut, fields: Mapping[str, Any]) -> float:
    """Seconds of a step, in the steady state where steps do not end with a flush.

    Args:
        fields: of PipelineConfig: schedule, versions, codecs.
    """
    forward_s, backward_s = zip(*stages_of(chain, cut), strict=True)
    hops = chain.num_stages - 1
    occupied = [
        (chain.message_s / SHRINKS[fields.get(name, "none")],) * hops for name in ("codec_forward", "codec_backward")
    ]
    costs = Costs(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_occupancy_s=occupied[0],
        backward_occupancy_s=occupied[1],
    )
    count, interval = chain.num_microbatches, 1
    if fields["schedule"] == "pipedream":
        if "weight_versions" in fields:
            interval = count
        schedule = continuous("pipedream", chain.num_stages, count, interval)
    else:
        schedule = schedule_of(ScheduleSpec(fields["schedule"], count), chain.num_stages)
    return step_of(lower(schedule), costs)[0]


def ratios_by_load(chain: Chain, cut: Cut, policies: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """For messages that take so many times what a stage takes: steps of all policies over those of "lv".

    One row per load: the load, then a ratio for each policy but "lv".
    """
    rows: list[list[Any]] = []
    for load in LOADS:
        at = chain._replace(load=load)
        steps = {name: paper_s(at, cut, fields) for name, fields in policies.items()}
        rows.append([load, *(f"{seconds / steps['lv']:.2f}" for name, seconds in steps.items() if name != "lv")])
    return rows


def slowest_s(chain: Chain, cut: Cut) -> float:
    """Seconds of the slowest stage and micro-batch."""
    return max(itertools.starmap(float.__add__, stages_of(chain, cut)))
