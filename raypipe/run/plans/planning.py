"""Planning in any process: client, driver actor or threads. The same input (PlanBasis) gives the same plan everywhere.

    PlanBasis   recipe of the model, profile, request, cluster, facts about optimizer and machine
        |  plan_for: decide, partition, schedule, shares, memory budgets, notes
        v
    Planned

A *decision* is a partition and a schedule that a search has chosen. Nothing here reads a clock, the environment or a
tensor. For a run that has begun, ``later.another`` makes the PlanBasis of its next plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from raypipe.capture.recipe import ModelRecipe
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.ir.profile import Profile
from raypipe.ir.units import human_s
from raypipe.ir.weights import VersionRule
from raypipe.planner.controller import MemoryBudget, budgets_of, unknown_budgets
from raypipe.planner.cost.columns import workspace_lines
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.search import Decision, Request, decide, make_partition, make_plan, plan_of, seconds_by_count
from raypipe.planner.search.predict import costs_of, gather_s, schedule_step_s, with_whole_loss
from raypipe.planner.search.schedule_settings import spec_of
from raypipe.run.spec import Planned


def stage_words(classes: Mapping[str, str], graph: ModelGraph, partition: Partition) -> tuple[tuple[str, str], ...]:
    """Describe the modules of each stage, for Plan.reasons: ("stage 0", "first module to last module").

    The names are those of the largest modules whose operations are all on this stage. If a stage has only parts of
    modules, the first of these modules is named. If it has only operations outside modules, its first and last
    operation are named.

    Args:
        classes: class name of every module of the model, by path.
    """
    paths = [[graph.nodes[i].module for i in partition.nodes_of(stage)] for stage in partition.stages]
    holders: dict[str, set[int]] = {}
    for index, modules in enumerate(paths):
        for path in modules:
            for ancestor in _ancestors(path):
                holders.setdefault(ancestor, set()).add(index)
    words = []
    for stage, modules in zip(partition.stages, paths, strict=True):
        wholes = [whole for path in modules if (whole := _largest_alone(path, holders))]
        if wholes:
            held = _from_to([_called(classes, wholes[0]), _called(classes, wholes[-1])])
        elif any(modules):
            held = "a part of " + _called(classes, next(filter(None, modules)))
        else:
            held = _from_to([stage.first_node, stage.last_node])
        words.append((f"stage {stage.index}", held))
    return tuple(words)


def _ancestors(path: str) -> list[str]:
    """List the paths of the modules around a module, and its own: h.0.mlp -> h, h.0, h.0.mlp; empty for the model."""
    names = path.split(".") if path else []
    return [".".join(names[:i]) for i in range(1, len(names) + 1)]


def _largest_alone(path: str, holders: dict[str, set[int]]) -> str:
    alone = [ancestor for ancestor in _ancestors(path) if len(holders[ancestor]) == 1]
    return alone[0] if alone else ""


def _called(classes: Mapping[str, str], path: str) -> str:
    if path not in classes:  # for example an operation of the loss
        return path
    return f"layer {path} ({classes[path]})" if path.isdigit() else f"{path} ({classes[path]})"


def _from_to(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"


MOST_EACH = 2
"""Maximum workers per processor for a note on shared processors; a plan with more is meant for other machines."""
ONE_SIZE = "retune_microbatches has no effect: only one size of micro-batches is possible or was measured."


FLUSHED = "gpipe, because the loss is computed over the whole mini-batch, after all forwards"


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """Input of a plan.

    Attributes:
        recipe: captured model, ready to be partitioned.
        request: configured values, and facts of model and optimizer. The planner chooses open values.
        profile: seconds and bytes of every operation; None if no open choice depends on them.
        cluster: cluster to plan for; None for equal workers.
        optimizer_class: class name of the optimizer; "" if it cannot be created for one parameter alone.
        retunes_microbatches: True if the controller may change the number of micro-batches.
        module_classes: class name of every module of the model, by path.
        loss_words: sentence on what the loss averages over; "" if plans need no such sentence.
        whole_loss: True if the loss is computed over whole mini-batches.
        loss_s: seconds of that loss, once per mini-batch; 0 if unknown.
        outputs_bytes: outputs of a mini-batch that replicas of the last stage exchange for that loss.
        processors: number of processors of the machine that all workers will share; None if they share none, or
            unknown.
        notes: further sentences for every plan.
    """

    recipe: ModelRecipe
    request: Request
    profile: Profile | None = None
    cluster: Cluster | None = None
    optimizer_class: str = ""
    retunes_microbatches: bool = False
    module_classes: Mapping[str, str] = field(default_factory=dict)
    loss_words: str = ""
    whole_loss: bool = False
    loss_s: float = 0.0
    outputs_bytes: int = 0
    processors: int | None = None
    notes: tuple[str, ...] = ()


def changing_nodes(recipe: ModelRecipe) -> tuple[int, ...]:
    """List the indices of nodes in modules whose forward changes buffers; all indices if such a module has no nodes."""
    (whole,) = recipe.programs(())
    owners = {name.rpartition(".")[0] for name in _known_to_change(whole)}
    nodes = recipe.graph.nodes
    inside = {owner: [i for i, node in enumerate(nodes) if _within(node.module, owner)] for owner in owners}
    if not all(inside.values()):
        return tuple(range(len(nodes)))
    return tuple(sorted({i for positions in inside.values() for i in positions}))


def _within(module: str, owner: str) -> bool:
    """Return True if the module with the path ``module`` is ``owner`` or inside it; ``owner`` "" is the model."""
    return not owner or module == owner or module.startswith(f"{owner}.")


def plan_for(basis: PlanBasis, decision: Decision | None = None, *, generation: int = 0) -> Planned:
    """Make a plan, with memory budgets, notes and reasons.

    Args:
        decision: partition and schedule to use, such as offered ones; None chooses all that the request leaves open.
        generation: number of plans that the run had before.

    Raises:
        PlanError: nothing fits, or the stages cannot run as configured; the message has the field.
        CaptureError: the model cannot be partitioned like this.
    """
    if basis.profile is None:
        cut = _by_parameters(basis)
    else:
        cut = _by_seconds(basis, decision or _decided(basis, basis.profile))
    programs = cut.programs
    inexact = _changing_buffers(cut.plan, programs, basis.request)
    plan = _with_shares(cut.plan, basis.recipe, programs)
    still = [ONE_SIZE] if basis.retunes_microbatches and len(cut.counts) < 2 else []
    plan = dataclasses.replace(
        plan,
        generation=generation,
        notes=(*plan.notes, *_late_notes(plan, basis.optimizer_class), *still, *basis.notes, *inexact),
        reasons=(
            *stage_words(basis.module_classes, basis.recipe.graph, plan.partition),
            *((what, FLUSHED if basis.whole_loss and what == "schedule" else why) for what, why in plan.reasons),
            *_further_reasons(basis, programs, plan.prediction.loss_s if plan.prediction else 0.0),
            *_stale_reason(basis, plan, programs),
        ),
    )
    return Planned(plan, cut.budgets, cut.counts)


def _decided(basis: PlanBasis, profile: Profile) -> Decision:
    """Choose all that the request leaves open.

    Replicas of the last stage exchange outputs for a loss over the whole mini-batch, which the planner does not count.
    If it chose such replicas, the result is that with one worker there, unless it takes longer.
    """
    chosen = decide(basis.request, profile, basis.cluster)
    if basis.request.replicas is not None or (waiting_s := gather_s(chosen, basis.outputs_bytes)) == 0:
        return chosen
    last = len(profile.graph.nodes) - 1
    request = dataclasses.replace(basis.request, changing=(*basis.request.changing, last))
    try:
        alone = decide(request, profile, basis.cluster)
    except PlanError:
        return chosen
    return alone if alone.prediction.step_s <= chosen.prediction.step_s + waiting_s else chosen


class _Cut(NamedTuple):
    """Unfinished plan, which lacks most notes, and further results of planning.

    Attributes:
        programs: stage programs.
        budgets: memory budget of each stage.
        counts: see ``Planned.microbatch_seconds``.
    """

    plan: Plan
    programs: tuple[StageProgram, ...]
    budgets: tuple[MemoryBudget, ...]
    counts: tuple[tuple[int, float], ...] = ()


def _by_parameters(basis: PlanBasis) -> _Cut:
    """Make a plan without a profile: stages begin at the request's split points, or have similar parameter bytes."""
    partition = make_partition(basis.recipe.graph, basis.request)
    programs = basis.recipe.programs(partition.cuts)
    request = dataclasses.replace(basis.request, ties=_ties(programs))
    plan = make_plan(request, partition, programs[0].first_trainable, _notes(basis.recipe, programs))
    return _Cut(plan, programs, unknown_budgets(len(programs)))


