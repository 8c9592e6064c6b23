"""Asynchronous schedules, weight versions and their segments: laws, and a picture."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.schedule import Op, Schedule
from raypipe.ir.segment import Phase
from raypipe.ir.weights import VersionRule, versions_needed
from raypipe.planner.schedule.asynchronous import continuous, finite, minibatches_to_drain, part
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.replicas import warmups_of
from raypipe.planner.schedule.text import draw
from raypipe.planner.schedule.validate import lowered_and_checked, validate
from raypipe.planner.segments import Flow, Position, flowing_segments
from raypipe.planner.simulate.serial import Costs, makespan_s
from raypipe.planner.tune import Request, build_schedule, weight_policy, weight_reason
from tests.weight_rules import version_of

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(
        st.just(shape[0]), st.just(shape[1]), st.sampled_from([u for u in range(1, 9) if shape[1] % u == 0]),
        st.one_of(st.just(shape[2]), st.tuples(*[st.integers(1, 3)] * (shape[0] - 1))), st.integers(0, shape[0] - 1),
    )
)  # fmt: skip
"""Stages, micro-batches, interval, slack (one, or by hop), first trainable stage."""


def made(shape: tuple[int, int, int, int | tuple[int, ...], int]) -> Schedule:
    stages, count, interval, slack, first = shape
    return continuous("x", stages, count, interval, slack=slack, first_trainable=first)


def test_the_picture_of_the_module() -> None:
    assert draw(continuous("2bw", 3, 2, 2), repeats=2) == (
        "0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5\n"
        "1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .\n"
        "2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .\n"
    )


@pytest.mark.slow
@given(SHAPES, st.integers(1, 3))
def test_every_micro_batch_once_and_nothing_waits_forever(shape: tuple[int, ...], repeats: int) -> None:
    schedule = made(shape)  # type: ignore[arg-type]
    lowered = lower(schedule)
    validate(lowered, repeats=repeats)
    drained = minibatches_to_drain(shape[1], warmups_of((1,) * shape[0], shape[3])[0])
    total = shape[1] * (repeats + drained)
    assert schedule.num_microbatches(repeats) == total
    for stage, row in enumerate(lowered.rows(repeats)):
        assert [a.microbatch for a in row if a.op is Op.F] == list(range(total))
        steps = [a.microbatch for a in row if a.op is Op.STEP]
        assert steps == list(range(shape[2] - 1, total, shape[2])), f"stage {stage}"


@pytest.mark.slow
@given(SHAPES, st.integers(1, 4))
def test_finite_is_prologue_bodies_and_epilogue(shape: tuple[int, ...], more: int) -> None:
    schedule = made(shape)  # type: ignore[arg-type]
    drained = minibatches_to_drain(shape[1], warmups_of((1,) * shape[0], shape[3])[0])
    assert lower(finite(schedule, drained + more)).rows() == lower(schedule).rows(more)
    for fewer in range(1, drained + 1):
        validate(lower(finite(schedule, fewer)))
        assert finite(schedule, fewer).num_microbatches() == fewer * shape[1]


@pytest.mark.slow
@given(SHAPES)
def test_the_phases_make_up_the_whole(shape: tuple[int, ...]) -> None:
    lowered = lower(made(shape))  # type: ignore[arg-type]
    rows = [part(lowered, phase) for phase in (Phase.FILL, Phase.STEADY, Phase.DRAIN)]
    for worker in range(shape[0]):
        shifted = [a.shifted(i * shape[1]) for i, found in enumerate(rows) for a in found.row(worker)]
        assert tuple(shifted) == lowered.row(worker, 2)


@pytest.mark.slow
@given(st.integers(2, 6), st.integers(1, 8), st.floats(0.1, 2.0))
def test_no_bubble_between_mini_batches(stages: int, count: int, backward_s: float) -> None:
    lowered = lower(continuous("x", stages, count, 1))
    costs = Costs(forward_s=(1.0,) * stages, backward_s=(backward_s,) * stages)
    period_s = (makespan_s(lowered, costs, repeats=9) - makespan_s(lowered, costs, repeats=5)) / 4
    assert period_s == pytest.approx(count * (1.0 + backward_s))


@pytest.mark.parametrize("frozen", range(4))
@pytest.mark.parametrize("slack", [1, 2])
def test_stages_without_a_backward_do_not_wait_for_the_norm_of_those_that_wait_for_them(
    frozen: int, slack: int
) -> None:
    """Those behind run ahead, and so need forwards of the next update before the norm of this one."""
    schedule = continuous("2bw", 4, 6, 6, slack=slack, first_trainable=frozen, norm_per_stage=False)
    lowered = lowered_and_checked(schedule)
    assert [lowered.wiring.alone(worker) for worker in range(4)] == [worker < frozen for worker in range(4)]
    assert [len(lowered.wiring.normed_with(stage)) for stage in range(4)] == [1] * frozen + [4 - frozen] * (4 - frozen)


@pytest.mark.parametrize(
    ("count", "interval", "slack"), [(4, 3, 1), (4, 0, 1), (4, 2, 0), (4, 2, (1, 0)), (4, 2, (1,))]
)
def test_numbers_that_make_no_schedule(count: int, interval: int, slack: int | tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError):
        continuous("x", 3, count, interval, slack=slack)


# Versions.


def updates_before(row: tuple, forward: int) -> int:
    """STEPs that stand before a forward."""
    at = next(i for i, a in enumerate(row) if a.op is Op.F and a.microbatch == forward)
    return sum(a.op is Op.STEP for a in row[:at])


@pytest.mark.slow
@given(SHAPES)
def test_the_newest_version_is_what_the_row_says(shape: tuple[int, ...]) -> None:
    stages, _count, interval, slack, _ = shape
    rows = lower(made((*shape[:4], 0))).rows(3)  # type: ignore[arg-type]
    warmups = warmups_of((1,) * stages, slack)
    for stage, row in enumerate(rows):
        for action in row:
            if action.op is Op.F:
                found = version_of(VersionRule.NEWEST, action.microbatch, interval, warmups, stage)
                assert found == updates_before(row, action.microbatch)


@pytest.mark.slow
@given(SHAPES, st.sampled_from(VersionRule))
def test_no_more_versions_are_alive_than_needed(shape: tuple[int, ...], rule: VersionRule) -> None:
    """A version lives from the update that makes it to the last backward of a micro-batch that uses it."""
    stages, count, interval, slack, _ = shape
    warmups = warmups_of((1,) * stages, slack)
    if rule is VersionRule.DELAYED:
        interval = count = max(count, warmups[0])
    rows = lower(continuous("x", stages, count, interval, slack=slack)).rows(4)
    for stage, row in enumerate(rows):
        last_use = {}
        for at, action in enumerate(row):
            if action.op is Op.B:
                last_use[version_of(rule, action.microbatch, interval, warmups, stage)] = at
        newest, most = 0, 1
        for at, action in enumerate(row):
            if action.op is Op.F:
                assert version_of(rule, action.microbatch, interval, warmups, stage) <= newest, "not made yet"
            if action.op is Op.STEP:
                newest += 1
                most = max(most, 1 + sum(end > at for version, end in last_use.items() if version < newest))
        assert most <= versions_needed(rule, interval, warmups, stage)


def request(**changes: object) -> Request:
    fields = {"num_stages": 4, "num_workers": None, "split_points": (), "minibatch_size": 24, "num_microbatches": 12}
    return Request(**{**fields, "num_samples": 99, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "interval", "capacities"),
    [
        ({"schedule": "1f1b"}, None, ()),
        ({"schedule": "pipedream"}, 1, (4, 3, 2, 1)),
        ({"schedule": "pipedream", "vertical_sync": True}, 1, (4, 4, 4, 4)),
        ({"schedule": "pipedream", "weight_versions": 2}, 3, (2, 2, 2, 1)),
        ({"schedule": "pipedream", "weight_versions": 3}, 2, (3, 2, 2, 1)),
        ({"schedule": "pipedream", "update_interval": 4}, 4, (2, 2, 2, 1)),
        ({"schedule": "pipedream", "update_interval": 1, "weight_versions": 2}, 1, (2, 2, 2, 1)),
        ({"schedule": "2bw"}, 12, (2, 2, 2, 2)),
        ({"schedule": "2bw", "slack": 4}, 12, (2, 2, 2, 2)),
        ({"schedule": "pipedream", "slack": 2}, 1, (7, 5, 3, 1)),
        ({"schedule": "pipedream", "slack": (1, 1, 3)}, 1, (6, 5, 4, 1)),
        ({"schedule": "pipedream", "slack": 2, "weight_versions": 3}, 3, (3, 3, 2, 1)),
    ],
)
def test_policies(changes: dict[str, object], interval: int | None, capacities: tuple[int, ...]) -> None:
    policy = weight_policy(request(**changes), 4, 12)
    assert (policy.interval, policy.capacities) == (interval, capacities)
    if interval:
        build_schedule(request(**changes), 4, 12, 0)
        assert "update" in weight_reason(request(**changes), 4, 12)


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        ({"schedule": "2bw"}, 3, ["num_microbatches", "4", "3"]),
        ({"schedule": "2bw", "slack": 5}, 12, ["slack=5", "15 forwards", "12"]),
        ({"schedule": "pipedream", "update_interval": 5}, 12, ["update_interval=5", "12"]),
        ({"schedule": "pipedream", "weight_versions": 1}, 12, ["weight_versions=1", "1f1b"]),
        ({"schedule": "pipedream", "weight_versions": 2}, 2, ["weight_versions=2", "at least 3"]),
        ({"schedule": "pipedream", "weight_versions": 2, "update_interval": 1, "vertical_sync": True}, 12,
         ["weight_versions=2", "takes 4"]),
    ],
)  # fmt: skip
def test_policies_that_cannot_be(changes: dict[str, object], count: int, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        weight_policy(request(**changes), 4, count)
    for word in words:
        assert word in str(caught.value)


# Segments.


@given(
    num_samples=st.integers(1, 60), minibatch=st.integers(1, 9), microbatch=st.integers(1, 9),
    steps=st.integers(1, 40), drained=st.integers(1, 4), every=st.integers(1, 12), hurry=st.sets(st.integers(0, 60)),
)  # fmt: skip
def test_segments_take_every_sample_once_and_are_empty_where_they_must_be(
    num_samples: int, minibatch: int, microbatch: int, steps: int, drained: int, every: int, hurry: set[int]
) -> None:
    minibatch = min(minibatch, num_samples)
    microbatch = min(microbatch, minibatch)
    asked = iter(range(1000))
    found = list(
        flowing_segments(
            Flow(1, drained), num_samples, minibatch, microbatch, steps, Position(),
            empty_after=lambda step: step % every == 0, empty_soon=lambda: next(asked) in hurry,
        )
    )  # fmt: skip
    at, flowing = Position(), False
    for segment, after in found:
        assert (segment.first_step, segment.first_microbatch, segment.epoch, segment.offset) == (
            at.step, at.microbatch, at.epoch, at.offset,
        )  # fmt: skip
        assert segment.phase.begins_empty != flowing
        begun = segment.num_minibatches + (0 if segment.phase.ends_empty else drained)
        assert segment.offset + begun * segment.minibatch_samples <= num_samples, "begins what the epoch does not have"
        assert at.step + begun <= steps
        for step in range(at.step + 1, after.step):
            assert step % every or segment.phase is Phase.DRAIN, "passes a step after which it must be empty"
        flowing = not segment.phase.ends_empty
        if after.step % every == 0 or after.offset == 0:
            assert not flowing
        at = after
    assert at.step == steps
    assert not flowing
    assert found[-1][1].epoch == steps // math.ceil(num_samples / minibatch)
