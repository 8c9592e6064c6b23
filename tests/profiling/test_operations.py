"""Equal operations are timed once, within a budget; backwards that it leaves out are estimated."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig
from raypipe.capture import Capture, capture
from raypipe.errors import ConfigError
from raypipe.profiling import profile_graph
from raypipe.profiling.measure import Bench
from raypipe.profiling.operations import Budget, Moment, OperationTimer, OperationTimes, seconds_between
from tests.trainers import trainer_of

BLOCKS, WIDTH = 6, 32
TINY_S = 1e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def columns(samples: int = 8) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, WIDTH, generator=generator)
    return {0: x, 1: torch.randint(0, 3, (samples,), generator=generator)}


def captured(model: nn.Module) -> Capture:
    given = columns()
    return capture(model, (given[0], given[1]), (0, 1), functional.cross_entropy, evaluates=False)


def timed(made: Capture, budget_s: float) -> OperationTimer:
    timer = OperationTimer(Bench.of(made).passes(), columns(), Budget(budget_s))
    timer.run()
    timer.run()
    return timer


def test_equal_blocks_are_timed_once() -> None:
    timer = timed(captured(Traced()), 60.0)
    linears = [kind for kind in timer.samples if "linear" in str(kind[0])]  # type: ignore[index]
    assert len(linears) == 4, "the first, whose input needs no gradient, up, down and head, whatever BLOCKS is"
    assert len(timer.kinds) > BLOCKS * len(linears)
    assert all(len(samples) == 2 for samples in timer.samples.values())
    assert timer.num_measured == (len(timer.samples) - 1,) * 2, "all but the loss"
    parts = timer.parts()
    assert len(parts) == len(timer.kinds)
    assert len({p for kind, p in zip(timer.kinds, parts, strict=True) if kind == timer.kinds[0]}) == 1
    assert timer.unique_s < sum(p.total_s for p in parts)


def test_without_time_backwards_are_estimated() -> None:
    timer = timed(captured(Traced()), 0.0)
    assert timer.num_measured[0] == 0
    assert all(p.backward_s == pytest.approx(2 * p.forward_s) for p in timer.parts()[:-1] if not p.measured)


def test_a_backward_is_estimated_from_those_of_its_function() -> None:
    timer = OperationTimer(Bench.of(captured(Traced())).passes(), columns(), Budget(1.0))
    timer.samples = {
        ("a", 1): [OperationTimes(9.0, 9.0, 9.0), OperationTimes(1.0, 3.0, 2.0)],  # the first pass warms up
        ("a", 2): [OperationTimes(2.0, measured=False)],
        ("b", 1): [OperationTimes(1.0, 1.0, 0.0)],
        ("c", 1): [OperationTimes(4.0, measured=False)],
        ("loss",): [OperationTimes(0.5)],
    }
    timer.kinds = list(timer.samples)[:-1]
    _, own, _, other = timer.parts()
    assert (own.input_s, own.weight_s) == (6.0, 4.0)
    assert other.forward_s == 4.5, "with the loss"
    assert (other.input_s, other.weight_s) == (6.4, 3.2), "as all functions together"


@pytest.mark.parametrize("model", [Traced, lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))])
def test_a_short_budget_is_reported(model: Any) -> None:
    made = captured(model())
    seen: list[tuple[int, int]] = []
    short = profile_graph(made, columns(), budget_s=TINY_S, progress=lambda done, total: seen.append((done, total)))
    full = profile_graph(made, columns(), budget_s=60.0)
    count = len(made.graph.nodes)
    assert full.notes[-1] == f"All {count} operations were measured."
    assert f"(profile_budget_s={TINY_S:g})" in short.notes[-1]
    assert (short.source, full.source) == ("estimated", "measured")
    assert short.microbatch_size < full.microbatch_size
    assert math.isfinite(short.forward_s + short.backward_s)
    assert seen == sorted(seen)
    assert seen[-1] == (count, count)
    assert [n.activation_bytes for n in short.graph.nodes][:-1] == [n.activation_bytes for n in full.graph.nodes][:-1]


def test_the_budget_is_a_field_with_an_effect() -> None:
    given = columns(16)
    notes = []
    for budget_s in (TINY_S, 60.0):
        model, data = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)), TensorDataset(given[0], given[1])
        trainer = trainer_of(model, train_data=data, partitioner="auto", profile_budget_s=budget_s)
        notes.append(dict(trainer.plan().reasons)["profile"])
    assert "estimated" in notes[0]
    assert notes[1].startswith("All ")
    with pytest.raises(ConfigError, match="profile_budget_s=0"):
        PipelineConfig(profile_budget_s=0)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(0, 3), st.integers(0, 3))
def test_time_of_other_processes_does_not_count(wall_s: float, cpu_s: float, before: int, more: int) -> None:
    begin, end = Moment(5.0, 1.0, before), Moment(5.0 + wall_s, 1.0 + cpu_s, before + more)
    found = seconds_between(begin, end)
    assert found <= wall_s + 1e-9
    if more:  # a thread that waits was not preempted
        assert found == pytest.approx(wall_s)
    else:
        assert found == pytest.approx(min(wall_s, cpu_s))


def test_a_sleep_counts_and_so_does_work() -> None:
    begin = Moment.now()
    time.sleep(0.02)
    assert seconds_between(begin, Moment.now()) >= 0.02
    begin = Moment.now()
    while time.thread_time() - begin.cpu_s < 0.01:
        pass
    assert seconds_between(begin, Moment.now()) >= 0.01
