"""Asynchronous schedules, with replicas and without: rows, phases and weight versions against their laws."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe.planner.schedule.asynchronous as module
from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.schedule import COMPUTE, Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Phase
from raypipe.ir.weights import VersionRule, versions_needed
from raypipe.planner.dependency_tables import build
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.asynchronous import finite, minibatches_to_drain, part
from raypipe.planner.schedule.lower import lower, lowered_and_checked, validate
from raypipe.planner.schedule.replicas import ahead_of, warmups_of
from raypipe.planner.schedule.text import draw
from raypipe.planner.search import Request, build_schedule, plan_of, weight_policy, weight_reason
from raypipe.planner.search.choose import decide
from raypipe.planner.simulator import Costs, simulate
from tests.planner.schedule.test_replicas import PIPEDREAM
from tests.planner.search.test_choose import MIB, chain
from tests.weight_rules import version_of

REQUEST = Request(2, None, (), 24, 12, 99, "pipedream", replicas=(2, 1), partitioner="prefix_sum")
FOUR = Request(4, None, (), 24, 12, 99, "pipedream")


class Case(NamedTuple):
    """A schedule, the replicas of its stages, and the forwards that each stage runs ahead."""

    schedule: Schedule
    counts: tuple[int, ...]
    ahead: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn, most: int = 4) -> Case:
    counts = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=5)))
    lanes = math.lcm(*counts) * draw(st.integers(1, 2))
    interval = lanes * draw(st.integers(1, 3))
    slack = tuple(draw(st.integers(1, 3)) for _ in counts[1:])
    spec = ScheduleSpec(
        "pipedream", interval * draw(st.integers(1, 3)), slack=slack, overlap=True, update_interval=interval,
        first_trainable=draw(st.integers(0, len(counts) - 1)), replicas=counts, lanes=lanes,
        per_replica=draw(st.booleans()),
    )  # fmt: skip
    return Case(schedule_of(spec, len(counts)), counts, ahead_of(counts, slack))


def holders_of(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(stage, number) for stage, count in enumerate(counts) for number in range(count)]


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        (ScheduleSpec("2bw", 2, slack=(1, 1), overlap=True), 3),
        (ScheduleSpec("pipedream", 2, slack=(1,), overlap=True, update_interval=2, replicas=(2, 1), lanes=2), 2),
    ],
)
def test_the_pictures_of_the_module(spec: ScheduleSpec, stages: int) -> None:
    drawn = draw(schedule_of(spec, stages), repeats=2)
    assert drawn in "".join(line.removeprefix("    ") for line in inspect.getdoc(module).splitlines(keepends=True))


@pytest.mark.parametrize(("replicas", "ahead", "noam"), PIPEDREAM)
def test_micro_batches_in_flight_are_pipedreams(replicas: tuple[int, ...], ahead: tuple[int, ...], noam: int) -> None:
    """NOAM on each replica of stage 0: 2 for 15-1, where the 15 together have 30."""
    lanes = math.lcm(*replicas)
    spec = ScheduleSpec("pipedream", 2 * lanes, slack=(1,) * (len(replicas) - 1), replicas=replicas, lanes=lanes)
    lowered = lower(schedule_of(spec, len(replicas)))
    validate(lowered, repeats=2)
    peaks = build(lowered, 2).peak_in_flight()
    assert peaks == tuple(w + 1 for w in ahead)
    assert peaks[0] == noam == math.ceil(sum(replicas) / replicas[0])
    assert lowered.wiring.update_interval == lanes


@pytest.mark.slow
@given(cases(), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_each_micro_batch_once_in_turn_and_nothing_waits_forever(case: Case, repeats: int) -> None:
    schedule, counts, ahead = case
    lowered = lower(schedule)
    validate(lowered, repeats)
    assert all(before >= after for before, after in pairwise(ahead)), "no stage is ahead of the one before"
    total = schedule.stride * (repeats + minibatches_to_drain(schedule.stride, ahead[0]))
    assert schedule.num_microbatches(repeats) == total
    rows = lowered.rows(repeats)
    assert set(Counter(a for row in rows for a in row if a.op in COMPUTE).values()) == {1}
    for (stage, number), row in zip(holders_of(counts), rows, strict=True):
        assert [a.microbatch for a in row if a.op is Op.F] == list(range(number, total, counts[stage]))
        interval = schedule.wiring.interval_of(stage)
        assert [a.microbatch for a in row if a.op is Op.STEP] == list(range(interval - 1, total, interval))


@pytest.mark.slow
@given(cases(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_parts_make_up_the_whole(case: Case, more: int) -> None:
    schedule, counts, ahead = case
    lowered, drained = lower(schedule), minibatches_to_drain(schedule.stride, ahead[0])
    assert lower(finite(schedule, drained + more)).rows() == lowered.rows(more)
    for fewer in range(1, drained + 1):
        validate(lower(finite(schedule, fewer)))
        assert finite(schedule, fewer).num_microbatches() == fewer * schedule.stride
    phases = [part(lowered, phase) for phase in (Phase.FILL, Phase.STEADY, Phase.DRAIN)]
    for worker in range(sum(counts)):
        shifted = [a.shifted(i * schedule.stride) for i, rows in enumerate(phases) for a in rows.row(worker)]
        assert tuple(shifted) == lowered.row(worker, 2)


@pytest.mark.slow
@given(cases())
@settings(max_examples=80, deadline=None)
def test_the_newest_version_is_what_the_row_has_made_on_all_replicas_and_no_more_are_alive_than_needed(
    case: Case,
) -> None:
    schedule, counts, ahead = case
    for (stage, _), row in zip(holders_of(counts), lower(schedule).rows(3), strict=True):
        if stage < schedule.wiring.first_trainable:
            continue
        newest, used = 0, dict[int, int]()
        interval = schedule.wiring.interval_of(stage)
        for action in row:
            if action.op is Op.F:
                used[action.microbatch] = newest
                assert newest == version_of(VersionRule.NEWEST, action.microbatch, interval, ahead, stage)
                if not schedule.wiring.intervals:
                    assert version_of(VersionRule.STAMPED, action.microbatch, interval, ahead, stage) <= newest
            elif action.op is Op.B:
                del used[action.microbatch]
            elif action.op is Op.STEP:
                newest += 1
                alive = len({*used.values(), newest})
                assert alive <= versions_needed(VersionRule.NEWEST, interval, ahead, stage)


@pytest.mark.slow
@given(cases(most=1), st.sampled_from([VersionRule.STAMPED, VersionRule.DELAYED]))
def test_no_more_versions_are_alive_than_the_other_rules_need(case: Case, rule: VersionRule) -> None:
    """A version lives from the update that makes it to the last backward of a micro-batch that uses it."""
    schedule, _, ahead = case
    stages, interval = schedule.num_stages, schedule.wiring.update_interval
    slack = tuple(a - b for a, b in pairwise(ahead))
    spec = ScheduleSpec("pipedream", schedule.stride, slack=slack, overlap=True, update_interval=interval)
    if rule is VersionRule.DELAYED:
        interval = max(schedule.stride, ahead[0])
        spec = ScheduleSpec("2bw", interval, slack=slack, overlap=True)
    for stage, row in enumerate(lower(schedule_of(spec, stages)).rows(4)):
        last_use = {}
        for at, action in enumerate(row):
            if action.op is Op.B:
                last_use[version_of(rule, action.microbatch, interval, ahead, stage)] = at
        newest, most = 0, 1
        for at, action in enumerate(row):
            if action.op is Op.F:
                assert version_of(rule, action.microbatch, interval, ahead, stage) <= newest, "not made yet"
            if action.op is Op.STEP:
                newest += 1
                most = max(most, 1 + sum(end > at for version, end in last_use.items() if version < newest))
        assert most <= versions_needed(rule, interval, ahead, stage)


@pytest.mark.parametrize("replicas", [(1, 1), (3, 1)])
@pytest.mark.parametrize(("count", "backward_s"), [(12, 2.0), (3, 0.4)])
def test_no_bubble_between_mini_batches(replicas: tuple[int, int], count: int, backward_s: float) -> None:
    """A stage takes as many times as long as it has replicas."""
    spec = ScheduleSpec("pipedream", count, slack=(1,), overlap=True, replicas=replicas, lanes=replicas[0])
    costs = Costs(tuple(map(float, replicas)), tuple(backward_s * n for n in replicas))
    fewer, more = (simulate(lower(schedule_of(spec, 2)), costs, repeats=n).makespan_s for n in (5, 9))
    assert (more - fewer) / 4 == pytest.approx(count * (1.0 + backward_s))


@pytest.mark.parametrize("frozen", range(4))
@pytest.mark.parametrize("slack", [1, 2])
def test_stages_without_a_backward_do_not_wait_for_the_norm_of_those_that_wait_for_them(
    frozen: int, slack: int
) -> None:
    """Later stages run ahead, and so need forwards of the next update before the norm of this one."""
    spec = ScheduleSpec("2bw", 6, slack=(slack,) * 3, first_trainable=frozen)
    lowered = lowered_and_checked(schedule_of(spec, 4))
    assert [lowered.wiring.alone(worker) for worker in range(4)] == [worker < frozen for worker in range(4)]
    assert [len(lowered.wiring.normed_with(stage)) for stage in range(4)] == [1] * frozen + [4 - frozen] * (4 - frozen)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"slack": (1, 1), "update_interval": 3}, "An update every 3 micro-batches does not go into"),
        ({"slack": (1,), "update_interval": 2}, "3 stages have 2 hops"),
        ({"slack": (1, 1), "replicas": (2, 1, 1), "lanes": 2, "update_interval": 1}, "unequal shares"),
        ({"slack": (1, 1), "replicas": (3, 1, 1), "lanes": 4, "update_interval": 4}, "unequal shares"),
        ({"slack": (1, 1), "replicas": (2, 1, 1), "lanes": 4, "update_interval": 2}, "unequal shares"),
    ],
)
def test_numbers_that_make_no_schedule(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        schedule_of(ScheduleSpec("pipedream", 4, **numbers), 3)
    assert warmups_of((15, 1)) == (1, 0)


@pytest.mark.parametrize(
    ("request_", "changes", "count", "interval", "ahead", "capacities"),
    [
        (FOUR, {"schedule": "1f1b"}, 12, None, 0, ()),
        (FOUR, {}, 12, 1, 3, (4, 3, 2, 1)),
        (FOUR, {"vertical_sync": True}, 12, 1, 3, (4, 4, 4, 4)),
        (FOUR, {"weight_versions": 2}, 12, 3, 3, (2, 2, 2, 1)),
        (FOUR, {"weight_versions": 3}, 12, 2, 3, (3, 2, 2, 1)),
        (FOUR, {"update_interval": 4}, 12, 4, 3, (2, 2, 2, 1)),
        (FOUR, {"update_interval": 1, "weight_versions": 2}, 12, 1, 3, (2, 2, 2, 1)),
        (FOUR, {"schedule": "2bw"}, 12, 12, 6, (2, 2, 2, 2)),
        (FOUR, {"schedule": "2bw", "slack": 4}, 12, 12, 12, (2, 2, 2, 2)),
        (FOUR, {"slack": 2}, 12, 1, 6, (7, 5, 3, 1)),
        (FOUR, {"slack": (1, 1, 3)}, 12, 1, 5, (6, 5, 4, 1)),
        (FOUR, {"slack": 2, "weight_versions": 3}, 12, 3, 6, (3, 3, 2, 1)),
        (REQUEST, {}, 12, 2, 2, (2, 1)),
        (REQUEST, {"replicas": (1, 2)}, 12, 2, 2, (2, 1)),
        (REQUEST, {"replicas": (3, 1)}, 12, 3, 3, (2, 1)),
        (REQUEST, {"replicas": (2, 2)}, 12, 2, 2, (2, 1)),
        (REQUEST, {"replicas": (15, 1)}, 30, 15, 15, (2, 1)),
        (REQUEST, {"replicas": (1, 2), "vertical_sync": True}, 12, 2, 2, (2, 2)),
        (REQUEST, {"update_interval": 4}, 12, 4, 2, (2, 1)),
        (REQUEST, {"lanes": 4}, 12, 4, 2, (2, 1)),
        (REQUEST, {"replicas": (1, 1), "lanes": 2}, 12, 2, 1, (2, 1)),
        (REQUEST, {"slack": 2}, 12, 2, 2, (2, 1)),
        (REQUEST, {"slack": 3}, 12, 2, 4, (3, 1)),
        (REQUEST, {"slack": 3, "weight_versions": 2}, 12, 4, 4, (2, 1)),
        (REQUEST, {"schedule": "2bw"}, 12, 12, 2, (2, 2)),
    ],
)
def test_policies(
    request_: Request,
    changes: dict[str, Any],
    count: int,
    interval: int | None,
    ahead: int,
    capacities: tuple[int, ...],
) -> None:
    asked, stages = dataclasses.replace(request_, **changes), request_.num_stages or 0
    policy = weight_policy(asked, stages, count)
    assert (policy.interval, policy.ahead, policy.capacities) == (interval, ahead, capacities)
    if interval:
        build_schedule(asked, stages, count, 0)
        assert "update" in weight_reason(asked, stages, count)


@pytest.mark.parametrize(
    ("request_", "changes", "count", "words"),
    [
        (FOUR, {"schedule": "2bw"}, 3, r"num_microbatches of at least the number of stages, 4, .* it is 3"),
        (FOUR, {"schedule": "2bw", "slack": 5}, 12, r"slack=5 runs 15 forwards ahead .* 12 only"),
        (FOUR, {"update_interval": 5}, 12, r"update_interval=5 does not divide num_microbatches=12"),
        (FOUR, {"weight_versions": 1}, 12, r"weight_versions=1 .* '1f1b'"),
        (FOUR, {"weight_versions": 2}, 2, r"weight_versions=2 .* at least 3"),
        (
            FOUR,
            {"weight_versions": 2, "update_interval": 1, "vertical_sync": True},
            12,
            r"versions=2 .* takes 4",
        ),
        (REQUEST, {"replicas": (3, 1)}, 8, r"8 micro-batches are no multiple of the 3 lanes .* Set num_microbatches=9"),
        (REQUEST, {"schedule": "2bw", "lanes": 4}, 6, r"6 micro-batches .* schedule='2bw' .* Set num_microbatches=8"),
        (REQUEST, {"update_interval": 3}, 12, r"update_interval=3 is no multiple of the 2 lanes .* Set it to 4"),
        (REQUEST, {"replicas": (3, 1), "lanes": 4}, 12, r"num_lanes=4 gives replicas of 3-1 unequal .* multiple of 3"),
        (REQUEST, {"schedule": "2bw", "slack": 13}, 12, r"slack=13 runs 14 forwards ahead"),
    ],
)
def test_policies_that_cannot_be(request_: Request, changes: dict[str, Any], count: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        weight_policy(dataclasses.replace(request_, **changes), request_.num_stages or 0, count)


def test_a_plan_counts_versions_and_micro_batches_by_replica() -> None:
    """Three replicas of stage 0 hold two micro-batches each and two versions; the exchange is part of every update."""
    request = dataclasses.replace(REQUEST, replicas=(3, 1))
    plan = plan_of(decide(request, chain(4)))
    assert (plan.weights.interval, plan.weights.ahead, plan.weights.capacities) == (3, 3, (2, 1))
    assert plan.prediction is not None
    first, last = plan.prediction.stages
    assert (first.in_flight, last.in_flight) == (2, 1)
    nodes = [stage.stop - stage.start for stage in plan.partition.stages]
    assert dict(first.memory)["weights x 2"] == 2 * nodes[0] * MIB
    assert dict(last.memory)["weights x 1"] == nodes[1] * MIB
    # Three replicas share 12 micro-batches, and make four updates.
    assert plan.prediction.step_s == pytest.approx(4 * (first.busy_s + first.exchange_s), rel=0.02)
    assert type(plan).from_json(plan.to_json()) == plan


def test_updates_per_replica_are_a_policy_of_their_own() -> None:
    """u_s = R_s, w_s + 1 versions and R_s / R_0 times the learning rate; where all stages are alike, nothing new."""
    request = dataclasses.replace(REQUEST, replicas=(2, 1, 1), num_stages=3, per_replica=True)
    policy = weight_policy(request, 3, 12)
    assert (policy.interval, policy.intervals, policy.capacities) == (2, (2, 1, 1), (2, 2, 1))
    assert (policy.norm_per_stage, [policy.rate(stage) for stage in range(3)]) == (True, [1.0, 0.5, 0.5])
    words = weight_reason(request, 3, 12)
    assert "every 2, 1, 1 micro-batches, one for each replica, at 1, 0.5, 0.5 times the learning rate" in words
    assert "1, 1, 0 updates late" in words
    alike = dataclasses.replace(REQUEST, replicas=(2, 2), per_replica=True)
    assert weight_policy(alike, 2, 12) == weight_policy(dataclasses.replace(alike, per_replica=False), 2, 12)
    plan = plan_of(decide(request, chain(6)))
    assert plan.schedule.wiring.intervals == (2, 1, 1)
    assert str(plan.spec).endswith("per_replica, replicas=2-1-1, lanes=2")
    assert type(plan).from_json(plan.to_json()) == plan
