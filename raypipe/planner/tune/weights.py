"""Weight versions of a request: the rule, the update interval, how many versions each stage has room for, and in words.

pipedream                      u = 1             versions w_s + 1      as published (PipeDream, SOSP'19, 3.3)
pipedream, "per_replica"       u_s = R_s         w_s + 1               as published, of stages with replicas
pipedream, weight_versions V   u >= w_0/(V - 1)  at most V             a bounded ring (after Lv et al., CCGrid'23)
2bw                            u = M             2                     PipeDream-2BW, arXiv:2006.09503
any other schedule             u = M, flushed    1

With replicas w_s is what all of a stage run ahead together (``ahead_of``), and an update, which all of them share, has
a multiple of L micro-batches, the lanes: u = L is the least in which every replica has as many.
"""

from __future__ import annotations

import math

from raypipe.errors import PlanError
from raypipe.ir.weights import SYNCHRONOUS, VersionRule, WeightPolicy, versions_needed
from raypipe.planner.schedule.replicas import ahead_of
from raypipe.planner.tune.request import Request

__all__ = ["by_hop", "slack_of", "staleness", "weight_policy", "weight_reason"]


def by_hop(slack: int | tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """r of every hop, where one number may stand for all of them."""
    return (slack,) * (num_stages - 1) if isinstance(slack, int) else slack


def slack_of(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards that may be under way over each hop of an asynchronous schedule.

    Where nobody says, "pipedream" keeps to NOAM. In "2bw" the version does not depend on it, so it hides half a
    micro-batch's transfer like the synchronous default, where a mini-batch has room for that.
    """
    if request.slack is not None:
        return by_hop(request.slack, num_stages)
    ahead = ahead_of(request.replicas_of(num_stages), by_hop(2, num_stages))
    roomy = request.schedule == "2bw" and num_microbatches >= ahead[0]
    return by_hop(2 if roomy else 1, num_stages)


def weight_policy(request: Request, num_stages: int, num_microbatches: int) -> WeightPolicy:
    """What the stages do with their weights.

    Raises:
        PlanError: the numbers do not go together; names the field and what would do.
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
    given = request.weight_versions or max(needed)
    if given < max(needed) and (given == 1 or rule is not VersionRule.NEWEST or interval >= num_stages):
        raise PlanError(
            f"weight_versions={given} is too few for schedule={request.schedule!r} on {num_stages} stages with an "
            f"update every {interval} micro-batches: it takes {max(needed)}. Raise it or update_interval."
        )
    # Who must see the whole model's norm waits for all stages at every update.
    alone = interval < num_stages or not request.clips or bool(intervals)
    capacities = tuple(min(given, n) for n in needed)
    return WeightPolicy(
        rule, interval, capacities, warmups[0], alone, intervals=intervals, puts_off=given < max(needed)
    )


def staleness(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Updates by which a gradient is late, by stage, in the steady state."""
    policy = weight_policy(request, num_stages, num_microbatches)
    if policy.interval is None:
        return (0,) * num_stages
    if policy.rule is VersionRule.DELAYED:
        return (1,) * num_stages
    warmups = _ahead(request, num_stages, num_microbatches)
    ahead = warmups if policy.rule is VersionRule.NEWEST else (warmups[0],) * num_stages
    return tuple(math.ceil(w / policy.interval_of(stage)) for stage, w in enumerate(ahead))


def weight_reason(request: Request, num_stages: int, num_microbatches: int) -> str:
    """Versions and staleness in words; empty for a synchronous schedule."""
    policy = weight_policy(request, num_stages, num_microbatches)
    if policy.interval is None:
        return ""
    late = staleness(request, num_stages, num_microbatches)
    held = [policy.capacity(stage) for stage in range(num_stages)]
    every = _count(policy.interval, "micro-batch", "micro-batches")
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
    if request.clips:
        text += "; gradients are clipped by the norm of " + (
            "each stage" if policy.norm_per_stage else "the whole model, waited for"
        )
    return text


def _ahead(request: Request, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """By stage, forwards that it runs ahead."""
    return ahead_of(request.replicas_of(num_stages), slack_of(request, num_stages, num_microbatches))


def _check_two_versions(request: Request, num_stages: int, num_microbatches: int, ahead: int) -> None:
    """Two versions of the weights are enough where no micro-batch outlives the mini-batch after its own."""
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
    """Replicas have equal shares of every update, so that they have the same versions and make it together."""
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
    """Micro-batches per update."""
    given, versions = request.update_interval, request.weight_versions
    if request.schedule == "2bw":
        return num_microbatches
    if given is not None:
        if num_microbatches % given:
            raise PlanError(
                f"update_interval={given} does not divide num_microbatches={num_microbatches}: an update may not span "
                "two mini-batches."
            )
        if given % lanes:
            raise PlanError(
                f"update_interval={given} is no multiple of the {lanes} lanes into which gradients are summed, so that "
                f"replicas would have unequal shares of an update. Set it to {-(-given // lanes) * lanes}, or leave it "
                "out."
            )
        return given
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
    found = next((u for u in range(least, num_microbatches + 1) if num_microbatches % u == u % lanes == 0), None)
    if found is None:
        raise PlanError(
            f"weight_versions={versions} allows an update every {least} micro-batches at most often, but a mini-batch "
            f"has {num_microbatches}. Set num_microbatches to at least {least}, or weight_versions to at least "
            f"{math.ceil(ahead / num_microbatches) + 1}."
        )
    return found


def _updates(late: tuple[int, ...]) -> str:
    if len(set(late)) > 1:
        return f"{min(late)} to {max(late)} updates"
    return f"{late[0]} update{'s' * (late[0] != 1)}"


def _by_stage(numbers: list[int] | tuple[int, ...]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


def _count(number: int, one: str, many: str) -> str:
    return one if number == 1 else f"{number} {many}"
