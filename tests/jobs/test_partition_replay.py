"""What a replayed partition is held against; the runs themselves are the benchmark."""

from __future__ import annotations

import pytest

from jobs.bench.partition import replay
from jobs.bench.partition.replay import SLOWEST_S, figures_of, handicaps_seen, planned, row_of
from jobs.bench.partition.solving import bound
from raypipe.ir.graph import ModelGraph, Node

MICROBATCHES = 32


def layers(*seconds: float) -> ModelGraph:
    """A chain whose backward takes twice as long as its forward."""
    return ModelGraph(tuple(Node(f"op{i}", "", (), 4, 4, s / 3, s / 3, s / 3) for i, s in enumerate(seconds)))


def test_a_plan_of_equal_layers_is_at_its_bound() -> None:
    plan = planned("net", layers(*[0.001] * 8), 4, MICROBATCHES)
    assert plan.name == "net_4"
    assert plan.factor == pytest.approx(SLOWEST_S / 0.002)
    assert plan.times == [pytest.approx((SLOWEST_S / 3, 2 * SLOWEST_S / 3))] * 4
    assert plan.predicted_s == pytest.approx(SLOWEST_S * (MICROBATCHES + 3))
    measured = plan._replace(steps_s=[plan.predicted_s])
    assert measured.speedup == pytest.approx(plan.bound) == pytest.approx(4 * 32 / 35)
    assert measured.vs_predicted == 1.0


def test_the_bound_knows_the_largest_layer() -> None:
    assert bound([1.0, 2.0, 1.0], 2, 7) == pytest.approx(2 * 7 / 8)
    assert bound([1.0, 4.0, 1.0], 4, 7) == pytest.approx(1.5 * 0.7)


def test_a_slower_run_shows_in_every_figure() -> None:
    plan = planned("net", layers(0.002, 0.001, 0.001, 0.002), 2, MICROBATCHES)
    found = [plan._replace(steps_s=[s * plan.predicted_s for s in (1.1, 1.2, 1.3)])]
    figures = figures_of(found, 2)
    assert figures["replayed_vs_predicted_net_2"] == pytest.approx(1.2)
    assert figures["replayed_speedup_net_2"] == pytest.approx(2 * 32 / 33 / 1.2)
    assert figures["replayed_of_bound_net_2"] == pytest.approx(1 / 1.2)
    assert figures["replayed_speedup_median_2"] == figures["replayed_speedup_net_2"]
    assert len(row_of(found[0])) == len(replay.COLUMNS)


def test_a_handicap_is_part_of_the_prediction() -> None:
    graph = layers(0.002, 0.001, 0.001, 0.002)
    plain, slowed = (planned("net", graph, 2, MICROBATCHES, extra_s) for extra_s in (0.0, 0.003))
    assert slowed.predicted_s == pytest.approx(plain.predicted_s * (SLOWEST_S + 0.006) / SLOWEST_S)
    assert slowed.factor == plain.factor
    as_predicted = [plan._replace(steps_s=[1.01 * plan.predicted_s]) for plan in (plain, slowed)]
    assert handicaps_seen(as_predicted[:1], as_predicted[1:], 0.003)
    unmoved = [slowed._replace(steps_s=as_predicted[0].steps_s)]
    assert not handicaps_seen(as_predicted[:1], unmoved, 0.003)
