"""Prediction of a plan's step: seconds by stage and hop, the simulated step, the memory, and the bottleneck.

    nodes' seconds / speed  -->  F and B of a stage  --+
    cut bytes, link         -->  latency, occupancy  --+-->  simulate  -->  step, bubble

A hop is the link between neighbouring stages. Replicas are simulated as workers of their own, which sum their gradients
after their last backwards. Left out are the seconds of the optimizer, and everything that the simulator leaves out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from raypipe.ir.cluster import Cluster, Link
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import HopPrediction, Partition, Plan, Prediction, StagePrediction
from raypipe.ir.schedule import Schedule, groups_in
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.timeline import Timeline
from raypipe.ir.units import human_s
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.microbatch import EPSILON
from raypipe.planner.dependency_tables import Program, build
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import memory_of, stage_limit_bytes
from raypipe.planner.replay import STEADY, equal_messages_s
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, lowered_and_checked
from raypipe.planner.search.problem import Decision
from raypipe.planner.search.replica_cuts import exchange_s, slowest_link
from raypipe.planner.search.schedule_settings import build_schedule, spec_of
from raypipe.planner.simulator import Costs, makespan_s, program_makespan_s, simulate

NEAR = 0.02
"""Relative excess of a step over its computation alone, up to which computation counts as the bottleneck."""


def bound_of(
    stages: Sequence[StagePrediction], hops: Sequence[HopPrediction], costs: Costs, schedule: Schedule, step_s: float
) -> str:
    """Describe what bounds the step: the stage that computes longest, the slowest link, or the exchange of gradients.

    Args:
        costs: costs of these stages and hops, as from ``costs_of``.
        schedule: compute actions only, without messages.
        step_s: simulated seconds of a step.
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
    """Describe what bounds the step if stages have replicas, which share the micro-batches and exchange gradients."""
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
    """Describe what bounds the step if workers hold several stages; the seconds of a worker's stages are added up."""
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


def first_trainable_stage(graph: ModelGraph, partition: Partition) -> int:
    """Find the lowest stage with a trainable parameter; 0 if the graph has none."""
    for stage in partition.stages:
        if any(graph.nodes[i].param_bytes > graph.nodes[i].frozen_bytes for i in partition.nodes_of(stage)):
            return stage.index
    return 0


def stages_of(graph: ModelGraph, partition: Partition, cluster: Cluster, limits: Limits) -> tuple[StagePrediction, ...]:
    """Predict seconds and bytes of every stage.

    Args:
        graph: graph that was partitioned: its nodes' seconds must be those from which ``partition`` was computed.
        limits: limits with which ``partition`` was computed.
    """
    first = first_trainable_stage(graph, partition)
    stages = []
    for stage, memory in zip(partition.stages, memory_of(graph, partition, limits.memory), strict=True):
        nodes = [graph.nodes[i] for i in partition.nodes_of(stage)]
        forward_s, backward_s = math.fsum(n.forward_s for n in nodes), math.fsum(n.backward_s for n in nodes)
        busy_s = forward_s + backward_s
        # The solver's period includes replicas, speeds and all-reduce.
        period_s = stage.period_s * (len(stage.devices) if limits.memory.spec.replicas else 1)
        factor = period_s / busy_s if busy_s else 0.0
        # No stage waits for a backward of the first stage that trains.
        again_s = forward_s if memory.recompute and stage.index >= first else 0.0
        backward_s += again_s
        weight_s = math.fsum(n.backward_weight_s for n in nodes) if stage.index > first else backward_s
        summed_s, hidden_s = 0.0, 0.0
        if limits.memory.spec.replicas:
            summed_s, hidden_s = exchange_s(nodes, factor, stage.devices, cluster, limits)
        stages.append(
            StagePrediction(
                devices=tuple(cluster.devices[i].name for i in stage.devices),
                forward_s=factor * forward_s,
                backward_s=factor * backward_s,
                in_flight=memory.in_flight,
                fullest_at=memory.action,
                memory=memory.parts,
                limit_bytes=stage_limit_bytes(cluster, limits, stage),
                weight_s=factor * weight_s,
                recompute=again_s > 0.0,
                exchange_s=summed_s,
                hidden_s=hidden_s,
            )
        )
    return tuple(stages)