def _by_seconds(basis: PlanBasis, decision: Decision) -> _Cut:
    """Make a plan with the partition and schedule of a decision; the decision was made from the profile."""
    programs = basis.recipe.programs(decision.partition.cuts, decision.partition.order)
    decision = dataclasses.replace(decision, request=dataclasses.replace(decision.request, ties=_ties(programs)))
    notes = [*_notes(basis.recipe, programs), *_profile_notes(basis, decision)]
    plan = plan_of(decision, programs[0].first_trainable, notes)
    if basis.whole_loss:
        speed = min(decision.cluster.devices[i].speed for i in decision.partition.stages[-1].devices)
        plan = with_whole_loss(plan, basis.loss_s / speed, gather_s(decision, basis.outputs_bytes))
    counts: tuple[tuple[int, float], ...] = ()
    if basis.retunes_microbatches:
        assert basis.profile is not None
        most_replicas = max(decision.request.replicas_of(decision.partition.num_stages))
        takes = partial(decision.request.takes, decision.minibatch_size)
        by_count = seconds_by_count(basis.profile, decision.minibatch_size, decision.num_microbatches, takes)
        counts = tuple(at for at in by_count if at[0] >= most_replicas)  # every replica needs at least one
    return _Cut(plan, programs, _budgets(decision), counts)


