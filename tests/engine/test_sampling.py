"""Tokens are drawn from the set that transformers' warpers leave, with frequencies of its probabilities."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.sampling import Sampling

pytestmark = pytest.mark.engine


def logits(rows: int = 4, size: int = 50) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.5}, {"top_p": 1e-9}])
def test_the_scores_are_those_of_transformers(options: dict[str, float]) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(0.7)(None, logits())
    if "top_k" in options:
        scores = TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    assert torch.equal(Sampling(True, 0.7, **options).scores(logits()), scores)  # type: ignore[arg-type]


def test_a_draw_depends_on_seed_sequence_and_number_only() -> None:
    sampling, rows = Sampling(True), logits()
    together = sampling.choose(rows, range(4), 5)
    assert together.tolist() == [int(sampling.choose(rows[at : at + 1], [at], 5)) for at in range(4)]
    drawn = {int(Sampling(True, seed=seed).choose(rows[:1], [row], number))
             for seed in range(3) for row in range(3) for number in range(3)}  # fmt: skip
    assert len(drawn) > 3


def test_frequencies_are_the_probabilities() -> None:
    rows = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]])).expand(4000, 4)
    counts = Sampling(True).choose(rows, range(4000), 0).bincount(minlength=4) / 4000
    assert counts[1] == 0
    assert torch.allclose(counts, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.03)


def test_the_largest_logit_is_taken_without_sampling() -> None:
    assert torch.equal(Sampling().choose(logits(), range(4), 0), logits().argmax(1))
    assert torch.equal(Sampling(True, top_k=1).choose(logits(), range(4), 0), logits().argmax(1))
