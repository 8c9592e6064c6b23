"""Schedule, weight versions and memory model of a request, once its stages and micro-batches are known.

Settings that the request leaves open get a value here: k of kfkb is GROUP_SIZE, which the controller changes while a
run trains, and weight versions and updates follow from the kind of schedule:

                               update every u   versions of weights
pipedream                      u = 1             versions w_s + 1      as published (PipeDream, SOSP'19, 3.3)
pipedream, "per_replica"       u_s = R_s         w_s + 1               as published, of stages with replicas
pipedream, weight_versions V   u >= w_0/(V - 1)  at most V             a bounded ring (after Lv et al., CCGrid'23)
2bw                            u = M             2                     PipeDream-2BW, arXiv:2006.09503
any other schedule             u = M, flushed    1

An update follows every u micro-batches. M is their number in a mini-batch, R_s the replicas of stage s, and w_s the
forwards that all replicas of stage s together run ahead of its backwards (``ahead_of``). With L lanes, u is a multiple
of L, so that every replica has the same number of micro-batches in an update. With "per_replica" that number is one on
every stage: R_s divides L, and all stages have updated after every L micro-batches.
"""

from __future__ import annotations

import dataclasses
import math

from raypipe.errors import PlanError
from raypipe.ir.schedule import Schedule, in_lane_order
from raypipe.ir.schedule_spec import ScheduleSpec, takes
from raypipe.ir.weights import SYNCHRONOUS, VersionRule, WeightPolicy, versions_needed
from raypipe.planner.cost.memory import MemoryModel, resident_under
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.replicas import ahead_of
from raypipe.planner.search.request import AUTO_SLACK, Request


