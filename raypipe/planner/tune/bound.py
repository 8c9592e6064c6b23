"""What decides a step, in words: the slowest computation, a link, or messages that are waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raypipe.ir.plan_table import human_s
from raypipe.ir.prediction import HopPrediction, StagePrediction
from raypipe.ir.schedule import Schedule, groups_in
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs, makespan_s

__all__ = ["bound_of"]

NEAR = 0.02
"""A step within this of what computation alone would take is decided by that."""


def bound_of(
    stages: Sequence[StagePrediction], hops: Sequence[HopPrediction], costs: Costs, schedule: Schedule, step_s: float
) -> str:
    """The bound.

    Args:
        costs: those of the stages and hops.
        schedule: compute actions only.
        step_s: that it takes, as simulated.
    """
    if schedule.wiring.replicated:
        return _of_replicas(stages, schedule)
    if schedule.num_workers < len(stages):
        return _of_workers(stages, hops, costs, schedule, step_s)
    slowest = max(range(len(stages)), key=lambda s: stages[s].busy_s)
    busy_s, count = stages[slowest].busy_s, schedule.num_microbatches()
    overlaps = schedule.wiring.norm_per_stage and not schedule.prologue
    rounds = count if overlaps else count + len(stages) - 1
    text = f"stage {slowest} computes longest, {human_s(busy_s)} per micro-batch"
    if not hops:
        return f"computing takes {human_s(busy_s)} per micro-batch"
    widest = max(range(len(hops)), key=lambda h: hops[h].busiest_s[1])
    waits = f"{human_s(sum(hops[widest].busiest_s))} per message"
    if sum(held_s for _, held_s in hops[widest].ways_s) > busy_s:
        return f"the link between stages {widest} and {widest + 1} takes {waits} each way, computing {human_s(busy_s)}"
    if step_s > rounds * busy_s * (1 + NEAR):
        return (
            f"stages wait for messages: computing alone would take {human_s(rounds * busy_s)}, {rounds} x "
            f"{human_s(busy_s)} of stage {slowest}; the slowest link, between stages {widest} and {widest + 1}, takes "
            f"{waits} each way"
        )
    return text


def _of_replicas(stages: Sequence[StagePrediction], schedule: Schedule) -> str:
    """The same where stages have replicas, which share out the micro-batches and exchange their gradients."""
    counts, number = schedule.wiring.replicas, schedule.num_microbatches()
    shared_s = [stage.busy_s / count for stage, count in zip(stages, counts, strict=True)]
    slowest = max(range(len(stages)), key=shared_s.__getitem__)
    behind_s = [stage.exchange_s - stage.hidden_s for stage in stages]
    widest = max(range(len(stages)), key=behind_s.__getitem__)
    if behind_s[widest] > number * shared_s[slowest]:
        taken = human_s(behind_s[widest])
        return (
            f"stage {widest} sums the gradients of its {counts[widest]} workers for {taken}, longer than any stage "
            "computes"
        )
    shared = f", shared by its {counts[slowest]} workers" if counts[slowest] > 1 else ""
    homes = schedule.wiring.homes
    if len(groups_in(homes)) < len(homes):
        busy_s = {group: sum(s for s, home in zip(shared_s, homes, strict=True) if home == group) for group in homes}
        group = max(busy_s, key=busy_s.__getitem__)
        held = " and ".join(str(stage) for stage, home in enumerate(homes) if home == group)
        return f"stages {held} compute longest, {human_s(busy_s[group])} per micro-batch{shared}"
    return f"stage {slowest} computes longest, {human_s(shared_s[slowest])} per micro-batch{shared}"


def _of_workers(
    stages: Sequence[StagePrediction], hops: Sequence[HopPrediction], costs: Costs, schedule: Schedule, step_s: float
) -> str:
    """The same where workers hold several stages: the sum of a worker's stages counts."""
    wiring = schedule.wiring
    busy_s = [0.0] * schedule.num_workers
    for stage, worker in zip(stages, wiring.placement, strict=True):
        busy_s[worker] += stage.busy_s
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    held = " and ".join(str(s) for s, worker in enumerate(wiring.placement) if worker == slowest)
    text = f"worker {slowest} (stages {held}) computes longest, {human_s(busy_s[slowest])} per micro-batch"
    crossing = [hop for hop in range(len(hops)) if wiring.crosses(hop, 0)]
    if not crossing:
        return text
    widest = max(crossing, key=lambda hop: sum(hops[hop].busiest_s))
    free = dataclasses.replace(
        costs, forward_latency_s=(), backward_latency_s=(), forward_occupancy_s=(), backward_occupancy_s=()
    )
    free_s = makespan_s(lower(schedule), free)
    if step_s <= free_s * (1 + NEAR):
        return text
    waits = f"{human_s(sum(hops[widest].busiest_s))} per message each way"
    return (
        f"workers wait for messages: without them the step would take {human_s(free_s)}; the slowest link, between "
        f"stages {widest} and {widest + 1}, takes {waits}"
    )
