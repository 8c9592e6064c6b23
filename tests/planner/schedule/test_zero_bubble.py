"""Laws of ZB-H1 and ZB-V: memory, makespan in closed form, orders, and the cost of a latency."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.sync import one_f_one_b, slack
from raypipe.planner.schedule.zero_bubble import zb_h1, zb_v
from raypipe.planner.simulator import Costs, makespan_s, simulate

FORWARD_S, BACKWARD_S = 1.0, 2.0

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 12))


@pytest.mark.slow
@given(SHAPES, st.data())
@settings(max_examples=30, deadline=None)
def test_zb_h1_memory(shape, data):
    """Between F and W every stage holds as much as it may, and never more forwards ahead of I than slack does.

    Whatever the lag, sums of weight gradients go by micro-batch.
    """
    stages, microbatches = shape
    slacks = data.draw(st.lists(st.integers(1, 4), min_size=stages - 1, max_size=stages - 1))
    first = data.draw(st.integers(0, stages - 1))
    lag = data.draw(st.just(()) | st.lists(st.integers(0, 12), min_size=stages, max_size=stages))
    made = zb_h1(stages, microbatches, slacks, first, lag=lag)
    validate(lower(made), repeats=2)
    found = simulate(lower(made), Costs.uniform(stages, FORWARD_S, BACKWARD_S)).peak_in_flight
    for stage in range(first, stages):
        deferred = min([sum(slacks[first:stage]), *lag[stage : stage + 1]])
        assert found[stage] == min(microbatches, 1 + sum(slacks[stage:]) + deferred)
        weights = [action.microbatch for action in made.body[stage] if action.op is Op.W]
        assert weights == list(range(microbatches))
        ops = [action.op.value for action in made.body[stage] if action.op.value != "W"]
        turns = [action.op.value.replace("B", "I") for action in slack(stages, microbatches, slacks, first).body[stage]]
        assert ops == turns


def test_a_lag_that_is_not_less_changes_nothing():
    assert zb_h1(3, 8, (2, 1), lag=(0, 2, 9)).body == zb_h1(3, 8, (2, 1)).body
    assert "F0 I0 W0 F1 I1 W1" in " ".join(map(str, zb_h1(3, 8, (2, 1), lag=(0, 0, 0)).body[2])).replace("2", "")
    with pytest.raises(ScheduleError, match="give each stage a number of at least 0"):
        zb_h1(3, 8, lag=(0, 1))


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


def slots(stages, latency_s=0.0):
    """Every compute action takes one slot."""
    ones = (1.0,) * stages
    hops = (latency_s,) * (stages - 1)
    return Costs(ones, (2.0,) * stages, ones, ones, hops, hops)


def most_held(row, first_trainable):
    """Activations between F and W on one worker, of all of its stages together."""
    held = most = 0
    for action in row:
        if action.stage >= first_trainable:
            held += {Op.F: 1, Op.I: 0, Op.W: -1}[action.op]
        most = max(most, held)
    assert held == 0
    return most


def work_of(worker, workers, microbatches, first_trainable):
    stages = (worker, 2 * workers - 1 - worker)
    return microbatches * sum(3 if stage >= first_trainable else 1 for stage in stages)


@st.composite
def shapes(draw, most_workers=6):
    workers = draw(st.integers(1, most_workers))
    return workers, draw(st.integers(1, 16)), draw(st.integers(0, 2 * workers - 1))


@pytest.mark.slow
@given(shapes())
@settings(max_examples=60, deadline=None)
def test_every_action_once_in_order_and_valid(shape):
    """Sums of gradients go by micro-batch, so both I and W do on every stage; nothing deadlocks, in repeats neither."""
    workers, microbatches, first = shape
    made = zb_v(2 * workers, microbatches, first)
    assert made.wiring.placement == (*range(workers), *reversed(range(workers)))
    assert made.wiring.split_backward
    validate(lower(made), repeats=2)
    for worker, row in enumerate(made.body):
        expected = []
        for stage in (worker, 2 * workers - 1 - worker):
            for op in (Op.F, Op.I, Op.W) if stage >= first else (Op.F,):
                of_kind = [a for a in row if a.stage == stage and a.op is op]
                assert of_kind == [Action(stage, op, m) for m in range(microbatches)]
                expected += of_kind
        assert len(row) == len(expected)


@pytest.mark.slow
@given(shapes())
@settings(max_examples=60, deadline=None)
def test_memory_of_a_worker(shape):
    """No more than 2 P activations, which is P micro-batches in 1F1B's stages of twice the size."""
    workers, microbatches, first = shape
    rows = zb_v(2 * workers, microbatches, first).body
    assert all(most_held(row, first) <= 2 * workers for row in rows)
    if microbatches >= 2 * workers - 1 and first == 0:
        assert [most_held(row, first) for row in rows] == [2 * workers] * workers


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_makespan(workers, microbatches):
    """Work and the way to the last worker; with few micro-batches one's way there and back and there again."""
    stages = 2 * workers
    found = makespan_s(lower(zb_v(stages, microbatches)), slots(stages))
    assert found == max(6 * microbatches + workers - 1, 3 * microbatches + 4 * workers - 2)
    assert found <= makespan_s(lower(one_f_one_b(workers, microbatches)), Costs.uniform(workers, 2.0, 4.0))


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_no_bubble_but_the_fill(workers, more, data):
    """Whatever is frozen, the step is as long as its busiest worker, counted from when that can begin."""
    microbatches, first = 2 * workers - 1 + more, data.draw(st.integers(0, 2 * workers - 1))
    timeline = simulate(lower(zb_v(2 * workers, microbatches, first)), slots(2 * workers))
    works = [work_of(worker, workers, microbatches, first) for worker in range(workers)]
    assert timeline.makespan_s == max(worker + work for worker, work in enumerate(works))
    if first == 0:
        for worker in range(workers):
            busy = [s for s in timeline.spans if s.worker == worker and s.action.op in (Op.F, Op.I, Op.W)]
            assert (min(s.start_s for s in busy), max(s.end_s for s in busy)) == (worker, worker + works[worker])


@pytest.mark.parametrize("latency_s", [0.3, 2.0, 2.5])
def test_a_latency_of_two_slots_is_hidden(latency_s):
    """The timetable leaves three slots from a stage to the next, one of them for the action itself."""
    for workers in (2, 4):
        stages, costs = 2 * workers, slots(2 * workers, latency_s)
        few, more = (makespan_s(lower(zb_v(stages, m)), costs) for m in (24, 48))
        period_s = (more - few) / 24
        assert period_s == pytest.approx(6.0) if latency_s <= 2.0 else period_s > 6.1


def test_few_microbatches_and_one_worker():
    assert " ".join(map(str, zb_v(2, 2).body[0])) == "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"
    assert makespan_s(lower(zb_v(16, 1)), slots(16)) == 2 * 16 + 1
