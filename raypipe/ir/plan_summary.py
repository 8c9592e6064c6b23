"""A plan in four lines, for whoever wants to know what will happen and not how it was found; notes follow.

stages:  2. Stage 0: wte (Embedding) to h.0 (Block); stage 1: h.1 (Block) to lm_head (Linear)
step:    393 ms predicted for 32 samples in 4 micro-batches of 8 (81.5 samples/s), workers idle 22% of it; ...
memory:  at most 53.0 MiB on worker 0, 32.6 MiB on worker 1; no limit is set
why:     stage 1 takes longest, 78.3 ms per micro-batch; 2 stages, as num_stages says
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypipe.ir.plan_table import human_bytes, human_rate, human_s

if TYPE_CHECKING:
    from raypipe.ir.plan_facts import PlanFacts, Stage
    from raypipe.ir.prediction import Prediction

__all__ = ["summary"]

FEW = 4
"""Stages or workers up to which each is named."""


def summary(plan: PlanFacts) -> str:
    """Stages, step, memory and why, a line each, and a line for every note."""
    found = plan.prediction
    lines = [
        f"stages:  {_stages(plan)}",
        f"step:    {_step_without_seconds(plan) if found is None else _step(plan, found)}",
        f"memory:  {_memory_without_bytes(plan) if found is None else _memory(plan, found)}",
        f"why:     {_why(plan)}",
    ]
    return "\n".join(lines + [f"note:    {note}" for note in plan.notes])


def _stages(plan: PlanFacts) -> str:
    stages, placement = plan.partition.stages, plan.schedule.wiring.placement
    words = dict(plan.reasons)
    wiring = plan.schedule.wiring
    workers = wiring.num_workers
    shared = workers < len(stages)

    def one(stage: Stage) -> str:
        where = f" (worker {placement[stage.index]})" if shared else ""
        if len(stage.devices) > 1:
            where = f" ({len(stage.devices)} workers)"
        held = words.get(f"stage {stage.index}") or _ends(stage)
        return f"stage {stage.index}{where}: {held}"

    count = str(len(stages))
    if shared:
        count += f" on {workers} worker{'s' * (workers > 1)}"
    if wiring.lanes > 1:
        count += f" on {workers} workers" * wiring.replicated + f", gradients summed in {wiring.lanes} lanes"
    shown = [one(stage) for stage in stages]
    if len(shown) > FEW:
        shown = [*shown[:2], "...", shown[-1]]
    text = "; ".join(shown)
    return f"{count}. {text[0].upper()}{text[1:]}"


def _ends(stage: Stage) -> str:
    return stage.first_node if stage.first_node == stage.last_node else f"{stage.first_node} to {stage.last_node}"


def _parts(plan: PlanFacts) -> str:
    count, size = plan.num_microbatches, plan.microbatch_size
    if count == 1:
        return f"{plan.minibatch_size} samples at once"
    at_most = "at most " if count * size > plan.minibatch_size else ""
    return f"{plan.minibatch_size} samples in {count} micro-batches of {at_most}{size}"


def _step(plan: PlanFacts, found: Prediction) -> str:
    idle = f", workers idle {found.bubble_fraction:.0%} of it" if plan.partition.num_stages > 1 else ""
    links = f", links {found.links}" if found.hops else ""
    return (
        f"{human_s(found.step_s)} predicted for {_parts(plan)} ({human_rate(found.samples_per_s)}){idle}; "
        f"computing times {found.source}{links}"
    )


def _step_without_seconds(plan: PlanFacts) -> str:
    return f"{_parts(plan)}; how long it takes is not known, for nothing was timed"


def _memory(plan: PlanFacts, found: Prediction) -> str:
    """By worker, which holds one stage or several; what counts is the fullest of those that share a stage."""
    placement = plan.schedule.wiring.placement
    held: dict[int, int] = {}
    for stage, worker in zip(found.stages, placement, strict=True):
        held[worker] = held.get(worker, 0) + stage.memory_bytes
    limits = {worker: stage.limit_bytes for stage, worker in zip(found.stages, placement, strict=True)}
    if all(limit is None for limit in limits.values()):
        end, bare = "; no limit is set", True
    else:
        end, bare = "", len(set(limits.values())) == 1
        if bare:
            end = f", of {human_bytes(limits[0] or 0)} each" if len(held) > 1 else f", of {human_bytes(limits[0] or 0)}"
    names = {worker: _worker(found, placement.index(worker), worker) for worker in held}

    def one(worker: int) -> str:
        of = "" if bare else " of no limit" if limits[worker] is None else f" of {human_bytes(limits[worker] or 0)}"
        return f"{human_bytes(held[worker])}{of} on {names[worker]}"

    if len(held) <= FEW:
        return "at most " + ", ".join(map(one, sorted(held))) + end
    # The one that is nearest to its limit; where there is none, the fullest.
    fullest = max(held, key=lambda worker: (held[worker] / (limits[worker] or 1 << 62), held[worker]))
    return f"at most {one(fullest)}, the fullest of {len(held)} workers{end}"


def _worker(found: Prediction, stage: int, worker: int) -> str:
    devices = found.stages[stage].devices
    if len(devices) > 1:
        return f"each of stage {stage}'s {len(devices)} workers"
    return f"worker {worker}" if not devices or devices[0] == f"worker{worker}" else devices[0]


def _memory_without_bytes(plan: PlanFacts) -> str:
    most = max(plan.partition.stages, key=lambda stage: stage.param_bytes)
    return (
        f"parameters take at most {human_bytes(most.param_bytes)}, on stage {most.index}; what else is needed was not "
        "measured"
    )


def _why(plan: PlanFacts) -> str:
    """What the step takes its time from, and the choice that mattered most; of each the part before a semicolon."""
    words = dict(plan.reasons)
    found = plan.prediction
    if found is None:
        texts = [plan.partition.reason, words.get("weights", "")]
    elif not plan.weights.synchronous:
        texts = [found.bound, words.get("weights", "")]
    elif found.decided_by == "memory":
        texts = [found.bound, words.get("micro-batches", "")]
    else:
        texts = [found.bound, words.get("replicas") or words.get("stages", "")]
    return "; ".join(text.partition("; ")[0] for text in texts if text)
