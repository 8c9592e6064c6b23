"""Making a plan, in whichever process: the client, the driver actor, or threads. The same basis gives the same plan.

    PlanBasis   recipe of the model, profile, request, cluster, facts about optimizer and machine
        |  plan_for: decide, cut, schedule, shares, memory budgets, notes
        v
    Planned

Nothing here looks at a clock, at the environment or at a tensor. ``another`` is the basis of a later plan of a run that
has begun, with another number of stages or other links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from raypipe.engine.capture.recipe import ModelRecipe
from raypipe.engine.stage import StageProgram
from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.weights import VersionRule
from raypipe.planner.columns import workspace_lines
from raypipe.planner.control import MemoryBudget, budgets_of, unknown_budgets
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.tune import (
    Decision,
    Request,
    decide,
    make_partition,
    make_plan,
    plan_of,
    seconds_by_count,
)
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.stage_words import stage_words

__all__ = [
    "PlanBasis", "crowded_notes", "decided", "known_request",
    "plan_for",
]  # fmt: skip

MOST_EACH = 2
"""Workers per processor; a plan for more of them must be meant for other machines."""
ONE_SIZE = "retune_microbatches has no effect: only one size of micro-batches is possible or was measured."


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """What a plan is made from.

    Attributes:
        recipe: of the model.
        request: what was configured; what it leaves open is decided anew with every plan.
        profile: seconds and bytes of every operation; None where nothing is left open that these decide.
        cluster: what to plan for; None for equal workers.
        optimizer_factor: bytes of optimizer state per byte of trainable parameters.
        optimizer_class: its name; "" where it cannot be made for one parameter alone.
        retunes_microbatches: the controller may change the number of micro-batches.
        module_classes: class name of every module of the model, by path.
        loss_words: what the loss averages over; "" where it goes without saying.
        processors: of the machine that all workers will share; None where they will not, or nobody knows.
        notes: further sentences for every plan.
    """

    recipe: ModelRecipe
    request: Request
    profile: Profile | None = None
    cluster: Cluster | None = None
    optimizer_factor: float = 2.0
    optimizer_class: str = ""
    retunes_microbatches: bool = False
    module_classes: Mapping[str, str] = field(default_factory=dict)
    loss_words: str = ""
    processors: int | None = None
    notes: tuple[str, ...] = ()


def decided(basis: PlanBasis) -> Decision:
    """Everything that the request leaves open, chosen.

    Raises:
        PlanError: nothing fits; names stage or field, and numbers.
    """
    assert basis.profile is not None, "without a profile there is nothing to decide by"
    return decide(known_request(basis), basis.profile, basis.cluster)


def known_request(basis: PlanBasis) -> Request:
    """The request, with what the model and its profile say of it."""
    sizes = [] if basis.profile is None else [size for size, _ in basis.profile.seconds_by_size]
    return dataclasses.replace(
        basis.request,
        optimizer_factor=basis.optimizer_factor,
        # The fewest samples that the model ran with.
        least_microbatch=max(basis.request.least_microbatch, min(sizes) if len(sizes) > 1 else 1),
        changing=_changing(basis.recipe)
        if basis.request.replicas is None and not basis.request.replicated_buffers
        else (),
    )


def _changing(recipe: ModelRecipe) -> tuple[int, ...]:
    """Positions of the nodes of modules that own a buffer which forwards change; all nodes where an owner has none."""
    (whole,) = recipe.programs(())
    owners = {name.rpartition(".")[0] for name in _known_to_change(whole)}
    nodes = recipe.graph.nodes
    found = {owner: [i for i, node in enumerate(nodes) if _within(node.module, owner)] for owner in owners}
    if not all(found.values()):
        return tuple(range(len(nodes)))
    return tuple(sorted({i for positions in found.values() for i in positions}))


def _within(module: str, owner: str) -> bool:
    """Whether a module is the owner or a part of it."""
    return not owner or module == owner or module.startswith(f"{owner}.")


def plan_for(basis: PlanBasis, decision: Decision | None = None, *, generation: int = 0) -> Planned:
    """The plan, and what its making tells besides.

    Args:
        decision: of this basis, where it has been made already.
        generation: of the plan: how many plans the run had before.

    Raises:
        PlanError: nothing fits, or the stages cannot run as they were asked to; names the field.
        CaptureError: the model cannot be cut like this.
    """
    cut = _by_parameters(basis) if basis.profile is None else _by_seconds(basis, decision or decided(basis))
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
            *plan.reasons,
            *_further_reasons(basis, programs),
        ),
    )
    return Planned(plan, cut.budgets, cut.counts)


class _Cut(NamedTuple):
    """A plan without its shares and most of its notes, the stages that it cuts, and what is told besides it."""

    plan: Plan
    programs: tuple[StageProgram, ...]
    budgets: tuple[MemoryBudget, ...]
    counts: tuple[tuple[int, float], ...] = ()


def _by_parameters(basis: PlanBasis) -> _Cut:
    """Equal parameters, where nobody asks for seconds."""
    partition = make_partition(basis.recipe.graph, basis.request)
    programs = basis.recipe.programs(partition.cuts)
    request = dataclasses.replace(basis.request, ties=_ties(programs))
    plan = make_plan(request, partition, programs[0].first_trainable, _notes(basis.recipe, programs))
    return _Cut(plan, programs, unknown_budgets(len(programs)))


def _by_seconds(basis: PlanBasis, decision: Decision) -> _Cut:
    """As it was decided by what was measured."""
    programs = basis.recipe.programs(decision.partition.cuts, decision.partition.order)
    decision = dataclasses.replace(decision, request=dataclasses.replace(decision.request, ties=_ties(programs)))
    notes = [*_notes(basis.recipe, programs), *_profile_notes(basis, decision)]
    plan = plan_of(decision, programs[0].first_trainable, notes)
    counts: tuple[tuple[int, float], ...] = ()
    if basis.retunes_microbatches:
        assert basis.profile is not None
        most_replicas = max(decision.request.replicas_of(decision.partition.num_stages))
        takes = partial(decision.request.takes, decision.minibatch_size)
        by_count = seconds_by_count(basis.profile, decision.minibatch_size, decision.num_microbatches, takes)
        counts = tuple(at for at in by_count if at[0] >= most_replicas)  # every replica has some of them
    return _Cut(plan, programs, _budgets(decision), counts)


def _budgets(decision: Decision) -> tuple[MemoryBudget, ...]:
    memory = decision.limits.memory
    if not memory.spec.of_kind.turned:  # the controller leaves it alone
        return unknown_budgets(decision.partition.num_stages)
    graph, partition = decision.graph, decision.partition
    lines = [workspace_lines(graph, partition.nodes_of(stage)) for stage in partition.stages]
    limits = [stage.limit_bytes for stage in decision.prediction.stages]
    return budgets_of(memory_of(graph, partition, memory), memory, limits, lines)


def _with_shares(plan: Plan, recipe: ModelRecipe, programs: Sequence[StageProgram]) -> Plan:
    """The plan with each stage's share of what learns, where stages clip their own norms.

    Raises:
        PlanError: stages that do not wait for each other share a parameter.
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
    # Whoever shares a parameter exchanges gradients at every update, and with them waits anyway.
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
    """Notes on replicas that each change buffers by what they see, and on fields for replicas that have no effect.

    Raises:
        PlanError: there are such stages and nobody asked for that, or somebody did and there are none.
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
            "replicated_buffers=True means nothing here: no stage with several replicas changes a buffer in its "
            "forward. Leave it out."
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
        f"Stage {stage} changes {buffer!r} in every forward, so that its {replicas} replicas would come to differ, "
        "each by the micro-batches that it saw. Give the stage one worker (num_replicas takes a list, one number per "
        "stage), put the module on another stage with partitioner=[...], use a layer that normalises without "
        "statistics of batches, such as GroupNorm, or set replicated_buffers=True, with which each replica keeps its "
        "own: exact in its parameters where training does not read them, as of a BatchNorm."
    )


def _known_to_change(program: StageProgram) -> tuple[str, ...]:
    """The buffers that forwards of it change in training; a run with replicas watches those that a trial left alone."""
    constant = frozenset(program.train.tried_constant)
    return tuple(name for name in program.train.changing_buffers if name not in constant)


def _sharded(plan: Plan, programs: Sequence[StageProgram]) -> list[str]:
    """Notes on optimizer state that replicas share out."""
    found = []
    for program, workers in zip(programs, plan.schedule.wiring.homes, strict=True):
        if len(workers) == 1 or not program.trainable:
            continue
        kept = sorted(name for name in program.trainable if name in program.shared_with)
        but = (
            f", but for that of {kept[0]!r}{' and others' * (len(kept) > 1)}, which other stages hold too"
            if kept
            else ""
        )
        found.append(
            f"Each of the {len(workers)} replicas of stage {program.index} holds 1/{len(workers)} of its optimizer's "
            f"state (shard_optimizer){but}."
        )
    return found or ["shard_optimizer changes nothing: no stage that trains has several workers."]


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
    """What the speeds of a described cluster are relative to; of one machine, that workers share its processors."""
    if basis.cluster is None:
        devices = {device for stage in decision.partition.stages for device in stage.devices}
        return crowded_notes(len(devices), basis.processors)
    device = basis.profile.device if basis.profile is not None else ""
    where = f": {device}" if device else ""
    return [f"speed 1.0 of a device is that of the machine which timed the model{where}."]


def crowded_notes(workers: int, processors: int | None) -> list[str]:
    """A sentence where workers wait for processors, of which predicted steps know nothing.

    Args:
        processors: that all of them share; None where nobody knows.
    """
    if processors is None or not processors < workers <= MOST_EACH * processors:
        return []
    return [
        f"{workers} workers share this machine's {processors} processor{'s' * (processors > 1)}, but the prediction "
        "counts one for each: steps will take longer."
    ]


def _late_notes(plan: Plan, optimizer_class: str) -> list[str]:
    """A sentence where late gradients are known to hurt: adaptive moments magnify them."""
    one_stage = plan.partition.num_stages == 1 and plan.weights.rule is not VersionRule.DELAYED
    late = plan.weights.interval is not None and not one_stage
    if not late or "adam" not in optimizer_class.lower():
        return []
    return [
        f"{optimizer_class} is known to suffer from late gradients (arXiv:2606.30634), SGD with momentum less; a "
        "synchronous schedule such as '1f1b' has none."
    ]


def _further_reasons(basis: PlanBasis, programs: Sequence[StageProgram]) -> list[tuple[str, str]]:
    """What was found on the way, for whoever wants to know all of it."""
    found = [("loss", basis.loss_words)] if basis.loss_words else []
    shared = sorted({name for program in programs for name in program.shared_with})
    if shared:
        found.append(("shared", f"several stages use {', '.join(shared)} and add up its gradients before every step"))
    return found + [("profile", note) for note in (basis.profile.notes if basis.profile is not None else ())]
