"""The parts of bench_asynchronous that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import pytest
import torch

from jobs.bench.asynchronous import bench
from jobs.bench.asynchronous.bench import MICROBATCHES, MINIBATCHES, Measured, Settings


def test_an_epoch_counts_whole_and_the_first_one_not() -> None:
    epoch = [0.5, 0.2, *[0.1] * (MINIBATCHES - 3), 0.4]
    found = bench.timed([9.0] * MINIBATCHES + epoch)
    assert found.whole_s == [pytest.approx((0.5 + 0.2 + 0.4 + 0.1 * (MINIBATCHES - 3)) / MINIBATCHES)]
    assert found.steady_s == [0.1] * (MINIBATCHES - 3)
    for length in (MINIBATCHES, 2 * MINIBATCHES - 1):
        with pytest.raises(RuntimeError, match="whole epochs"):
            bench.timed([1.0] * length)


def test_efficiency_is_against_two_processors() -> None:
    figures = bench.figures_of("2bw", Measured([1.0], [1.25], [0.625], [0.5], [], [0.01], [0.5]))
    assert figures == {
        "efficiency_2bw": pytest.approx(0.8),
        "c_2bw": pytest.approx(0.8),
        "of_c_2bw": pytest.approx(1.0),
        "of_c_2bw_steady": pytest.approx(1.25),
        "pair_of_c_2bw": pytest.approx(1.25),
        "of_pair_2bw": pytest.approx(0.8),
        "daemons_2bw": 0.01,
    }


def test_a_handicap_is_two_sleeps_per_microbatch_and_one_time_to_fill() -> None:
    found = Measured([1.0], [1.0], [0.5], [0.5], [], [0.0], [0.5])
    assert bench.handicap_predicted(found, 0.0) == pytest.approx(1.0)
    more_s = 2 * 0.01 * (MICROBATCHES * MINIBATCHES + 1) / MINIBATCHES
    assert bench.handicap_predicted(found, 0.01) == pytest.approx(1 / (2 * (0.5 + more_s)))


def test_the_halves_are_equal_and_a_handicap_changes_no_number() -> None:
    plain, second = bench.model(4)
    slowed, after = bench.model(4, handicap_s=1e-4)
    assert (int(second), int(after)) == (2, 3)
    sizes = [sum(p.numel() for p in half.parameters()) for half in (plain[:2], plain[2:])]
    assert sizes[0] == sizes[1]
    x = bench.samples(8).tensors[0][:2]
    for net in (plain, slowed):
        net(x).sum().backward()
    assert torch.equal(plain(x), slowed(x))
    gradients = [[p.grad for p in net.parameters()] for net in (plain, slowed)]
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_copies_time_every_minibatch_after_the_warm_up() -> None:
    settings = Settings(depth=2, context=4, epochs=2)
    assert len(bench.copies_s(settings, 1, 2)) == 2 * MINIBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, MICROBATCHES])
def test_a_bare_pair_times_every_epoch_after_the_warm_up(updates: int) -> None:
    found = bench.bare_s(Settings(depth=2, context=4, epochs=3), updates)
    assert len(found) == 2
    assert all(seconds > 0 for seconds in found)