def hops_of(
    partition: Partition,
    cluster: Cluster,
    microbatch_size: int,
    codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC),
) -> tuple[HopPrediction, ...]:
    """Predict bytes, latency and occupancy of the messages of each hop.

    Latency and occupancy are 0 if both stages of the hop are on the same workers.

    Args:
        codecs: codec of forward messages, and of backward messages.
    """
    hops = []
    for before, after in zip(partition.stages, partition.stages[1:], strict=False):
        together = before.devices == after.devices
        link = Link() if together else slowest_link(cluster, before.devices, after.devices)
        nbytes = after.input_bytes * microbatch_size
        ways = []
        for codec in (NO_CODEC, NO_CODEC) if together else codecs:
            behind_s, occupancy_s = codec.taken_s(nbytes, nbytes / codec.ratio / link.bandwidth_bytes_s)
            if link.latency_occupies_wire:
                ways.append((behind_s, occupancy_s + link.latency_s))
            else:
                ways.append((link.latency_s + behind_s, occupancy_s))
        hops.append(HopPrediction(nbytes, *ways[0], None if ways[1] == ways[0] else ways[1], link.half_duplex))
    return tuple(hops)


def costs_of(stages: tuple[StagePrediction, ...], hops: tuple[HopPrediction, ...]) -> Costs:
    """Convert the predictions of stages and hops to the simulator's input."""
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
        half_duplex=tuple(hop.half_duplex for hop in hops),
    )


def source_of(graph: ModelGraph) -> str:
    """Return the source of the nodes' seconds: "mixed" if sources differ, "unknown" if no node takes time.

    Nodes that take no time are ignored.
    """
    busy = columns_of(graph).busy_s > 0
    sources = {node.source or "unknown" for node, is_busy in zip(graph.nodes, busy.tolist(), strict=True) if is_busy}
    return sources.pop() if len(sources) == 1 else ("mixed" if sources else "unknown")


def predicted(decision: Decision, links: str, first_trainable: int | None = None) -> Prediction:
    """Predict one step of the plan that ``decision`` describes: its seconds, memory, idle time and bottleneck.

    Args:
        links: origin of the cluster's links, for reports.
        first_trainable: lowest stage with a backward; None finds it from the graph.
    """
    request, num_stages, count = decision.request, decision.partition.num_stages, decision.num_microbatches
    first = first_trainable_stage(decision.graph, decision.partition) if first_trainable is None else first_trainable
    stages, hops = stages_and_hops(decision)
    schedule, costs = build_schedule(request, num_stages, count, first), costs_of(stages, hops)
    spec = spec_of(request, num_stages, count, first)
    if _replays(spec):
        step_s = equal_messages_s(spec, costs)
        busy_s = count * (math.fsum(costs.forward_s) + math.fsum(costs.backward_s[first:]))
        bubble_fraction = max(0.0, 1.0 - busy_s / (step_s * num_stages)) if step_s else 0.0
    else:
        step_s, bubble_fraction = step_of(lowered_and_checked(schedule), costs)
    plain_s = None
    # On the same workers 1F1B would have fewer and larger stages, so this cut cannot be compared with it.
    if schedule.kind != "1f1b" and num_stages > 1 and not request.kind.several_stages:
        plain_s = schedule_step_s(spec_of(request.as_1f1b(), num_stages, count, first), costs)
    prediction = Prediction(
        step_s=step_s,
        bubble_fraction=bubble_fraction,
        samples_per_s=decision.minibatch_size / step_s if step_s else 0.0,
        one_f_one_b_s=plain_s,
        bound=bound_of(stages, hops, costs, schedule, step_s),
        source=source_of(decision.graph),
        links=links,
        stages=stages,
        hops=hops,
        decided_by="given" if request.num_microbatches else "rule",
    )
    if (choice := decision.choice) is None:
        return prediction
    return dataclasses.replace(
        prediction,
        curve=choice.curve,
        optimum=choice.optimum,
        low=choice.low,
        high=choice.high,
        epsilon=EPSILON,
        decided_by=choice.decided_by,
    )


def gather_s(decision: Decision, outputs_bytes: int) -> float:
    """Compute the seconds for which replicas of the last stage wait for each other's outputs; 0 without replicas.

    Each sends the outputs of a micro-batch to all others right after its forward. Later forwards hide what the links
    transfer meanwhile, but not the outputs of the last micro-batch.

    Args:
        outputs_bytes: outputs of a mini-batch.
    """
    devices, count = decision.partition.stages[-1].devices, decision.num_microbatches
    if len(devices) == 1:
        return 0.0
    link = slowest_link(decision.cluster, devices, devices)
    each_s = (len(devices) - 1) * outputs_bytes / count / link.bandwidth_bytes_s
    forward_s = decision.prediction.stages[-1].forward_s
    return link.latency_s + each_s + (math.ceil(count / len(devices)) - 1) * max(0.0, each_s - forward_s)