def _budgets(decision: Decision) -> tuple[MemoryBudget, ...]:
    memory = decision.limits.memory
    if not memory.spec.of_kind.turned:  # the controller does not change it
        return unknown_budgets(decision.partition.num_stages)
    graph, partition = decision.graph, decision.partition
    lines = [workspace_lines(graph, partition.nodes_of(stage)) for stage in partition.stages]
    limits = [stage.limit_bytes for stage in decision.prediction.stages]
    return budgets_of(memory_of(graph, partition, memory), memory, limits, lines)


def _with_shares(plan: Plan, recipe: ModelRecipe, programs: Sequence[StageProgram]) -> Plan:
    """Add each stage's share of the trainable parameters, by which stages clip their gradients separately.

    A synchronous plan needs no shares and is returned unchanged.

    Raises:
        PlanError: stages share a parameter, and their update intervals differ or are too short to exchange gradients.
    """
    interval = plan.weights.interval
    if interval is None:
        return plan
    shared = sorted({name for program in programs for name in program.shared_with})
    if shared and plan.weights.intervals:
        raise PlanError(
            f"{shared[0]!r} belongs to several stages, which add its gradients before every update, and with "
            "update_interval='per_replica' they update at different times. Give update_interval a number of at least "
            f"{len(programs)}, or split points that keep its uses on one stage."
        )
    if shared and interval < len(programs):
        raise PlanError(
            f"{shared[0]!r} belongs to several stages, which add its gradients before every update; with one every "
            f"{interval} micro-batches they would wait for each other all the time. Take schedule='2bw', an "
            f"update_interval of at least {len(programs)}, or split points that keep its uses on one stage."
        )
    owned = [
        sum(recipe.sizes[name] for name in program.trainable if name not in program.shared_with) for program in programs
    ]
    total = sum(owned) or 1
    shares = tuple(count / total for count in owned)
    # Stages that share a parameter exchange gradients at every update, and so wait for each other anyway.
    alone = plan.weights.norm_per_stage and not shared
    return dataclasses.replace(
        plan,
        weights=dataclasses.replace(plan.weights, shares=shares, norm_per_stage=alone),
        schedule=dataclasses.replace(
            plan.schedule, wiring=dataclasses.replace(plan.schedule.wiring, norm_per_stage=alone)
        ),
        spec=plan.spec and dataclasses.replace(plan.spec, overlap=alone),
    )


