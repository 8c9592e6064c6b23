"""What one step of a plan takes: seconds by stage and hop, the simulated step, the memory, and the bound.

    nodes' seconds / speed  -->  F and B of a stage  --+
    cut bytes, link         -->  latency, occupancy  --+-->  simulate  -->  step, bubble

A stage for which partitioner="hierarchical" chose replicas counts as one worker whose period is shared by them; all
others have rows of their own, and sum their gradients behind their last backwards. The model leaves out what the
simulator leaves out, and the optimizer's own seconds.
"""

from __future__ import annotations

import dataclasses
import math

from raypipe.ir.cluster import Cluster, Link
from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.ir.prediction import HopPrediction, Prediction, StagePrediction
from raypipe.ir.schedule import Schedule
from raypipe.ir.timeline import Timeline
from raypipe.planner.columns import columns_of
from raypipe.planner.memory import StageMemory, activations_of
from raypipe.planner.partition.fit import memory_of, stage_limit_bytes
from raypipe.planner.partition.limits import Limits
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.validate import validate
from raypipe.planner.search.replay import STEADY, equal_messages_s
from raypipe.planner.simulate.serial import Costs, makespan_s, simulate
from raypipe.planner.tune.bound import bound_of
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.replicas import exchange_s, slowest_link
from raypipe.planner.tune.resolve import spec_of

__all__ = [
    "costs_of",
    "first_trainable_stage",
    "hops_of",
    "predict",
    "seconds_of",
    "source_of",
    "stages_of",
    "step_of",
    "timeline_of",
]


def first_trainable_stage(graph: ModelGraph, partition: Partition) -> int:
    """Lowest stage with a parameter that learns; 0 where the graph knows of none."""
    for stage in partition.stages:
        if any(graph.nodes[i].param_bytes > graph.nodes[i].frozen_bytes for i in partition.nodes_of(stage)):
            return stage.index
    return 0


def stages_of(graph: ModelGraph, partition: Partition, cluster: Cluster, limits: Limits) -> tuple[StagePrediction, ...]:
    """Seconds and bytes of every stage."""
    first = first_trainable_stage(graph, partition)
    found = []
    for stage, memory in zip(partition.stages, memory_of(graph, partition, limits.memory), strict=True):
        nodes = [graph.nodes[i] for i in partition.nodes_of(stage)]
        forward_s, backward_s = math.fsum(n.forward_s for n in nodes), math.fsum(n.backward_s for n in nodes)
        busy_s = forward_s + backward_s
        # The solver's period has replicas, speeds and all-reduce in it.
        period_s = stage.period_s * (len(stage.devices) if limits.memory.spec.replicas else 1)
        factor = period_s / busy_s if busy_s else 0.0
        # Nobody waits for a backward of the first stage that trains.
        again_s = forward_s if memory.recompute and stage.index >= first else 0.0
        backward_s += again_s
        weight_s = math.fsum(n.backward_weight_s for n in nodes) if stage.index > first else backward_s
        summed_s, hidden_s = 0.0, 0.0
        if limits.memory.spec.replicas:
            summed_s, hidden_s = exchange_s(nodes, factor, stage.devices, cluster, limits)
        found.append(
            StagePrediction(
                devices=tuple(cluster.devices[i].name for i in stage.devices),
                forward_s=factor * forward_s,
                backward_s=factor * backward_s,
                in_flight=memory.in_flight,
                fullest_at=memory.action,
                memory=_parts(memory),
                limit_bytes=stage_limit_bytes(cluster, limits, stage),
                weight_s=factor * weight_s,
                recompute=again_s > 0.0,
                exchange_s=summed_s,
                hidden_s=hidden_s,
            )
        )
    return tuple(found)


def _parts(memory: StageMemory) -> tuple[tuple[str, int], ...]:
    return (
        (f"weights x {1 if memory.leaf_bytes else memory.versions}", memory.weight_bytes),
        *(((f"16-bit leaves x {memory.versions}", memory.leaf_bytes),) if memory.leaf_bytes else ()),
        ("gradients", memory.gradient_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("buffers", memory.buffer_bytes),
        (activations_of(memory), memory.activation_bytes),
        ("messages", memory.message_bytes),
        ("workspace", memory.workspace_bytes),
        *((("exchange", memory.exchange_bytes),) if memory.exchange_bytes else ()),
        ("reserve", memory.reserve_bytes),
        *((("copies of the state", memory.copy_bytes),) if memory.copy_bytes else ()),
    )


def hops_of(
    partition: Partition,
    cluster: Cluster,
    microbatch_size: int,
    codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC),
) -> tuple[HopPrediction, ...]:
    """What a message meets between each two stages; nothing where both are on one device.

    Args:
        codecs: forwards and backwards.
    """
    found = []
    for before, after in zip(partition.stages, partition.stages[1:], strict=False):
        together = before.devices == after.devices
        link = Link() if together else slowest_link(cluster, before.devices, after.devices)
        nbytes = after.input_bytes * microbatch_size
        ways = []
        for codec in (NO_CODEC, NO_CODEC) if together else codecs:
            behind_s, occupancy_s = codec.taken_s(nbytes, nbytes / codec.ratio / link.bandwidth_bytes_s)
            ways.append((link.latency_s + behind_s, occupancy_s))
        found.append(HopPrediction(nbytes, *ways[0], None if ways[1] == ways[0] else ways[1]))
    return tuple(found)


