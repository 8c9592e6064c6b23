"""Replicas in schedules that do not run empty: PipeDream's round robin, with updates that all of a stage share."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe.planner.schedule.asynchronous as module
from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.schedule import COMPUTE, Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Phase
from raypipe.ir.weights import VersionRule, versions_needed
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.asynchronous import continuous, finite, minibatches_to_drain, part
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.replicas import Replicas, ahead_of, warmups_of
from raypipe.planner.schedule.text import draw
from raypipe.planner.schedule.validate import validate
from raypipe.planner.simulate.serial import Costs, simulate
from raypipe.planner.tables import build
from raypipe.planner.tune import Request, plan_of, weight_policy, weight_reason
from raypipe.planner.tune.choose import decide
from tests.planner.schedule.test_replicas import PIPEDREAM
from tests.planner.tune.test_choose import MIB, chain
from tests.weight_rules import version_of

REQUEST = Request(2, None, (), 24, 12, 99, "pipedream", replicas=(2, 1), partitioner="prefix_sum")


@st.composite
def made(draw: st.DrawFn) -> tuple[Schedule, tuple[int, ...], int | tuple[int, ...]]:
    """A schedule, replicas by stage, and its slack."""
    counts = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    lanes = math.lcm(*counts) * draw(st.integers(1, 2))
    interval = lanes * draw(st.integers(1, 2))
    hops = st.tuples(*[st.integers(1, 3)] * (len(counts) - 1))
    slack = draw(st.integers(1, 2) | hops)
    first = draw(st.integers(0, len(counts) - 1))
    count = interval * draw(st.integers(1, 2))
    given = {"first_trainable": first, "replicas": Replicas(counts, lanes), "per_replica": draw(st.booleans())}
    return continuous("x", len(counts), count, interval, slack=slack, **given), counts, slack


def test_the_picture_of_the_module() -> None:
    drawn = draw(continuous("x", 2, 2, 2, replicas=Replicas((2, 1), 2)), repeats=2)
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
@given(made(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_each_micro_batch_once_in_turn_and_nothing_waits_forever(
    found: tuple[Schedule, tuple[int, ...], int | tuple[int, ...]], repeats: int
) -> None:
    schedule, counts, slack = found
    lowered = lower(schedule)
    validate(lowered, repeats)
    ahead = ahead_of(counts, slack)
    assert all(before >= after for before, after in pairwise(ahead)), "no stage is ahead of the one before"
    total = schedule.stride * (repeats + minibatches_to_drain(schedule.stride, ahead[0]))
    rows = lowered.rows(repeats)
    assert set(Counter(a for row in rows for a in row if a.op in COMPUTE).values()) == {1}
    holders = [(stage, number) for stage, count in enumerate(counts) for number in range(count)]
    for (stage, number), row in zip(holders, rows, strict=True):
        assert [a.microbatch for a in row if a.op is Op.F] == list(range(number, total, counts[stage]))
        interval = counts[stage] if schedule.wiring.intervals else schedule.wiring.update_interval
        assert [a.microbatch for a in row if a.op is Op.STEP] == list(range(interval - 1, total, interval))


@pytest.mark.slow
@given(made(), st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_the_parts_make_up_the_whole(found: tuple[Schedule, tuple[int, ...], int | tuple[int, ...]], more: int) -> None:
    schedule, counts, slack = found
    lowered, drained = lower(schedule), minibatches_to_drain(schedule.stride, ahead_of(counts, slack)[0])
    assert lower(finite(schedule, drained + more)).rows() == lowered.rows(more)
    for fewer in range(1, drained + 1):
        validate(lower(finite(schedule, fewer)))
    phases = [part(lowered, phase) for phase in (Phase.FILL, Phase.STEADY, Phase.DRAIN)]
    for worker in range(sum(counts)):
        shifted = [a.shifted(i * schedule.stride) for i, rows in enumerate(phases) for a in rows.row(worker)]
        assert tuple(shifted) == lowered.row(worker, 2)


@pytest.mark.slow
@given(made())
@settings(max_examples=60, deadline=None)
def test_versions_are_those_of_the_rows(found: tuple[Schedule, tuple[int, ...], int | tuple[int, ...]]) -> None:
    """The newest one is what updates before the forward made, the same on all replicas; no more are alive than said."""
    schedule, counts, slack = found
    ahead = ahead_of(counts, slack)
    holders = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for stage, row in zip(holders, lower(schedule).rows(3), strict=True):
        if stage < schedule.wiring.first_trainable:
            continue
        newest, used = 0, dict[int, int]()
        interval = schedule.wiring.interval_of(stage)
        for action in row:
            if action.op is Op.F:
                used[action.microbatch] = newest
                wanted = version_of(VersionRule.NEWEST, action.microbatch, interval, ahead, stage)
                assert newest == wanted
                if not schedule.wiring.intervals:
                    assert version_of(VersionRule.STAMPED, action.microbatch, interval, ahead, stage) <= newest
            elif action.op is Op.B:
                del used[action.microbatch]
            elif action.op is Op.STEP:
                newest += 1
                alive = len({*used.values(), newest})
                assert alive <= versions_needed(VersionRule.NEWEST, interval, ahead, stage)


def test_no_bubble_between_mini_batches() -> None:
    """Stage 0 takes three times as long as stage 1 and has three replicas."""
    spec = ScheduleSpec("pipedream", 12, slack=(1,), overlap=True, replicas=(3, 1), lanes=3)
    costs = Costs((3.0, 1.0), (6.0, 2.0))
    fewer, more = (simulate(lower(schedule_of(spec, 2)), costs, repeats=n).makespan_s for n in (4, 8))
    assert (more - fewer) / 4 == pytest.approx(12 * 3.0)


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


@pytest.mark.parametrize(
    ("changes", "count", "interval", "ahead", "capacities"),
    [
        ({}, 12, 2, 2, (2, 1)),
        ({"replicas": (1, 2)}, 12, 2, 2, (2, 1)),
        ({"replicas": (3, 1)}, 12, 3, 3, (2, 1)),
        ({"replicas": (2, 2)}, 12, 2, 2, (2, 1)),
        ({"replicas": (15, 1)}, 30, 15, 15, (2, 1)),
        ({"replicas": (1, 2), "vertical_sync": True}, 12, 2, 2, (2, 2)),
        ({"update_interval": 4}, 12, 4, 2, (2, 1)),
        ({"lanes": 4}, 12, 4, 2, (2, 1)),
        ({"replicas": (1, 1), "lanes": 2}, 12, 2, 1, (2, 1)),
        ({"slack": 2}, 12, 2, 2, (2, 1)),
        ({"slack": 3}, 12, 2, 4, (3, 1)),
        ({"slack": 3, "weight_versions": 2}, 12, 4, 4, (2, 1)),
        ({"schedule": "2bw"}, 12, 12, 2, (2, 2)),
    ],
)
def test_policies(
    changes: dict[str, object], count: int, interval: int, ahead: int, capacities: tuple[int, ...]
) -> None:
    policy = weight_policy(dataclasses.replace(REQUEST, **changes), 2, count)  # type: ignore[arg-type]
    assert (policy.interval, policy.ahead, policy.capacities) == (interval, ahead, capacities)


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        ({"replicas": (3, 1)}, 8, r"8 micro-batches are no multiple of the 3 lanes .* Set num_microbatches=9"),
        ({"schedule": "2bw", "lanes": 4}, 6, r"6 micro-batches .* schedule='2bw' .* Set num_microbatches=8"),
        ({"update_interval": 3}, 12, r"update_interval=3 is no multiple of the 2 lanes .* Set it to 4"),
        ({"replicas": (3, 1), "lanes": 4}, 12, r"num_lanes=4 gives replicas of 3-1 unequal shares.* multiple of 3"),
        ({"schedule": "2bw", "replicas": (1, 8)}, 8, None),
        ({"schedule": "2bw", "slack": 13}, 12, r"slack=13 runs 14 forwards ahead"),
    ],
)
def test_policies_that_cannot_be(changes: dict[str, object], count: int, words: str | None) -> None:
    request = dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]
    if words is None:
        weight_policy(request, 2, count)
        return
    with pytest.raises(PlanError, match=words):
        weight_policy(request, 2, count)


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


def test_unequal_shares_make_no_schedule() -> None:
    for counts, lanes, interval in (((2, 1), 2, 1), ((3, 1), 4, 4), ((2, 1), 4, 2)):
        with pytest.raises(ScheduleError, match="unequal shares"):
            continuous("x", 2, interval, interval, replicas=Replicas(counts, lanes))
    assert warmups_of((15, 1)) == (1, 0)