def _changing_buffers(plan: Plan, programs: Sequence[StageProgram], request: Request) -> list[str]:
    """Return notes on replicas that each change buffers of their own, and on options for replicas without effect.

    Raises:
        PlanError: replicas of a stage change buffers, and replicated_buffers is False. Or replicated_buffers is True,
            num_replicas is configured, and no stage with several replicas changes a buffer.
    """
    notes = []
    for program, workers in zip(programs, plan.schedule.wiring.homes, strict=True):
        changing = _known_to_change(program)
        if len(workers) > 1 and request.replicated_buffers and program.train.tried_constant and not changing:
            notes.append(
                f"No forward changed a buffer of stage {program.index} when the model was tried. Should one do so "
                f"later, each of its {len(workers)} replicas keeps its own."
            )
        if not changing or len(workers) == 1:
            continue
        if not request.replicated_buffers:
            raise _would_differ(program.index, changing[0], len(workers))
        notes.append(
            f"Each of the {len(workers)} replicas of stage {program.index} keeps what its own micro-batches make of "
            f"{changing[0]!r}{' and other buffers' * (len(changing) > 1)}; the first one's are saved and evaluated "
            "with. They are not exact: one worker would have others. A BatchNorm only writes them in training. Where a "
            "forward reads them too, as spectral_norm does, losses and parameters are others as well, and again others "
            "after a stop."
        )
    if request.replicated_buffers and request.replicas is not None and not notes:
        raise PlanError(
            "replicated_buffers=True has no effect here: no stage with several replicas changes a buffer in "
            "its forward. Leave it out."
        )
    if request.replicated_buffers and not notes:
        notes.append("replicated_buffers=True changes nothing: no stage with several replicas changes a buffer.")
    if request.sums_factor < 1.0 and plan.schedule.wiring.lanes == 1:
        notes.append("codec_sums changes nothing: every stage has one worker, and nothing is exchanged.")
    if request.shards:
        notes += _sharded(plan, programs)
    return notes


def _would_differ(stage: int, buffer: str, replicas: int) -> PlanError:
    return PlanError(
        f"Stage {stage} changes {buffer!r} in every forward, so that its {replicas} replicas, which compute "
        "different micro-batches, would differ. Give the stage one worker (num_replicas takes a list, one number per "
        "stage), put the module on another stage with partitioner=[...], use a layer that normalises without "
        "statistics of batches, such as GroupNorm, or set replicated_buffers=True, with which each replica keeps its "
        "own: exact in its parameters where training does not read them, as of a BatchNorm."
    )


def _known_to_change(program: StageProgram) -> tuple[str, ...]:
    """List the buffers that the stage's forward may change in training, except buffers that a trial found constant."""
    constant = frozenset(program.train.tried_constant)
    return tuple(name for name in program.train.changing_buffers if name not in constant)


def _sharded(plan: Plan, programs: Sequence[StageProgram]) -> list[str]:
    """Return notes on optimizer state that is sharded over replicas."""
    notes = []
    for program, workers in zip(programs, plan.schedule.wiring.homes, strict=True):
        if len(workers) == 1 or not program.trainable:
            continue
        kept = sorted(name for name in program.trainable if name in program.shared_with)
        but = (
            f", but for that of {kept[0]!r}{' and others' * (len(kept) > 1)}, which other stages hold too"
            if kept
            else ""
        )
        notes.append(
            f"Each of the {len(workers)} replicas of stage {program.index} holds 1/{len(workers)} of its optimizer's "
            f"state (shard_optimizer){but}."
        )
    return notes or ["shard_optimizer changes nothing: no stage that trains has several workers."]


def _ties(programs: Sequence[StageProgram]) -> bool:
    return any(program.shared_with for program in programs)


def _notes(recipe: ModelRecipe, programs: Sequence[StageProgram]) -> list[str]:
    notes = []
    frozen = len(recipe.sizes) - len(recipe.trainable)
    if frozen:
        notes.append(f"{frozen} of {len(recipe.sizes)} parameters are frozen and stay as they are.")
    unused = [name for name in recipe.trainable if name not in programs[0].num_sites]
    if unused:
        notes.append(f"Never used by forward, so never trained: {', '.join(sorted(unused)[:5])}.")
    return notes


