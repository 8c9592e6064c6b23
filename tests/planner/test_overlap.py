"""Steps that overlap: the same rows, never a longer run, and no bubble where there is slack enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raypipe.ir.schedule_spec import KINDS, ScheduleSpec
from raypipe.planner.controller import Choice, ControllerConfig, predicted_s, search
from raypipe.planner.replay import FILLING, Wire, compiled, step_s
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.search import Request, build_schedule, step_of
from raypipe.planner.simulator import Costs, makespan_s, simulate
from tests.planner.controller.test_retuning import at_most, measured_of
from tests.planner.specs import spec_for

SECONDS = st.floats(0.01, 1.0)

FIRST = Choice(ScheduleSpec("1f1b", 4))
"""What a configuration begins with; a search asks for what runs."""


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], Costs]:
    """Stages, micro-batches, slack, and what everything takes."""
    stages = draw(st.integers(2, 4))
    by_stage = st.tuples(*[SECONDS] * stages)
    by_hop = st.tuples(*[st.floats(0.0, 1.0)] * (stages - 1))
    inputs, weights = draw(by_stage), draw(by_stage)
    costs = Costs(
        forward_s=draw(by_stage),
        backward_s=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        backward_input_s=inputs,
        backward_weight_s=weights,
        forward_latency_s=draw(by_hop),
        backward_latency_s=draw(by_hop),
        forward_occupancy_s=draw(by_hop),
        backward_occupancy_s=draw(by_hop),
        step_s=draw(by_stage),
    )
    slack = draw(st.tuples(*[st.integers(1, 4)] * (stages - 1)))
    return stages, draw(st.integers(1, 8)), slack, costs


@pytest.mark.slow
@given(pipelines())
def test_a_run_of_overlapping_steps_is_never_longer_and_holds_no_more(
    found: tuple[int, int, tuple[int, ...], Costs],
) -> None:
    stages, count, slack, costs = found
    apart, together = (
        schedule_of(ScheduleSpec("zb-h1", count, slack=slack, overlap=overlap), stages) for overlap in (False, True)
    )
    assert together.wiring.norm_per_stage == (count > sum(slack))
    assert together.body == apart.body
    validate(lower(together))
    assert makespan_s(lower(together), costs, 3) <= makespan_s(lower(apart), costs, 3) * (1 + 1e-9)
    held = [simulate(lower(one), costs, 3).peak_in_flight for one in (apart, together)]
    assert held[0] == held[1]
    period_s, _ = step_of(lower(together), costs)
    own_s = [count * (f + b) for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    assert period_s >= max(s + step for s, step in zip(own_s, costs.step_s, strict=True)) * (1 - 1e-9)


@pytest.mark.slow
@given(pipelines(), st.integers(1, 4))
def test_the_controller_counts_by_how_much_steps_make_the_run_longer(
    found: tuple[int, int, tuple[int, ...], Costs], replays: int
) -> None:
    stages, count, slack, costs = found
    assume(count > sum(slack))
    program = compiled(ScheduleSpec("zb-h1", count, slack=slack, overlap=True), stages)
    ways = (
        (costs.forward_latency_s, costs.forward_occupancy_s),
        (costs.backward_latency_s, costs.backward_occupancy_s),
    )
    wires = [Wire(latency[hop], (occupancy[hop],)) for hop in range(stages - 1) for latency, occupancy in ways]
    split_backward_s = list(zip(costs.backward_input_s, costs.backward_weight_s, strict=True))
    seconds = step_s(program, costs.forward_s, costs.backward_s, wires, costs.step_s, replays, split_backward_s)
    lowered = lower(schedule_of(ScheduleSpec("zb-h1", count, slack=slack, overlap=True), stages))
    before_s, after_s = (makespan_s(lowered, costs, FILLING + steps) for steps in (0, replays))
    assert seconds * replays == pytest.approx(after_s - before_s)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [8, 16])
def test_with_slack_two_and_equal_stages_there_is_no_bubble(stages: int, count: int) -> None:
    costs = Costs.uniform(stages)
    apart, together = (
        schedule_of(ScheduleSpec("zb-h1", count, slack=(2,) * (stages - 1), overlap=overlap), stages)
        for overlap in (False, True)
    )
    assert step_of(lower(together), costs) == (pytest.approx(3.0 * count), pytest.approx(0.0, abs=1e-9))
    assert step_of(lower(apart), costs)[0] >= 3.0 * count + stages - 1


def test_what_has_no_split_backwards_or_a_stage_without_any_is_left_alone() -> None:
    for name in (name for name, kind in KINDS.items() if kind.synchronous and name != "zb-h1"):
        spec = spec_for(name, 4, 8, group_size=2, slack=2, chunks=2, overlap=True)
        assert not schedule_of(spec, 4).wiring.norm_per_stage
    frozen = spec_for("zb-h1", 4, 8, first_trainable=1, overlap=True)
    assert not schedule_of(frozen, 4).wiring.norm_per_stage


def test_who_clips_or_ties_waits() -> None:
    asked = Request(2, None, (), 8, 4, 64, "zb-h1")
    assert build_schedule(asked, 2, 4, 0).wiring.norm_per_stage
    for other in (replace(asked, clips=True), replace(asked, ties=True), replace(asked, schedule="slack")):
        assert not build_schedule(other, 2, 4, 0).wiring.norm_per_stage


def test_the_search_takes_more_slack_where_steps_overlap() -> None:
    """At 50 Mbit/s, in the numbers of docs/results/decisions.md."""
    measured = replace(measured_of([(0.044, 0.0005)], 8, (0.0182, 0.0362)), split_backward_s=((0.0181, 0.0181),) * 2)
    apart, together = (
        search(
            ControllerConfig("auto", FIRST, at_most(16, 16)),
            measured,
            Choice(spec_for("slack", 2, 8, slack=2, overlap=overlap)),
        ).best
        for overlap in (False, True)
    )
    assert apart.choice.spec.kind == together.choice.spec.kind == "zb-h1"
    assert together.choice.spec.slack > apart.choice.spec.slack
    assert together.seconds < 0.94 * apart.seconds
    assert together.seconds == predicted_s(measured, together.choice, {})
