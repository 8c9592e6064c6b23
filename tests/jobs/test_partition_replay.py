"""What a replayed partition is held against; the runs themselves are the benchmark."""

from __future__ import annotations

import pytest

from jobs.bench.partition import replay
from jobs.bench.partition.replay import SLOWEST_S, below, figures_of, handicaps_seen, planned, row_of, slowed
from jobs.bench.partition.solving import bound
from raypipe.ir.graph import ModelGraph, Node

MICROBATCHES = 32


def layers(*seconds: float, output_bytes: int = 0) -> ModelGraph:
    """A chain whose backward takes twice as long as its forward."""
    nodes = [
        Node(f"op{i}", "", (), 4, output_bytes, s / 3, s / 3, s / 3, output_bytes=output_bytes)
        for i, s in enumerate(seconds)
    ]
    return ModelGraph(tuple(nodes))


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
    plain = planned("net", layers(0.002, 0.001, 0.001, 0.002), 2, MICROBATCHES)
    slower = slowed(plain, 0.003)
    assert slower.predicted_s == pytest.approx(plain.predicted_s * (SLOWEST_S + 0.006) / SLOWEST_S)
    as_predicted = [plan._replace(steps_s=[1.01 * plan.predicted_s]) for plan in (plain, slower)]
    assert handicaps_seen(as_predicted[:1], as_predicted[1:], 0.003)
    unmoved = [slower._replace(steps_s=as_predicted[0].steps_s)]
    assert not handicaps_seen(as_predicted[:1], unmoved, 0.003)


def test_over_a_link_messages_take_what_the_boundary_of_a_micro_batch_does() -> None:
    graph = layers(*[0.001] * 4, output_bytes=125_000)  # half a megabyte of four samples: 4 ms at 1 Gbit/s
    plan = planned("net", graph, 2, MICROBATCHES, 1)
    assert (plan.name, planned("net", graph, 2, MICROBATCHES, 10).name) == ("net_2_1gbit", "net_2_10gbit")
    assert plan.held_s == [pytest.approx(0.004 * plan.factor)]
    free = planned("net", graph, 2, MICROBATCHES)
    assert plan.predicted_s / plan.factor > 1.5 * free.predicted_s / free.factor, (
        "a message takes twice as long as a stage's micro-batch"
    )
    assert (free.slack, plan.slack in replay.SLACKS, free.held_s) == (2, True, [0.0])


def test_the_slack_is_that_of_the_least_predicted_step() -> None:
    graph = layers(*[0.001] * 8, output_bytes=56_000)  # nearly all of a stage's forward and backward, each way
    plan = planned("net", graph, 4, MICROBATCHES, 1)
    assert plan.slack > 2


def test_figures_over_a_link_have_its_rate_and_nets_below_are_named() -> None:
    plans = [planned(name, layers(*[0.001] * 8), 4, MICROBATCHES, 10) for name in ("a", "b")]
    found = [plan._replace(steps_s=[s * plan.predicted_s]) for plan, s in zip(plans, (1.0, 1.2), strict=True)]
    figures = figures_of(found, 4)
    assert set(figures) >= {"replayed_speedup_a_4_10gbit", "replayed_vs_predicted_median_4_10gbit"}
    assert below(found, 3.4) == f"below a speedup of 3.4: b_4_10gbit ({4 * 32 / 35 / 1.2:.2f})"
    assert below(found, 1.0) == "below a speedup of 1: none"
