"""A plan that takes micro-batches far beyond those that were measured asks what they take."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from raypipe.engine.capture import Capture, capture
from raypipe.engine.profile_cache import cached_further
from raypipe.engine.profiling import is_far, measure_further, profile_graph
from raypipe.engine.profiling.further import _free_bytes
from raypipe.ir.profile import Profile
from raypipe.planner.tune.sizes import graph_at, seconds_at, times_of
from tests.models import CASES

EACH_S, FULL = 0.002, 8


class Filling(nn.Linear):
    """Takes longer with every sample up to eight, and no longer from there on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(EACH_S * min(len(x), FULL))
        return super().forward(x)


class Few(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) <= FULL, "eight at most"
        return super().forward(x)


def profiled(layer: type[nn.Linear]) -> tuple[Capture, Profile, dict[Any, torch.Tensor]]:
    """A profile of sizes up to eight, and 64 samples."""
    x, y = CASES["mlp"].data(64)[:64]
    made = capture(nn.Sequential(layer(6, 3)), (x[:FULL], y[:FULL]), (0, 1), functional.cross_entropy)
    return made, profile_graph(made, {0: x[:FULL], 1: y[:FULL]}, repeats=1), {0: x, 1: y}


def test_what_is_far() -> None:
    _, profile, _ = profiled(Filling)
    assert [is_far(profile, samples) for samples in (8, 12, 13, 64)] == [False, False, True, True]


def test_one_more_size_is_measured() -> None:
    made, profile, columns = profiled(Filling)
    seen: list[tuple[int, int]] = []
    found = measure_further(made, profile, columns, progress=lambda done, total: seen.append((done, total)))
    assert found.seconds_by_size[:-1] == profile.seconds_by_size
    size, seconds = found.seconds_by_size[-1]
    assert size == 64
    assert seconds < 2 * dict(profile.seconds_by_size)[FULL], "a line through the others says eight times as much"
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert not is_far(found, 96)


class Steep(nn.Linear):
    """Takes as long for eight as ``Filling``, and eight times that for 64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(EACH_S * len(x))
        return super().forward(x)


def test_operations_are_measured_at_that_size_too() -> None:
    """Of two that take as long up to eight samples one fills up: a plan for 64 knows which."""
    x, y = CASES["mlp"].data(64)[:64]
    model = nn.Sequential(Filling(6, 6), Steep(6, 3))
    made = capture(model, (x[:FULL], y[:FULL]), (0, 1), functional.cross_entropy)
    profile = profile_graph(made, {0: x[:FULL], 1: y[:FULL]}, repeats=1)
    found = measure_further(made, profile, {0: x, 1: y})
    assert found.large is not None
    size, (filling_s, steep_s) = found.large
    assert size == 64
    assert steep_s > 4 * filling_s
    assert filling_s + steep_s == pytest.approx(found.seconds_by_size[-1][1])
    assert Profile.from_json(found.to_json()) == found
    at_64 = graph_at(found, 64, seconds_at(found, times_of(found), 64), found.graph)
    assert [node.busy_s for node in at_64.nodes] == pytest.approx([filling_s, steep_s])


def test_a_size_that_fails_is_noted() -> None:
    made, profile, columns = profiled(Few)
    found = measure_further(made, profile, columns)
    assert found.seconds_by_size == profile.seconds_by_size
    assert any("Micro-batches of 64 could not be measured: AssertionError: eight at most" in n for n in found.notes)


def test_a_size_that_would_fill_the_memory_is_not_tried() -> None:
    made, profile, columns = profiled(Few)
    nodes = tuple(dataclasses.replace(node, activation_bytes=1 << 50) for node in profile.graph.nodes)
    huge = dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=nodes))
    found = measure_further(made, huge, columns)
    assert found.seconds_by_size == profile.seconds_by_size
    assert "more memory than is free" in found.notes[-1]


def test_it_is_measured_once(tmp_path: Path) -> None:
    made, profile, columns = profiled(Filling)
    called: list[int] = []
    first = cached_further(made, profile, columns, folder=tmp_path, progress=lambda done, total: called.append(done))
    assert called
    called.clear()
    again = cached_further(made, profile, columns, folder=tmp_path, progress=lambda done, total: called.append(done))
    assert (again, called) == (first, [])


class Heavy(nn.Linear):
    """So long for eight that larger ones are not measured as a matter of course."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 + 0.001 * min(len(x), FULL))
        return super().forward(x)


def test_a_plan_knows_the_size_that_it_takes() -> None:
    """A line through one to eight says 52 ms of 32 samples, which take 28."""
    x, y = CASES["mlp"].data(32)[:32]
    trainer = raypipe.PipelineTrainer(
        nn.Sequential(Heavy(6, 3), nn.Linear(3, 3)),
        loss_fn=functional.cross_entropy,
        optimizer=torch.optim.SGD,
        train_data=TensorDataset(x, y),
        pipeline=raypipe.PipelineConfig(num_stages=1, minibatch_size=32),
    )
    plan = trainer.plan()
    assert plan.microbatch_size == 32
    assert plan.prediction is not None
    assert plan.prediction.step_s < 0.042


def test_what_a_container_has_left_counts(tmp_path: Path) -> None:
    assert _free_bytes(tmp_path) == float("inf")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8 kB\n")
    assert _free_bytes(tmp_path) == 8192
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for most, free in (("max", 8192), ("6000", 4000), ("90000", 8192)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("2000\n")
        assert _free_bytes(tmp_path) == free