def by_hop(slack: int | tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Expand slack to one value of r per hop (link between neighbouring stages)."""
    return (slack,) * (num_stages - 1) if isinstance(slack, int) else slack


def slack_of(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the slack of each hop of an asynchronous schedule: given by the request, or the default.

    With slack r on a hop, the stage before it runs r forwards further ahead of its backwards than the stage after it.
    The default of "pipedream" is 1, which is PipeDream's NOAM. In "2bw" slack does not change the weight version, so
    the default is 2 if a mini-batch has enough micro-batches: this hides transfers of up to half a micro-batch's
    compute time.
    """
    if request.slack is not None:
        return by_hop(request.slack, num_stages)
    ahead = ahead_of(request.replicas_of(num_stages), by_hop(2, num_stages))
    roomy = request.schedule == "2bw" and num_microbatches >= ahead[0]
    return by_hop(2 if roomy else 1, num_stages)


def weight_policy(request: Request, num_stages: int, num_microbatches: int) -> WeightPolicy:
    """Choose how stages version and update their weights.

    Raises:
        PlanError: the numbers are inconsistent; names the field and a valid value.
    """
    if request.kind.synchronous:
        return SYNCHRONOUS
    _check_lanes(request, num_stages, num_microbatches)
    warmups = _ahead(request, num_stages, num_microbatches)
    interval = _interval(request, num_microbatches, request.num_lanes(num_stages), warmups[0])
    if request.schedule == "2bw":
        _check_two_versions(request, num_stages, num_microbatches, warmups[0])
        rule = VersionRule.DELAYED
    else:
        rule = VersionRule.STAMPED if request.vertical_sync else VersionRule.NEWEST
    intervals: tuple[int, ...] = ()
    if request.per_replica and any(count < interval for count in request.replicas_of(num_stages)):
        intervals = request.replicas_of(num_stages)
    by_stage = intervals or (interval,) * num_stages
    needed = [versions_needed(rule, by_stage[stage], warmups, stage) for stage in range(num_stages)]
    versions = request.weight_versions or max(needed)
    if versions < max(needed) and (versions == 1 or rule is not VersionRule.NEWEST or interval >= num_stages):
        raise PlanError(
            f"weight_versions={versions} is too few for schedule={request.schedule!r} on {num_stages} stages with an "
            f"update every {interval} micro-batches: it takes {max(needed)}. Raise it or update_interval."
        )
    # Clipping by the whole model's norm is a barrier over all stages at every update.
    alone = interval < num_stages or not request.clips or bool(intervals)
    return WeightPolicy(
        rule,
        interval,
        tuple(min(versions, n) for n in needed),
        warmups[0],
        alone,
        intervals=intervals,
        puts_off=versions < max(needed),
        correction=request.stale_correction,
        delays=tuple(1.0 if rule is VersionRule.DELAYED else w / u for w, u in zip(warmups, by_stage, strict=True)),
        discount_updates=request.discount_updates,
    )


def staleness(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Compute, for each stage, by how many updates its gradients are late in the steady state."""
    policy = weight_policy(request, num_stages, num_microbatches)
    if policy.interval is None:
        return (0,) * num_stages
    if policy.rule is VersionRule.DELAYED:
        return (1,) * num_stages
    warmups = _ahead(request, num_stages, num_microbatches)
    ahead = warmups if policy.rule is VersionRule.NEWEST else (warmups[0],) * num_stages
    return tuple(math.ceil(w / policy.interval_of(stage)) for stage, w in enumerate(ahead))


def weight_reason(request: Request, num_stages: int, num_microbatches: int) -> str:
    """Describe the weight versions and the staleness of gradients; "" for a synchronous schedule."""
    policy = weight_policy(request, num_stages, num_microbatches)
    if policy.interval is None:
        return ""
    late = staleness(request, num_stages, num_microbatches)
    held = [policy.capacity(stage) for stage in range(num_stages)]
    every = "micro-batch" if policy.interval == 1 else f"{policy.interval} micro-batches"
    if policy.intervals:
        rates = ", ".join(f"{policy.rate(stage):g}" for stage in range(num_stages))
        every = f"{_by_stage(policy.intervals)} micro-batches, one for each replica, at {rates} times the learning rate"
    text = (
        f"weights are updated every {every} with gradients that are "
        f"{_updates(late)} late; stages keep {_by_stage(held)} versions of their weights"
    )
    if policy.rule is VersionRule.STAMPED and num_stages > 1:
        text += "; a micro-batch uses the same version on every stage"
    if policy.rule is VersionRule.NEWEST and num_stages > 1:
        text += f", and their gradients are {_by_stage(late)} updates late"
    warmups = _ahead(request, num_stages, num_microbatches)
    if any(held[s] < versions_needed(policy.rule, policy.interval_of(s), warmups, s) for s in range(num_stages)):
        text += "; where a stage has no room for another version, the update is put off and joins the next"
    if policy.correction == "predict":
        text += "; forwards use weights that are predicted from the last update (stale_correction)"
    if policy.correction == "discount":
        text += (
            f"; learning rates are divided by their delay to a power that falls to 0 in {policy.discount_updates} "
            "updates (stale_correction)"
        )
    if request.clips:
        text += "; gradients are clipped by the norm of " + (
            "each stage" if policy.norm_per_stage else "the whole model, waited for"
        )
    return text


def _ahead(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Count, by stage, the forwards that all replicas of the stage together run ahead of their backwards."""
    return ahead_of(request.replicas_of(num_stages), slack_of(request, num_stages, num_microbatches))


def _check_two_versions(request: Request, num_stages: int, num_microbatches: int, ahead: int) -> None:
    """Raise PlanError unless two weight versions suffice: forwards run at most one mini-batch ahead of backwards.

    ``ahead`` is the number of forwards that stage 0 runs ahead of its backwards.
    """
    if num_microbatches < num_stages:
        raise PlanError(
            f"schedule='2bw' needs num_microbatches of at least the number of stages, {num_stages}, so that two "
            f"weight versions are enough; it is {num_microbatches}. Raise it, or take schedule='pipedream'."
        )
    if ahead > num_microbatches:
        shape = "-".join(map(str, request.replicas_of(num_stages)))
        what, cure = f"slack={request.slack} runs", "Lower slack or raise"
        if request.slack is None:
            what, cure = f"num_replicas={shape} runs", "Lower num_replicas or raise"
        raise PlanError(
            f"{what} {ahead} forwards ahead on stage 0, but two weight versions are enough for "
            f"{num_microbatches} only, the micro-batches of a mini-batch. {cure} num_microbatches."
        )


def _check_lanes(request: Request, num_stages: int, num_microbatches: int) -> None:
    """Raise PlanError unless replicas have equal shares of every update, so that their weight versions are the same."""
    lanes, counts = request.num_lanes(num_stages), request.replicas_of(num_stages)
    if any(lanes % count for count in counts):
        raise PlanError(
            f"num_lanes={lanes} gives replicas of {'-'.join(map(str, counts))} unequal shares, which schedule="
            f"{request.schedule!r} cannot have, for all make the same updates. Set num_lanes to a multiple of "
            f"{math.lcm(*counts)}, or leave it out."
        )
    if num_microbatches % lanes:
        up = -(-num_microbatches // lanes) * lanes
        raise PlanError(
            f"{num_microbatches} micro-batches are no multiple of the {lanes} lanes into which gradients are summed, "
            f"as schedule={request.schedule!r} needs it with num_replicas or num_lanes. Set num_microbatches={up}, "
            "with a minibatch_size that it divides."
        )


def _interval(request: Request, num_microbatches: int, lanes: int, ahead: int) -> int:
    """Compute the number of micro-batches per update (u in the table of the module).

    Args:
        lanes: number of partial sums of gradients, of which u must be a multiple.
        ahead: forwards that stage 0 runs ahead of its backwards.

    Raises:
        PlanError: the numbers are inconsistent; names the field and a valid value.
    """
    every, versions = request.update_interval, request.weight_versions
    if request.schedule == "2bw":
        return num_microbatches
    if every is not None:
        if num_microbatches % every:
            raise PlanError(
                f"update_interval={every} does not divide num_microbatches={num_microbatches}: an update may not span "
                "two mini-batches."
            )
        if every % lanes:
            raise PlanError(
                f"update_interval={every} is no multiple of the {lanes} lanes into which gradients are summed, so that "
                f"replicas would have unequal shares of an update. Set it to {-(-every // lanes) * lanes}, or leave it "
                "out."
            )
        return every
    if versions is None:
        return lanes
    if versions == 1:
        if ahead:
            raise PlanError(
                "weight_versions=1 leaves no version for the micro-batches under way: set at least 2, or take a "
                "synchronous schedule such as '1f1b'."
            )
        return lanes
    least = max(1, math.ceil(ahead / (versions - 1)))
    smallest = next((u for u in range(least, num_microbatches + 1) if num_microbatches % u == u % lanes == 0), None)
    if smallest is None:
        raise PlanError(
            f"weight_versions={versions} allows an update every {least} micro-batches at most often, but a mini-batch "
            f"has {num_microbatches}. Set num_microbatches to at least {least}, or weight_versions to at least "
            f"{math.ceil(ahead / num_microbatches) + 1}."
        )
    return smallest


def _updates(late: tuple[int, ...]) -> str:
    if len(set(late)) > 1:
        return f"{min(late)} to {max(late)} updates"
    return f"{late[0]} update{'s' * (late[0] != 1)}"


def _by_stage(numbers: list[int] | tuple[int, ...]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


GROUP_SIZE = 2
"""Default k of kfkb."""


def spec_of(request: Request, num_stages: int, num_microbatches: int, first_trainable: int = 0) -> ScheduleSpec:
    """Build the schedule of a request, with a default for every number that it leaves open.

    Raises:
        PlanError: numbers of an asynchronous schedule are inconsistent; names the field and a valid value.
    """
    kind, slack = request.schedule, request.slack
    if kind == "auto":
        kind, slack = ("slack", AUTO_SLACK) if num_stages > 1 else ("1f1b", None)
    policy = weight_policy(request, num_stages, num_microbatches)
    if not policy.synchronous:
        hops = slack_of(request, num_stages, num_microbatches)
    elif takes(kind, "slack"):
        hops = by_hop(slack or (AUTO_SLACK if kind == "slack" else 1), num_stages)
    else:
        hops = ()
    return ScheduleSpec(
        kind,
        num_microbatches,
        group_size=request.group_size or min(GROUP_SIZE, num_microbatches) if takes(kind, "group_size") else 1,
        slack=hops,
        lag=request.lag if takes(kind, "lag") else (),
        chunks=num_stages // request.workers(num_stages) if takes(kind, "chunks") else 1,
        first_trainable=first_trainable,
        overlap=request.overlaps if policy.synchronous else policy.norm_per_stage,
        update_interval=policy.interval if takes(kind, "update_interval") else None,
        replicas=request.replicas_of(num_stages) if request.in_lanes else (),
        lanes=request.num_lanes(num_stages) if request.in_lanes else 1,
        per_replica=bool(policy.intervals),
    )


def build_schedule(request: Request, num_stages: int, num_microbatches: int, first_trainable: int) -> Schedule:
    """Build the compute actions of one step, which begins and ends with an empty pipeline even if asynchronous.

    Args:
        first_trainable: index of the lowest stage with a backward.
    """
    return schedule_of(spec_of(request, num_stages, num_microbatches, first_trainable), num_stages)


def placement_of(request: Request, num_stages: int) -> tuple[int, ...]:
    """Return the worker of each stage, for a schedule with several stages per worker; replicas count as one worker."""
    placement = build_schedule(request, num_stages, 1, 0).wiring.placement
    return tuple(worker // request.replicas_of(num_stages)[0] for worker in placement)


def memory_model(request: Request, num_stages: int, num_microbatches: int, microbatch_size: int) -> MemoryModel:
    """Build the model of the memory of the plan's stages."""
    spec = spec_of(request, num_stages, num_microbatches)
    policy = weight_policy(request, num_stages, num_microbatches)
    predicts = policy.correction == "predict"
    # The weights before the last update are held beside the optimizer's state.
    counted, whole = None, request.optimizer_factor + predicts
    if not spec.of_kind.memory_formula or request.replicated:
        counted = resident_under(spec, num_stages, request.workers(num_stages))
        counted = dataclasses.replace(counted, versions=policy.capacities)
    return MemoryModel(
        spec,
        microbatch_size=microbatch_size,
        weight_versions=max(policy.capacities) if request.vertical_sync and policy.capacities else None,
        version_limit=request.weight_versions,
        optimizer_factor=tuple(whole / n for n in request.replicas_of(num_stages)) if request.shards else whole,
        leaf_factor=request.leaf_factor,
        predicts=predicts,
        state_copies=request.state_copies,
        # Once per worker, whose stages share it.
        reserve_bytes=-(-request.reserve_bytes * request.workers(num_stages) // num_stages),
        gradient_factor=tuple(_sums(request, policy, spec, count) for count in request.replicas_of(num_stages)),
        resident=counted,
        recompute=request.recomputes,
    )


def _sums(request: Request, policy: WeightPolicy, spec: ScheduleSpec, replicas: int) -> int:
    """Count the gradient sums of each of a stage's workers: one per lane of the worker (``engine.stage.gradients``).

    A single sum is enough without replicas if each lane gets at most one micro-batch of an update.
    """
    alone = replicas == 1 and request.sums_factor == 1.0 and not policy.puts_off
    if alone and in_lane_order(0, policy.interval or spec.num_microbatches, spec.lanes):
        return 1
    return -(-spec.lanes // replicas)