def _profile_notes(basis: PlanBasis, decision: Decision) -> list[str]:
    """Return notes on the machine for which step times are predicted.

    With a described cluster, the note names the device with speed 1.0. Else it warns of workers that share processors.
    """
    if basis.cluster is None:
        devices = {device for stage in decision.partition.stages for device in stage.devices}
        return crowded_notes(len(devices), basis.processors)
    device = basis.profile.device if basis.profile is not None else ""
    where = f": {device}" if device else ""
    return [f"speed 1.0 of a device is that of the machine which timed the model{where}."]


def crowded_notes(workers: int, processors: int | None) -> list[str]:
    """Return a note if there are more workers than processors, up to MOST_EACH per processor; else an empty list.

    Args:
        processors: number of processors that all workers share; None if they share none, or unknown.
    """
    if processors is None or not processors < workers <= MOST_EACH * processors:
        return []
    return [
        f"{workers} workers share this machine's {processors} processor{'s' * (processors > 1)}, but the prediction "
        "counts one for each: steps will take longer."
    ]


def _late_notes(plan: Plan, optimizer_class: str) -> list[str]:
    """Return a note if an asynchronous plan uses an Adam-like optimizer, whose moments magnify delayed gradients."""
    one_stage = plan.partition.num_stages == 1 and plan.weights.rule is not VersionRule.DELAYED
    late = plan.weights.interval is not None and not one_stage
    known = optimizer_class.lower()
    if not late or "adam" not in known or any(name in known for name in ("nadam", "muon")):
        return []
    cure = "" if plan.weights.correction == "predict" else "stale_correction='predict' makes up for a part, and "
    return [
        f"{optimizer_class} is known to suffer from late gradients (arXiv:2606.30634), Muon, NAdam and SGD with "
        f"momentum less; {cure}a synchronous schedule such as '1f1b' has none."
    ]


RECORDED_GAP = {"AdamW": (0.096, 0.069), "Muon": (0.069, 0.034), "NAdam": (0.069, 0.119), "SGD": (0.229, 0.121)}
"""Held-out loss in nats per byte that 2bw adds on a small text, by optimizer, each at its own learning rate:
own_rate_loss_gap_text_2bw_* in docs/results/convergence.json, then the same with stale_correction="predict"."""
WORTH_A_LINE = 0.97
"""Longest step of 2bw, relative to the plan's, of which a plan speaks."""


def _stale_reason(basis: PlanBasis, plan: Plan, programs: Sequence[StageProgram]) -> list[tuple[str, str]]:
    """Describe what 2bw would gain and cost in this plan, if the schedule is open, 2bw is quicker and a price is known.

    The step is that of the plan's own partition; nothing is searched.
    """
    gaps, prediction = RECORDED_GAP.get(basis.optimizer_class), plan.prediction
    if basis.request.schedule != "auto" or gaps is None or prediction is None or basis.whole_loss:
        return []
    request = dataclasses.replace(
        basis.request, schedule="2bw", slack=None, group_size=None, replicas=plan.partition.replicas
    )
    stages = plan.partition.num_stages
    try:
        spec = spec_of(request, stages, plan.num_microbatches, programs[0].first_trainable)
    except PlanError:
        return []
    share = schedule_step_s(spec, costs_of(prediction.stages, prediction.hops)) / prediction.step_s
    if stages == 1 or share > WORTH_A_LINE:
        return []
    gap, corrected = gaps
    text = (
        f"schedule='2bw' would take {share:.2f} of the step, with gradients that are one update late. With "
        f"{basis.optimizer_class} that added {gap:.2f} nats per byte to the loss on a small text, {corrected:.2f} with "
        "stale_correction='predict' (docs/results/convergence.md); on other data it may be more or less"
    )
    return [("2bw", text)]


def _further_reasons(basis: PlanBasis, programs: Sequence[StageProgram], loss_s: float) -> list[tuple[str, str]]:
    """List further entries of Plan.reasons: what the loss averages over, shared parameters, notes of the profile.

    ``loss_s`` is ``Prediction.loss_s``.
    """
    takes = f"; it takes {human_s(loss_s)} of each step" if loss_s else ""
    reasons = [("loss", f"{basis.loss_words}{takes}")] if basis.loss_words else []
    shared = sorted({name for program in programs for name in program.shared_with})
    if shared:
        reasons.append(("shared", f"several stages use {', '.join(shared)} and add up its gradients before every step"))
    return reasons + [("profile", note) for note in (basis.profile.notes if basis.profile is not None else ())]
