"""What operations need while they run: against sums by hand, at other sizes, and on models that are unlike others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import capture
from raypipe.ir.graph import ModelGraph, most
from raypipe.planner.cost.columns import workspace_bytes
from raypipe.profiling import Rates, estimate_graph, profile_graph
from raypipe.profiling.workspace import LiveBytes
from tests.models import CASES

VOCABULARY, WIDTH, TOKENS = 500, 8, 4
SCALARS = 8
"""Bytes of the loss and its seed."""


def graph_of(model: nn.Module, samples: int, data: Any = None, loss: Any = functional.cross_entropy) -> ModelGraph:
    x, y = (t[:samples].clone() for t in (data or CASES["mlp"].data(32)[:32]))
    return profile_graph(capture(model, (x, y), (0, 1), loss), {0: x, 1: y}, sizes=()).graph


def plain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))


def test_live_bytes_come_and_go() -> None:
    x = torch.ones(1000)
    with LiveBytes() as live:
        y = x + x
        z = y.view(10, 100)[3:]
        del y
        assert live.now == 4000
        del z
        x.add_(x.clone())
    assert (live.now, max(live.log)) == (0, 4000)


def test_by_hand() -> None:
    """Backwards hold what arrives and what leaves; a linear's also the gradients of its weight and bias.

    The gelu's output is kept for the linear after it, and is gone when the gelu's backward runs.
    """
    gelu, linear = graph_of(plain(6, 9, 8, 7, 3), 4).nodes[1:3]
    for samples in (1, 4, 64):
        arrives, leaves = 8 * 4 * samples, 9 * 4 * samples
        assert most(gelu.workspace, samples) == pytest.approx(leaves + SCALARS, abs=samples)
        needed = most(linear.workspace, samples) - SCALARS
        assert arrives + 9 * 8 * 4 <= needed <= arrives + leaves + 9 * 8 * 4 + 8 * 4 + samples


def test_a_gradient_that_waits_for_another_branch_counts() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 100), nn.Linear(100, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.first(x)
            return self.last(torch.tanh(wide) + 2 * wide)

    (tanh,) = (node for node in graph_of(Skip(), 4).nodes if "tanh" in node.name)
    assert most(tanh.workspace, 4) == 4 * 3 * 100 * 4 + SCALARS, "the skip's, what arrives and what leaves"


class Words(nn.Module):
    """The head's weight is large beside a few samples, and its logits are large beside the weight with many."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.word, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.out.weight = self.word.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mix(self.word(tokens))))


def words_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Folded(nn.Module):
    """Work on a weight alone, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.utils.parametrizations.weight_norm(nn.Linear(6, 300))
        self.out = nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.wide(x)))


@pytest.mark.parametrize("name", ["words", "tied", "folded", "recurrent", "plain"])
def test_a_profile_at_a_few_samples_says_what_one_at_many_does(name: str) -> None:
    tokens = torch.randint(0, VOCABULARY, (32, TOKENS))
    makers = {
        "words": lambda: Words(tied=False),
        "tied": lambda: Words(tied=True),
        "folded": Folded,
        "recurrent": lambda: nn.Sequential(Last(), nn.Linear(40, 3)),
        "plain": lambda: plain(6, 9, 8, 3),
    }
    found = {}
    for samples in (4, 32):
        given = ((tokens, tokens), words_loss) if name in ("words", "tied") else (None, functional.cross_entropy)
        graph = graph_of(makers[name](), samples, *given)
        found[samples] = [workspace_bytes(graph, range(len(graph.nodes)), n) for n in (4, 8, 32)]
    assert found[4] == pytest.approx(found[32], rel=0.1)


class Last(nn.LSTM):
    """The last hidden state over a sequence of twos."""

    def __init__(self) -> None:
        super().__init__(2, 40, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.unflatten(1, (3, 2)))[0][:, -1]


def test_what_is_frozen_needs_what_goes_through_it() -> None:
    """No backward: what comes in, beside what goes out, which the layer after it keeps."""
    model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 400), nn.Linear(400, 3))
    for layer in model[:2]:
        layer.requires_grad_(False)
    assert most(graph_of(model, 4).nodes[1].workspace, 4) == 4 * 400 * 4


def test_one_sample_has_to_do() -> None:
    linear = graph_of(plain(6, 900, 3), 1).nodes[2]
    assert linear.workspace[0][0] == 900 * 3 * 4, "the weight's gradient does not grow"
    assert most(linear.workspace, 10) < 900 * 3 * 4 + 10 * (900 + 3) * 4 + 1000


def test_a_loss_that_is_not_known_counts_like_most() -> None:
    tokens = torch.randint(0, VOCABULARY, (32, TOKENS))
    made = capture(Words(tied=False), (tokens, tokens), (0, 1), words_loss)
    found = estimate_graph(made, 4, Rates(1e10, 1e10)).graph
    logits = 32 * TOKENS * VOCABULARY * 4
    assert logits <= most(found.nodes[-1].workspace, 32) <= 4 * logits
