"""Laws of the synchronous family: memory, makespan and period, in closed form, against the simulator."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.sync import gpipe, interleaved, k_f_k_b, one_f_one_b, slack
from raypipe.planner.simulator import Costs, makespan_s, simulate

FORWARD_S, BACKWARD_S = 1.0, 2.0
T = FORWARD_S + BACKWARD_S

shapes = st.tuples(st.integers(1, 6), st.integers(1, 12))


def period_s(make, costs, few=36, more=72):
    """Seconds per further micro-batch, once the pipeline is full."""
    return (makespan_s(lower(make(more)), costs) - makespan_s(lower(make(few)), costs)) / (more - few)


def costs_by_hop(forward_s, latency_s, occupancy_s=None):
    hops = tuple(latency_s)
    busy = tuple(occupancy_s or (0.0,) * len(hops))
    return Costs(tuple(forward_s), tuple(2 * f for f in forward_s), (), (), hops, hops, busy, busy)


def in_flight(stage, num_microbatches, slacks):
    return min(num_microbatches, 1 + sum(slacks[stage:]))


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(1, 7))
def test_kfkb_memory_and_makespan_for_every_k(stages):
    costs = Costs.uniform(stages, FORWARD_S, BACKWARD_S)
    for microbatches in (1, 2, 3, 5, 8, 12):
        for k in range(1, microbatches + 1):
            timeline = simulate(lower(k_f_k_b(stages, microbatches, k)), costs)
            assert timeline.peak_in_flight == tuple(min(microbatches, k * (stages - s)) for s in range(stages))
            assert timeline.makespan_s == (microbatches + stages - 1) * T
            assert timeline.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.slow
@given(shapes, st.data())
@settings(max_examples=30, deadline=None)
def test_slack_memory_and_makespan(shape, data):
    stages, microbatches = shape
    slacks = data.draw(st.lists(st.integers(1, 4), min_size=stages - 1, max_size=stages - 1))
    lowered = lower(slack(stages, microbatches, slacks))
    validate(lowered)
    timeline = simulate(lowered, Costs.uniform(stages, FORWARD_S, BACKWARD_S))
    assert timeline.peak_in_flight == tuple(in_flight(s, microbatches, slacks) for s in range(stages))
    assert timeline.makespan_s == (microbatches + stages - 1) * T


def test_smallest_settings_are_1f1b_and_largest_gpipe():
    for stages, microbatches in ((1, 3), (3, 2), (4, 8)):
        assert k_f_k_b(stages, microbatches, 1).body == one_f_one_b(stages, microbatches).body
        assert slack(stages, microbatches, 1).body == one_f_one_b(stages, microbatches).body
        assert k_f_k_b(stages, microbatches, microbatches).body == gpipe(stages, microbatches).body
        assert k_f_k_b(stages, microbatches, microbatches + 5).body == gpipe(stages, microbatches).body


@pytest.mark.parametrize("latency_s", [0.7, 3.1])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_kfkb_period_law(stages, k, latency_s):
    """P = T + 2(S-1)/(S k) * max(0, c - (k-1)T/2)."""
    costs = Costs.uniform(stages, FORWARD_S, BACKWARD_S, latency_s)
    expected = T + 2 * (stages - 1) / (stages * k) * max(0.0, latency_s - (k - 1) * T / 2)
    few = 6 * stages * k  # whole turns of the pipeline on both ends, so that the slope is the period
    assert period_s(lambda m: k_f_k_b(stages, m, k), costs, few, 2 * few) == pytest.approx(expected)


@pytest.mark.parametrize("latency_s", [0.4, 1.5, 2.9])
def test_smallest_k_and_r_that_hide_a_latency(latency_s):
    enough = 1 + ceil(2 * latency_s / T)
    costs = Costs.uniform(4, FORWARD_S, BACKWARD_S, latency_s)
    for make in (k_f_k_b, slack):
        period = [period_s(lambda m, make=make, n=n: make(4, m, n), costs) for n in (enough - 1, enough, enough + 1)]
        assert period[0] > T + 0.05
        assert period[1:] == [pytest.approx(T), pytest.approx(T)]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_slack_period_law_with_uneven_hops_and_stages(data):
    """P = max(T_s, over runs of stages [sum T + 2 sum c] / (1 + sum r))."""
    stages = data.draw(st.integers(2, 4))
    halves = st.integers(1, 6).map(lambda n: n / 2)
    forward_s = data.draw(st.lists(halves, min_size=stages, max_size=stages))
    latency_s = data.draw(st.lists(halves, min_size=stages - 1, max_size=stages - 1))
    slacks = data.draw(st.lists(st.integers(1, 3), min_size=stages - 1, max_size=stages - 1))
    work = [3 * f for f in forward_s]
    runs = [(a, b) for a in range(stages) for b in range(a, stages)]
    loops = [(sum(work[a : b + 1]) + 2 * sum(latency_s[a:b]), 1 + sum(slacks[a:b])) for a, b in runs]
    seconds, messages = max(loops, key=lambda loop: loop[0] / loop[1])
    # The loop that sets the pace comes round every `messages` micro-batches: take whole turns of it.
    found = period_s(lambda m: slack(stages, m, slacks), costs_by_hop(forward_s, latency_s), 100, 100 + 12 * messages)
    assert found == pytest.approx(seconds / messages)


def test_bandwidth_limited_link_rewards_even_traffic():
    """A link that is busy 2.5 s per message, T = 3 s: slack r=3 reaches 3.0 s, kFkB sends bursts and needs k=6."""
    costs = Costs.uniform(4, FORWARD_S, BACKWARD_S, occupancy_s=2.5)
    assert period_s(lambda m: slack(4, m, 3), costs) == pytest.approx(3.0)
    by_k = {k: period_s(lambda m, k=k: k_f_k_b(4, m, k), costs, 48, 96) for k in (2, 4, 6)}
    assert by_k == {2: pytest.approx(4.0), 4: pytest.approx(3.25), 6: pytest.approx(3.0)}


def test_interleaved_bubble_shrinks_with_chunks():
    """(S-1)(t_F+t_B)/v of whole-worker seconds: arXiv:2104.04473, section 2.2."""
    for chunks in (1, 2, 4):
        costs = Costs.uniform(4 * chunks, FORWARD_S / chunks, BACKWARD_S / chunks)
        assert makespan_s(lower(interleaved(4, 8, chunks)), costs) == 8 * T + 3 * T / chunks
