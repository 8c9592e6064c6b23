"""Laws of ZB-H1: what stages hold, and the makespan in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import one_f_one_b, slack
from raypipe.planner.schedule.validate import validate
from raypipe.planner.schedule.zero_bubble import zb_h1
from raypipe.planner.simulate.serial import Costs, makespan_s, simulate

FORWARD_S, BACKWARD_S = 1.0, 2.0

shapes = st.tuples(st.integers(1, 6), st.integers(1, 12))


@pytest.mark.slow
@given(shapes, st.data())
@settings(max_examples=30, deadline=None)
def test_zb_h1_memory(shape, data):
    """Between F and W every stage holds as much, and never more forwards ahead of I than slack does."""
    stages, microbatches = shape
    slacks = data.draw(st.lists(st.integers(1, 4), min_size=stages - 1, max_size=stages - 1))
    first = data.draw(st.integers(0, stages - 1))
    made = zb_h1(stages, microbatches, slacks, first)
    validate(lower(made), repeats=2)
    found = simulate(lower(made), Costs.uniform(stages, FORWARD_S, BACKWARD_S)).peak_in_flight
    trained = slacks[first:]
    assert found[first:] == (min(microbatches, 1 + sum(trained)),) * (stages - first)
    for stage in range(first, stages):
        ops = [action.op.value for action in made.body[stage] if action.op.value != "W"]
        turns = [action.op.value.replace("B", "I") for action in slack(stages, microbatches, slacks, first).body[stage]]
        assert ops == turns


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 12), st.tuples(*[st.integers(1, 8)] * 3))
@settings(max_examples=60, deadline=None)
def test_zb_h1_makespan(stages, more, seconds):
    """arXiv:2401.10241, table 1: the bubble is (S-1)(t_F + t_B - t_W), where t_W fits in."""
    forward_s, input_s, weight_s = (float(s) for s in seconds)
    weight_s = min(weight_s, forward_s, input_s)
    microbatches = stages + more
    costs = Costs((forward_s,) * stages, (input_s + weight_s,) * stages, (input_s,) * stages, (weight_s,) * stages)
    work_s = microbatches * (forward_s + input_s + weight_s)
    found = makespan_s(lower(zb_h1(stages, microbatches)), costs)
    assert found <= work_s + (stages - 1) * (forward_s + input_s)
    if forward_s == input_s == weight_s:
        assert found == work_s + (stages - 1) * (forward_s + input_s - weight_s)
    assert found <= makespan_s(lower(one_f_one_b(stages, microbatches)), costs)