def costs_of(stages: tuple[StagePrediction, ...], hops: tuple[HopPrediction, ...]) -> Costs:
    """The simulator's input."""
    there_s, back_s = ([hop.ways_s[way] for hop in hops] for way in (0, 1))
    behind_s = tuple(stage.exchange_s - stage.hidden_s for stage in stages)
    return Costs(
        reduce_s=behind_s if any(behind_s) else (),
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        backward_input_s=tuple(max(0.0, stage.backward_s - stage.weight_s) for stage in stages),
        backward_weight_s=tuple(stage.weight_s for stage in stages),
        forward_latency_s=tuple(latency_s for latency_s, _ in there_s),
        backward_latency_s=tuple(latency_s for latency_s, _ in back_s),
        forward_occupancy_s=tuple(occupancy_s for _, occupancy_s in there_s),
        backward_occupancy_s=tuple(occupancy_s for _, occupancy_s in back_s),
    )


def source_of(graph: ModelGraph) -> str:
    """Where the seconds of the nodes that take any come from."""
    busy = columns_of(graph).busy_s > 0
    found = {node.source or "unknown" for node, is_busy in zip(graph.nodes, busy.tolist(), strict=True) if is_busy}
    return found.pop() if len(found) == 1 else ("mixed" if found else "unknown")


def predict(decision: Decision, schedule: Schedule, links: str, one_f_one_b: Schedule | None = None) -> Prediction:
    """The prediction of one step.

    Args:
        schedule: compute actions only.
        links: where the cluster's links come from, in words.
        one_f_one_b: to compare with; None where it is the schedule.

    Raises:
        ScheduleError: the schedule cannot work.
    """
    stages, hops = _stages_and_hops(decision)
    costs, lowered = costs_of(stages, hops), lower(schedule)
    validate(lowered)
    step_s, bubble_fraction = step_of(lowered, costs)
    return Prediction(
        step_s=step_s,
        bubble_fraction=bubble_fraction,
        samples_per_s=decision.minibatch_size / step_s if step_s else 0.0,
        one_f_one_b_s=None if one_f_one_b is None else makespan_s(lower(one_f_one_b), costs),
        bound=bound_of(stages, hops, costs, schedule, step_s),
        source=source_of(decision.graph),
        links=links,
        stages=stages,
        hops=hops,
    )


def seconds_of(decision: Decision) -> float:
    """Of one step of a decision, and nothing else of its prediction."""
    costs, stages = costs_of(*_stages_and_hops(decision)), decision.partition.num_stages
    first = first_trainable_stage(decision.graph, decision.partition)
    spec = spec_of(decision.request, stages, decision.num_microbatches, first)
    if spec.of_kind.synchronous and not spec.of_kind.several_stages and not spec.replicas:
        return equal_messages_s(spec, costs)
    return step_of(lower(schedule_of(spec, stages)), costs)[0]


def _stages_and_hops(decision: Decision) -> tuple[tuple[StagePrediction, ...], tuple[HopPrediction, ...]]:
    stages = stages_of(decision.graph, decision.partition, decision.cluster, decision.limits)
    size, codecs = decision.limits.memory.microbatch_size, decision.request.codecs
    return stages, hops_of(decision.partition, decision.cluster, size, codecs)


def step_of(lowered: Schedule, costs: Costs) -> tuple[float, float]:
    """(seconds, bubble) of one step; where steps overlap, in the steady state."""
    if not (lowered.prologue or lowered.wiring.norm_per_stage):
        timeline = simulate(lowered, costs)
        return timeline.makespan_s, timeline.bubble_fraction
    fewer, more = (makespan_s(lowered, costs, repeats=repeats) for repeats in STEADY)
    step_s = (more - fewer) / (STEADY[1] - STEADY[0])
    busy_s = lowered.stride * (math.fsum(costs.forward_s) + math.fsum(costs.backward_s))
    return step_s, max(0.0, 1.0 - busy_s / (step_s * lowered.num_workers)) if step_s else 0.0


def timeline_of(plan: Plan) -> Timeline:
    """The predicted step of a plan, for pictures.

    Raises:
        ValueError: the plan has no prediction.
    """
    if plan.prediction is None:
        raise ValueError("this plan was made without a profile, so there is nothing to draw")
    costs = costs_of(plan.prediction.stages, plan.prediction.hops)
    repeats = 2 if plan.schedule.prologue or plan.schedule.wiring.norm_per_stage else 1
    return dataclasses.replace(simulate(lower(plan.schedule), costs, repeats=repeats), name=plan.schedule.kind)
