"""Rows of an evaluation: the pipeline stays full whatever worker holds which stage, and no order waits for itself."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op
from raypipe.planner.segments import forward_only
from raypipe.planner.simulator import Costs, makespan_s, simulate


def seconds(placement, microbatches, latency_s=0.0):
    return makespan_s(forward_only(placement, microbatches), Costs.uniform(len(placement), latency_s=latency_s))


def there_and_back(workers):
    return (*range(workers), *reversed(range(workers)))


def test_the_picture():
    rows = forward_only((0, 1), 2).body
    drawn = [f"{worker}: {' '.join(map(str, row))}" for worker, row in enumerate(rows)]
    assert drawn == ["0: 0F0 0SEND_F0 0F1 0SEND_F1", "1: 1RECV_F0 1F0 1RECV_F1 1F1"]
    assert all(line in forward_only.__doc__ for line in drawn)


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_any_placement_runs_each_forward_once_and_in_order(homes, microbatches):
    used = sorted(set(homes))
    placement = tuple(used.index(worker) for worker in homes)
    schedule = forward_only(placement, microbatches)
    for worker, row in enumerate(schedule.body):
        for stage in range(len(placement)):
            of_stage = [a.microbatch for a in row if a.op is Op.F and a.stage == stage]
            assert of_stage == (list(range(microbatches)) if placement[stage] == worker else [])
        for place, action in enumerate(row):
            stage, op, microbatch = action
            if op is Op.RECV_F:
                assert schedule.wiring.crosses(stage - 1, microbatch)
                assert row[place + 1] == Action(stage, Op.F, microbatch)
            if op is Op.SEND_F:
                assert schedule.wiring.crosses(stage, microbatch)
                assert row[place - 1] == Action(stage, Op.F, microbatch)
    stages = len(placement)
    busiest = max(placement.count(worker) for worker in set(placement))
    found = simulate(schedule, Costs.uniform(stages)).makespan_s  # a deadlock is refused here
    assert max(stages, busiest * microbatches) <= found <= stages * microbatches


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_full_pipeline(workers):
    """One stage per worker, several that go round, two that go there and back."""
    for microbatches in range(workers, 4 * workers + 1):
        for chunks in (1, 2, 3):
            placement = tuple(range(workers)) * chunks
            assert seconds(placement, microbatches) == microbatches * chunks + workers - 1
        assert seconds(there_and_back(workers), microbatches) == 2 * microbatches + 2 * workers - 2


@pytest.mark.parametrize("placement", [(0, 1, 2, 3) * 2, there_and_back(4)])
def test_a_worker_does_not_run_away(placement):
    """The first worker takes what has come back before it sends more on its way, however many there are."""
    mosts = []
    for microbatches in (64, 256):
        forwards = [a.stage for a in forward_only(placement, microbatches).body[0] if a.op is Op.F]
        mosts.append(max(accumulate(1 if stage == 0 else -1 for stage in forwards)))
    assert mosts[0] == mosts[1] <= 6 * 4


@pytest.mark.parametrize("latency_s", [0.5, 1.0])
def test_a_latency_is_paid_once(latency_s):
    """By the first micro-batch on its way through all stages; the others follow without a gap."""
    for placement in ((0, 1, 2, 3), (0, 1, 2, 3) * 2, there_and_back(4)):
        assert seconds(placement, 32, latency_s) <= seconds(placement, 32) + latency_s * (len(placement) - 1)


@pytest.mark.parametrize(("placement", "microbatches"), [((), 1), ((0,), 0)])
def test_nothing_to_evaluate(placement, microbatches):
    with pytest.raises(ScheduleError, match="at least one of each"):
        forward_only(placement, microbatches)
