"""Partitions on paper: what the figures of bench/partition are made of."""

from __future__ import annotations

import json

import pytest

from jobs.bench.partition.solving import COLUMNS, FINE_COLUMNS, solve, solve_fine
from raypipe.ir.graph import ModelGraph, Node


def operations(*seconds: float) -> ModelGraph:
    """A chain, every operation a layer of its own."""
    nodes = [Node(f"op{i}", f"layer{i}", (), 4, 4, s / 3, s / 3, s / 3) for i, s in enumerate(seconds)]
    return ModelGraph(tuple(nodes))


def test_a_partition_beside_the_optimum_and_equal_numbers_of_layers() -> None:
    found = solve("vgg16", operations(0.004, 0.001, 0.001, 0.001, 0.001, 0.004, 0.002, 0.002), 4, 32, repeats=3)
    assert len(found.trials_s) == 3
    assert (found.bottleneck_s, found.others_s["uniform"]) == (pytest.approx(0.004), pytest.approx(0.005))
    figures = found.figures()
    assert figures["vs_optimum_vgg16_4"] == pytest.approx(1.0)
    assert figures["vs_uniform_vgg16_4"] == pytest.approx(1.25)
    assert figures["predicted_speedup_vgg16_4"] == pytest.approx(4 * 32 / 35)
    assert len(found.row()) == len(COLUMNS)
    json.dumps(found._replace(optimum_s=None).row(), allow_nan=False)


def test_a_worse_cut_shows() -> None:
    found = solve("vgg16", operations(*[0.001] * 8), 4, 32, repeats=1)
    assert found._replace(bottleneck_s=0.003).figures()["vs_optimum_vgg16_4"] == pytest.approx(1.5)


def test_what_the_grain_of_layers_costs() -> None:
    found = solve_fine("vgg16", operations(*[0.001] * 8), 8)
    assert found.figures()["vs_optimum_fine_vgg16_8"] == pytest.approx(1.0)
    assert found._replace(of_layers_s=0.002).figures()["layers_vs_fine_vgg16_8"] == pytest.approx(2.0)
    assert len(found.row()) == len(FINE_COLUMNS)
