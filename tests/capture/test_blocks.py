"""Blocks of a model while it is traced: progress, and the early end of a trace with open sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from raypipe.capture import Capture, TracedModel, capture
from raypipe.capture.blocks import blocks_of
from tests.exactness import captured

pytestmark = pytest.mark.xdist_group("tracing")


class Layers(nn.Module):
    """Tokens (b, length), embedded and passed through blocks of one class."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(16, 4), nn.ModuleList(block() for _ in range(count))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


class Uncheckable(nn.Linear):
    """Block with a condition on min(s // 2, 5), which stages cannot check."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.sym_min(x.shape[1] // 2, 5) > 3 else x


class CheckableLater(nn.Linear):
    """Block with a condition on max(1, s - 6), whose max torch.export drops once it knows that s > 7."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x[:, : x.shape[1] - 6].reshape(x.shape[0], 2, -1, 4).transpose(1, 2).contiguous()
        return super().forward(x) + pairs.mean()


def traced(model: nn.Module, *, evaluates: bool = False) -> tuple[Capture, list[str]]:
    """Capture a model of tokens; return the capture and the progress that was reported."""
    texts: list[str] = []
    tokens = torch.zeros(2, 12, dtype=torch.long)
    return capture(model, (tokens,), (0,), None, evaluates=evaluates, progress=texts.append), texts


def layers(*numbers: int, suffix: str = "") -> list[str]:
    return [f"tracing layer {number} of 4{suffix}" for number in numbers]


def test_blocks_are_those_of_the_longest_list_that_is_in_no_other() -> None:
    experts = [nn.ModuleList(nn.Linear(2, 2) for _ in range(8)) for _ in range(3)]
    decoder = nn.ModuleDict({"layers": nn.ModuleList(experts)})
    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "decoder": decoder})
    assert blocks_of(model) == experts
    assert blocks_of(nn.Linear(2, 2)) == []


@pytest.mark.slow
def test_progress_shows_each_layer_in_each_mode() -> None:
    _, texts = traced(Layers(lambda: nn.Linear(4, 4)), evaluates=True)
    assert texts == layers(1, 2, 3, 4) + layers(1, 2, 3, 4, suffix=" for evaluation")


@pytest.mark.slow
def test_a_trace_with_open_sizes_ends_after_a_condition_that_stages_cannot_check() -> None:
    made, texts = traced(Layers(Uncheckable))
    assert texts == layers(1, 2) + layers(1, 2, 3, 4)
    assert isinstance(made.model, TracedModel)
    assert "branches on sizes in a way that stages cannot check" in made.model.train.traced.fixed


@pytest.mark.slow
def test_a_trace_with_open_sizes_goes_on_where_the_condition_vanishes() -> None:
    made, texts = traced(Layers(CheckableLater))
    assert texts == layers(1, 2, 3, 4)
    assert isinstance(made.model, TracedModel)
    assert made.model.train.traced.fixed == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "gpt2"])
def test_watching_changes_no_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nn.TransformerEncoderLayer neither, which computes in another way in evaluation if a module has a hook."""
    one = captured(name)[1]
    monkeypatch.setattr(importlib.import_module("raypipe.capture.trace"), "watched_blocks", lambda *_: nullcontext())
    other = captured.__wrapped__(name)[1]
    assert other.graph == one.graph
    for mode in ("train", "eval"):
        lines = [getattr(made.recipe.stages, mode) for made in (one, other)]
        assert lines[0].values == lines[1].values
        assert lines[0].conditions == lines[1].conditions


class Choosing(nn.Linear):
    """Linear layer whose blocks are called in a branch of torch.cond, which TorchDynamo traces."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return torch.cond(x.sum() > 0, lambda y: self.ways[0](y), lambda y: self.ways[1](y), (x,)).mean()


@pytest.mark.slow
def test_blocks_may_be_called_in_a_branch_of_cond() -> None:
    made = capture(Choosing(), (torch.ones(2, 4),), (0,), None, evaluates=False)
    assert len(made.graph.nodes) > 1
