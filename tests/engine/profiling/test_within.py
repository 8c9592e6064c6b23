"""Within a budget equal operations are measured once, and what is left out is estimated and said."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from raypipe.engine.capture import Capture, capture
from raypipe.engine.profiling import profile_within
from raypipe.engine.profiling.alike import Alike, Budget, Parts
from raypipe.engine.profiling.measure import Bench
from raypipe.engine.profiling.steps import child_of
from raypipe.errors import ConfigError

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


def passed(made: Capture, budget_s: float, repeats: int = 2) -> Alike:
    bench = Bench.of(made)
    leaves = [[bench.leaves[site] for site in sites] for sites in bench.steps.sites]
    observer = Alike(leaves, bench.steps.weight_like, Budget(budget_s), repeats)
    bench.steps.run(bench.leaves, bench.buffers, columns(), observer)
    return observer


def test_equal_blocks_are_measured_once() -> None:
    observer = passed(captured(Traced()), 60.0)
    names = [str(kind[0]) for kind in observer.found]  # type: ignore[index]
    linears = [name for name in names if "linear" in name]
    assert len(linears) == 4, "the first, whose input needs no gradient, up, down and head, whatever BLOCKS is"
    assert len(observer.kinds) > BLOCKS * len(linears)
    assert all(parts.measured for parts in observer.found.values())
    seconds = observer.seconds()
    assert len(seconds) == len(observer.kinds)
    assert len({parts for kind, parts in zip(observer.kinds, seconds, strict=True) if kind == observer.kinds[0]}) == 1


def test_equal_children_of_a_sequential_are_measured_once() -> None:
    made = captured(nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 3)))
    observer = passed(made, 60.0)
    assert len(observer.found) == 3, "the first one's input needs no gradient"


def test_children_that_differ_in_a_number_are_not_alike() -> None:
    made = captured(nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.2)))
    observer = passed(made, 60.0)
    assert len(observer.found) == 3
    assert child_of(print) is None


def test_without_time_backwards_are_estimated() -> None:
    observer = passed(captured(Traced()), 0.0)
    assert not any(parts.measured for parts in observer.found.values() if parts.forward_s and parts.backward_s)
    assert all(
        parts.backward_s == pytest.approx(2 * parts.forward_s) for parts in observer.seconds() if not parts.measured
    )


def test_a_kind_is_estimated_from_its_own_function() -> None:
    observer = Alike([], frozenset(), Budget(1.0), 1)
    observer.found = {
        ("a", 1): Parts(1.0, 3.0, 2.0),
        ("a", 2): Parts(2.0, measured=False),
        ("b", 1): Parts(1.0, 1.0, 0.0),
        ("c", 1): Parts(4.0, measured=False),
    }
    observer.kinds = list(observer.found)
    _, own, _, other = observer.seconds()
    assert (own.input_s, own.weight_s) == (6.0, 4.0)
    assert (other.input_s, other.weight_s) == (8.0, 4.0), "of no known function: as all together"


@pytest.mark.parametrize("model", [Traced, lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))])
def test_a_short_budget_estimates_and_says_so(model: Any) -> None:
    made = captured(model())
    seen: list[tuple[int, int]] = []
    short = profile_within(made, columns(), budget_s=TINY_S, progress=lambda done, total: seen.append((done, total)))
    full = profile_within(made, columns(), budget_s=60.0, repeats=1)
    count = len(made.graph.nodes)
    assert full.notes[-1] == f"All {count} operations were measured."
    assert f"(profile_budget_s={TINY_S:g})" in short.notes[-1]
    assert (short.source, full.source) == ("estimated", "measured")
    assert short.microbatch_size < full.microbatch_size
    assert math.isfinite(short.forward_s + short.backward_s)
    assert seen[-1] == (count, count)
    assert [n.activation_bytes for n in short.graph.nodes][:-1] == [n.activation_bytes for n in full.graph.nodes][:-1]


def test_the_budget_is_a_field_with_an_effect() -> None:
    given = columns(16)
    notes = []
    for budget_s in (TINY_S, 60.0):
        trainer = raypipe.PipelineTrainer(
            nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)),
            loss_fn=functional.cross_entropy,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            train_data=TensorDataset(given[0], given[1]),
            pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=16, profile_budget_s=budget_s),
        )
        notes.append(dict(trainer.plan().reasons)["profile"])
    assert "estimated" in notes[0]
    assert notes[1].startswith("All ")
    with pytest.raises(ConfigError, match="profile_budget_s=0"):
        raypipe.PipelineConfig(profile_budget_s=0)
