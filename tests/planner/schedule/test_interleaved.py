"""Laws of interleaved 1F1B: any number of micro-batches, and a bubble that shrinks with chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.planner.schedule.interleaved import interleaved
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.validate import validate
from raypipe.planner.simulate.serial import Costs, makespan_s, simulate

FORWARD_S, BACKWARD_S = 1.0, 2.0

T = FORWARD_S + BACKWARD_S


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_interleaved_runs_for_any_number_of_microbatches(workers, microbatches, chunks):
    lowered = lower(interleaved(workers, microbatches, chunks))
    validate(lowered, repeats=2)
    assert simulate(lowered, Costs.uniform(workers * chunks)).busy_s(0) == pytest.approx(chunks * microbatches * T)


def test_interleaved_bubble_shrinks_with_chunks():
    """(S-1)(t_F+t_B)/v of whole-worker seconds: arXiv:2104.04473, section 2.2."""
    for chunks in (1, 2, 4):
        costs = Costs.uniform(4 * chunks, FORWARD_S / chunks, BACKWARD_S / chunks)
        assert makespan_s(lower(interleaved(4, 8, chunks)), costs) == 8 * T + 3 * T / chunks