def with_whole_loss(plan: Plan, loss_s: float, gathered_s: float) -> Plan:
    """Add the seconds of a loss over the whole mini-batch to all predicted steps of a plan.

    All workers wait for it: forwards precede it, backwards follow it. It therefore changes no choice of the planner,
    except for the workers of the last stage.

    Args:
        loss_s: seconds of the loss, which every replica of the last stage computes.
        gathered_s: ``gather_s``.
    """
    before, alone_s = plan.prediction, loss_s
    loss_s += gathered_s
    if before is None or not loss_s:
        return plan
    step_s, workers = before.step_s + loss_s, plan.schedule.num_workers
    busy_s = (1.0 - before.bubble_fraction) * before.step_s * workers + alone_s * plan.partition.replicas[-1]
    prediction = dataclasses.replace(
        before,
        step_s=step_s,
        bubble_fraction=max(0.0, 1.0 - busy_s / (step_s * workers)),
        samples_per_s=plan.minibatch_size / step_s,
        one_f_one_b_s=None,  # 1F1B cannot compute such a loss
        curve=tuple(dataclasses.replace(point, predicted_s=point.predicted_s + loss_s) for point in before.curve),
        loss_s=loss_s,
    )
    candidates = (
        dataclasses.replace(x, step_s=x.step_s + (loss_s if x.workers[-1] > 1 else alone_s)) if x.step_s else x
        for x in plan.candidates
    )
    return dataclasses.replace(plan, prediction=prediction, candidates=tuple(candidates))


def seconds_of(decision: Decision) -> float:
    """Predict the seconds of one training step of the plan that ``decision`` describes.

    ``predicted`` also computes the memory, the idle time and the bottleneck.
    """
    costs, stages = costs_of(*stages_and_hops(decision)), decision.partition.num_stages
    first = first_trainable_stage(decision.graph, decision.partition)
    return schedule_step_s(spec_of(decision.request, stages, decision.num_microbatches, first), costs)


def schedule_step_s(spec: ScheduleSpec, costs: Costs) -> float:
    """Simulate one step of a schedule, in seconds; in the steady state if consecutive steps overlap."""
    if _replays(spec):
        return equal_messages_s(spec, costs)
    first, *more = (program_makespan_s(program, costs) for program in _programs(spec, costs.num_stages))
    return (more[0] - first) / (STEADY[1] - STEADY[0]) if more else first


@functools.lru_cache(maxsize=64)
def _programs(spec: ScheduleSpec, num_stages: int) -> tuple[Program, ...]:
    """Compile the program of one step or, if consecutive steps overlap, those of two numbers of steps (STEADY)."""
    lowered = lower(schedule_of(spec, num_stages))
    overlaps = lowered.prologue or lowered.wiring.norm_per_stage
    return tuple(build(lowered, repeats) for repeats in (STEADY if overlaps else (1,)))


def _replays(spec: ScheduleSpec) -> bool:
    """Return True if ``equal_messages_s`` can compute the step of this schedule; it is quicker than a simulation."""
    return spec.of_kind.synchronous and not spec.of_kind.several_stages and not spec.replicas


def stages_and_hops(decision: Decision) -> tuple[tuple[StagePrediction, ...], tuple[HopPrediction, ...]]:
    """Predict the stages and hops of the plan that ``decision`` describes."""
    stages = stages_of(decision.graph, decision.partition, decision.cluster, decision.limits)
    size, codecs = decision.limits.memory.microbatch_size, decision.request.codecs
    return stages, hops_of(decision.partition, decision.cluster, size, codecs)


def step_of(lowered: Schedule, costs: Costs) -> tuple[float, float]:
    """Simulate one step, in the steady state if consecutive steps overlap.

    Args:
        lowered: schedule with its messages, from ``lower``.

    Returns:
        the seconds of a step, and the fraction of the workers' time in which they are idle.
    """
    if not (lowered.prologue or lowered.wiring.norm_per_stage):
        timeline = simulate(lowered, costs)
        return timeline.makespan_s, timeline.bubble_fraction
    fewer, more = (makespan_s(lowered, costs, repeats=repeats) for repeats in STEADY)
    step_s = (more - fewer) / (STEADY[1] - STEADY[0])
    busy_s = lowered.stride * (math.fsum(costs.forward_s) + math.fsum(costs.backward_s))
    return step_s, max(0.0, 1.0 - busy_s / (step_s * lowered.num_workers)) if step_s else 0.0


def timeline_of(plan: Plan) -> Timeline:
    """Simulate the predicted step of a plan for a picture; two steps if consecutive steps overlap.

    Raises:
        ValueError: the plan has no prediction.
    """
    if plan.prediction is None:
        raise ValueError("this plan was made without a profile, so there is nothing to draw")
    costs = costs_of(plan.prediction.stages, plan.prediction.hops)
    repeats = 2 if plan.schedule.prologue or plan.schedule.wiring.norm_per_stage else 1
    return dataclasses.replace(simulate(lower(plan.schedule), costs, repeats=repeats), name=plan.schedule.kind)
