"""The parts of bench_microbatch that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.bench.microbatch import bench, sweeps
from jobs.bench.microbatch.grid import figures_of as grid_figures_of
from jobs.bench.microbatch.grid import tables_of, throughputs
from jobs.bench.microbatch.sweeps import Case, Key, divisors, make_case, numbers_of, range_ends, simulated_s, times_of
from raypipe.planner.microbatch import Pipe, choose_microbatches
from raypipe.planner.stage_time import fit_stage_time

SIGMA_S = 0.01


def case_of(minibatch_size: int, num_stages: int, overhead: float) -> Case:
    """Equal stages on a line, and the planner's own choice for them."""
    seconds = {b: SIGMA_S * (b + overhead) for b in divisors(minibatch_size)}
    time = fit_stage_time({b: SIGMA_S * (b + overhead) for b in (1, 2, 4, 8)})
    found = choose_microbatches(time, minibatch_size, Pipe(num_stages))
    half = choose_microbatches(time, minibatch_size // 2, Pipe(num_stages))
    return Case(
        model="line",
        num_stages=num_stages,
        minibatch_size=minibatch_size,
        chosen=found.num_microbatches,
        real_chosen=found.num_microbatches,
        optimum=found.optimum,
        low=found.low,
        high=found.high,
        epsilon=found.epsilon,
        half_chosen=half.num_microbatches,
        half_optimum=half.optimum,
        predicted_s={c.num_microbatches: c.predicted_s for c in found.curve},
        half_predicted_s={c.num_microbatches: c.predicted_s for c in half.curve},
        starts=tuple(range(1, num_stages)),
        stage_s={b: [(t / 3, 2 * t / 3)] * num_stages for b, t in seconds.items()},
        factor=2.0,
    )


def simulated_steps(case: Case, handicap_s: float = 0.0) -> dict[Key, list[float]]:
    return {
        key: [simulated_s(times_of(case, key.minibatch_size / n, handicap_s if key.slowed else 0.0), n)]
        for n, keys in numbers_of([case], handicap_s > 0).items()
        for _, key in keys
    }


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([16, 48, 64]), st.integers(2, 5), st.floats(0.05, 20.0))
def test_on_a_line_the_choice_is_the_best_and_the_range_keeps_its_word(
    minibatch: int, stages: int, overhead: float
) -> None:
    case = case_of(minibatch, stages, overhead)
    figures = bench.figures_of(case, simulated_steps(case))
    assert 1 <= figures["chosen_vs_best"] <= 1.006
    assert 1 <= figures["half_chosen_vs_best"] <= 1.006
    whole = any(n == math.floor(n) for n in (case.low, case.high)) or math.ceil(case.low) <= math.floor(case.high)
    if whole:
        assert figures["range_low"] <= 1 + case.epsilon + 1e-6
        assert figures["range_high"] <= 1 + case.epsilon + 1e-6


def test_where_overhead_is_small_the_number_decides_and_not_the_mini_batch() -> None:
    large, small = case_of(64, 4, 0.01), case_of(64, 4, 20.0)
    kept = bench.figures_of(large._replace(chosen=16), simulated_steps(large))["throughput_kept"]
    lost = bench.figures_of(small._replace(chosen=16), simulated_steps(small))["throughput_kept"]
    assert kept == pytest.approx(1.0, abs=0.01)
    assert lost < 0.7


def test_a_bad_choice_shows() -> None:
    case = case_of(64, 4, 2.0)
    steps = simulated_steps(case)
    assert bench.figures_of(case._replace(chosen=64), steps)["chosen_vs_best"] > 1.2
    assert bench.figures_of(case._replace(low=1.0), steps)["range_low"] > 1.2


def test_a_handicap_is_held_against_the_simulator() -> None:
    case = case_of(64, 4, 1.0)
    steps = simulated_steps(case, 0.02)
    assert bench.handicap_seen(case, steps, 0.02)
    unmoved = {key: steps.get(key._replace(slowed=False), seconds) for key, seconds in steps.items()}
    assert not bench.handicap_seen(case, unmoved, 0.02)


@given(st.floats(1.0, 16.0))
def test_between_measured_sizes_seconds_lie_on_a_straight(samples: float) -> None:
    case = case_of(16, 2, 3.0)
    (forward_s, backward_s), second = times_of(case, samples, 0.5)
    assert (forward_s, backward_s) == second
    assert forward_s + backward_s == pytest.approx(case.factor * SIGMA_S * (samples + 3.0) + 1.0)


def test_the_ends_of_a_range() -> None:
    case = case_of(64, 4, 1.0)
    assert range_ends(case._replace(low=2.2, high=7.9)) == (3, 7)
    assert range_ends(case._replace(low=3.0, high=3.0)) == (3, 3)
    assert range_ends(case._replace(low=2.2, high=2.7, optimum=2.6)) == (3, 3)


def test_every_divisor_and_every_end_is_run_once() -> None:
    case = case_of(64, 4, 1.0)._replace(low=3.5, high=8.2)
    found = numbers_of([case])
    assert list(found) == [1, 2, 4, 8, 16, 32, 64]
    assert [key.minibatch_size for _, key in found[8]] == [64, 32]
    assert list(numbers_of([case._replace(low=2.5)])) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert sum(key.slowed for keys in numbers_of([case], slowed=True).values() for _, key in keys) == 7


def test_the_grid_tells_whether_number_or_size_decides() -> None:
    """Where overhead is nothing, throughput is N / (N + S - 1) whatever the size; where it is all, it follows b."""
    sizes = (16, 32, 64)
    by_number, by_size = case_of(64, 4, 0.001), case_of(64, 4, 1000.0)
    for case, number_decides in ((by_number, True), (by_size, False)):
        steps = {
            key: [simulated_s(times_of(case, key.minibatch_size / n), n)]
            for n, keys in numbers_of([case], grid=sizes).items()
            for _, key in keys
        }
        found = throughputs(steps, sizes)
        assert len(found) == 5 + 6 + 7
        figures = grid_figures_of(found)
        if number_decides:
            assert figures["spread_by_number"] == pytest.approx(1.0, abs=0.01)
            assert figures["spread_by_size"] > 1.2
        else:
            assert figures["spread_by_number"] > figures["spread_by_size"] > 1
        shown = tables_of(case.name, found).splitlines()
        assert shown[0] == "line_4: throughput over the best, by number of micro-batches"
        assert [line.split()[0] for line in shown if line[:1].isdigit()] == [
            str(n) for n in (1, 2, 4, 8, 16, 32, 64)
        ] * 2


def test_models_have_stages_enough_and_data_that_fits() -> None:
    for model in sweeps.MODELS.values():
        built = model.make()
        *inputs, target = model.data(3)[:]
        assert len(built) >= 4
        assert model.loss_fn(built(*inputs), target).dim() == 0


@pytest.mark.slow
def test_a_case_of_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """raypipe's own plan, then its stages at every size."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    case = make_case("mlp", 2, 8, repeats=1, largest=16)
    assert case.name == "mlp_2"
    assert case.low <= case.optimum <= case.high
    assert case.chosen in case.predicted_s
    assert list(case.stage_s) == [1, 2, 4, 8, 16]
    assert {len(stages) for stages in case.stage_s.values()} == {2}
    assert min(min(stage) for stages in case.stage_s.values() for stage in stages) > 0
    assert len(case.starts) == 1
    at_high = times_of(case, 8 / range_ends(case)[1])
    assert max(map(sum, at_high)) >= 0.99 * sweeps.AT_HIGH_END_S
