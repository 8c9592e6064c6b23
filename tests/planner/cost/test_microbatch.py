"""The number of micro-batches: the formula against a sweep, against the simulator, and its laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.cost.microbatch import Bounds, Hop, Pipe, StageTime, choose_microbatches, fit_stage_time
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulator import Costs, makespan_s

TIMES = st.builds(
    lambda sigma, b0: StageTime(sigma, b0, 0.0, ((1, sigma * (1 + b0)), (64, sigma * (64 + b0)))),
    st.sampled_from([1e-4, 1e-2, 1.0]),
    st.floats(0.0, 40.0),
)
HOPS = st.builds(Hop, st.sampled_from([0.0, 1e-3]), st.sampled_from([0.0, 1e-4]), st.booleans())


def line(sigma_s: float, overhead: float) -> StageTime:
    return fit_stage_time({b: sigma_s * (b + overhead) for b in (1, 2, 4, 8)})


@pytest.mark.slow
@given(st.floats(1e-6, 10.0), st.floats(0.0, 50.0))
def test_a_line_is_found_again(sigma, overhead):
    found = line(sigma, overhead)
    assert found.sigma_s == pytest.approx(sigma, rel=1e-6)
    assert found.overhead_samples == pytest.approx(overhead, rel=1e-6, abs=1e-6)
    assert found.is_straight


@pytest.mark.slow
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), min_size=2, max_size=6))
def test_any_measurement_gives_a_usable_time(measured):
    found = fit_stage_time(measured)
    assert found.sigma_s > 0
    assert 0 <= found.overhead_samples < math.inf
    if not found.is_straight:  # then the points themselves are the answer
        assert all(found.seconds(b) == pytest.approx(t) for b, t in measured.items())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(TIMES, st.integers(1, 256), st.integers(1, 8), HOPS, st.sampled_from([0.03, 0.05]))
def test_the_range_is_where_the_model_is_within_epsilon(time, minibatch, stages, hop, epsilon):
    found = choose_microbatches(time, minibatch, Pipe(stages, hop), epsilon=epsilon)

    def step_s(n: float) -> float:
        transfers = 2 * (stages - 1) * (1 + (n / stages if hop.exposed else 0.0))
        return (n + stages - 1) * time.seconds(minibatch / n) + transfers * hop.seconds(minibatch / n)

    best = step_s(found.optimum)
    assert 1 <= found.low <= found.optimum <= found.high <= minibatch
    assert best <= min(step_s(n) for n in range(1, minibatch + 1)) * (1 + 1e-9)
    for end, further in ((found.low, found.low * 0.98), (found.high, found.high * 1.02)):
        assert step_s(end) <= best * (1 + epsilon) * (1 + 1e-9)
        if 1 <= further <= minibatch:
            assert step_s(further) >= best * (1 + epsilon) * (1 - 1e-9)


@pytest.mark.slow
@given(st.just(0.0) | st.floats(0.1, 20.0), st.integers(1, 5000), st.integers(1, 16))
def test_without_transfers_the_optimum_is_the_root(overhead, minibatch, stages):
    """One micro-batch on one stage, as many as there are samples without overhead."""
    assume(overhead or stages > 1)
    root = math.sqrt(minibatch * (stages - 1) / overhead) if overhead else math.inf
    found = choose_microbatches(line(1e-3, overhead), minibatch, Pipe(stages))
    assert found.optimum == pytest.approx(min(max(1.0, root), minibatch), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TIMES, st.integers(1, 200), st.integers(1, 6), HOPS)
def test_the_choice_is_the_best_divisor_to_half_a_percent(time, minibatch, stages, hop):
    found = choose_microbatches(time, minibatch, Pipe(stages, hop))
    open_ones = [c.predicted_s for c in found.curve if not c.refused]
    assert found.predicted_s <= min(open_ones) * 1.005
    divisors = {n for n in range(1, minibatch + 1) if minibatch % n == 0}
    assert divisors <= {c.num_microbatches for c in found.curve}
    if any(found.low <= n <= found.high for n in divisors):
        assert found.num_microbatches in divisors


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(TIMES, st.integers(1, 128), st.integers(1, 6), st.integers(1, 128))
def test_memory_is_kept_or_refused(time, minibatch, stages, largest):
    found = choose_microbatches(time, minibatch, Pipe(stages), Bounds(lambda n, b: b <= largest))
    free = choose_microbatches(time, minibatch, Pipe(stages))
    assert found.microbatch_size <= largest
    assert found.predicted_s >= free.predicted_s * (1 - 0.005)
    if free.microbatch_size > largest:
        assert found.decided_by == "memory"
    assert all(c.refused == ("memory" if c.microbatch_size > largest else "") for c in found.curve)


@pytest.mark.parametrize(
    ("stages", "minibatch", "overhead", "best"),
    [(4, 256, 2, 16), (8, 256, 2, 32), (4, 512, 8, 16), (8, 1024, 1, 64), (2, 128, 4, 4)],
)
def test_the_choice_is_the_simulators_best_divisor(stages, minibatch, overhead, best):
    def simulated_s(n: int) -> float:
        t = minibatch / n + overhead
        return makespan_s(lower(schedule_of(ScheduleSpec("1f1b", n), stages)), Costs.uniform(stages, t / 3, t * 2 / 3))

    found = choose_microbatches(line(1.0, overhead), minibatch, Pipe(stages))
    swept = {c.num_microbatches: simulated_s(c.num_microbatches) for c in found.curve if c.num_microbatches <= 256}
    assert found.num_microbatches == best
    assert swept[best] <= min(swept.values()) * 1.015
    assert found.predicted_s == pytest.approx(swept[best], rel=1e-6)


def test_an_interleaved_schedule_wants_multiples_and_has_less_bubble() -> None:
    plain = choose_microbatches(line(1e-3, 1.0), 96, Pipe(4))
    found = choose_microbatches(line(1e-3, 1.0), 96, Pipe(8, chunks=2))
    assert found.num_microbatches % 4 == 0
    assert {c.refused for c in found.curve if c.num_microbatches % 4} == {"schedule"}
    assert found.optimum == pytest.approx(plain.optimum / math.sqrt(2))


def test_a_prime_mini_batch_takes_a_smaller_last_micro_batch() -> None:
    found = choose_microbatches(line(1e-3, 1.0), 97, Pipe(4))
    assert found.low <= found.num_microbatches <= found.high
    assert math.ceil(97 / found.microbatch_size) == found.num_microbatches
    assert found.microbatch_size * found.num_microbatches > 97


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fit_stage_time({1: 0.1}), "measure two sizes or more"),
        (lambda: fit_stage_time({1: 0.1, 2: 0.0}), "each above 0 s"),
        (lambda: choose_microbatches(line(1.0, 1.0), 0, Pipe(2)), "minibatch_size=0"),
        (lambda: choose_microbatches(line(1.0, 1.0), 8, Pipe(5, chunks=2)), "divide evenly"),
        (lambda: choose_microbatches(line(1.0, 1.0), 8, Pipe(2), Bounds(lambda n, b: False)), "8 of 1 fail for memory"),
    ],
)
def test_refusals_say_what_to_change(make, text) -> None:
    with pytest.raises(PlanError, match=text):
        make()
