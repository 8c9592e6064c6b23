"""Weights of micro-batches give the gradient of the mini-batch, and sums over replicas the bits of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from raypipe.engine.stage.losses import LossTerm, evaluation_shares, loss_weights, summed, term_message, update_weights
from raypipe.errors import ConfigError, DataError
from raypipe.planner.segments import Position, next_segment
from tests.exactness import same_bits


@given(
    st.integers(1, 3).flatmap(
        lambda parts: st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=parts, max_size=parts)))
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_sums_over_replicas_have_the_bits_of_one_process(
    rows: list[tuple[int, list[bool]]], first: int, seed: int
) -> None:
    """Give each micro-batch to some replica, and let some of its parts count."""
    generator = torch.Generator().manual_seed(seed)
    terms = [
        (holder, LossTerm(first + row, part, torch.randn((), generator=generator)))
        for row, (holder, counts) in enumerate(rows)
        for part, count in enumerate(counts)
        if count
    ]
    of = [[term for holder, term in terms if holder == at] for at in range(3)]
    total, found = summed([term for _, term in terms]), summed(of[0], [term_message(of[1]), term_message(of[2])])
    assert (total is None) == (found is None) == (not terms)
    if total is not None and found is not None:
        assert same_bits(total, found)


def microbatch_sizes(samples: int, size: int) -> tuple[int, ...]:
    """Cut a mini-batch as a run does."""
    return next_segment(samples, samples, size, Position())[0].microbatch_samples


def test_mean_and_sum() -> None:
    assert loss_weights("mean", (4, 4, 2)) == [0.4, 0.4, 0.2]
    assert loss_weights("sum", (4, 4, 2)) == [1.0, 1.0, 1.0]


def token_targets(samples: int, valid: float) -> torch.Tensor:
    targets = torch.randint(0, 7, (samples, 5))
    return torch.where(torch.rand(samples, 5) < valid, targets, torch.tensor(-100))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.2, 1.0), st.integers(0, 9))
def test_valid_tokens_give_the_gradient_of_the_minibatch(samples: int, size: int, valid: float, seed: int) -> None:
    torch.manual_seed(seed)
    targets = token_targets(samples, valid)
    if not (targets != -100).any():
        targets[0, 0] = 3
    logits = torch.randn(samples, 5, 7, dtype=torch.float64, requires_grad=True)
    sizes = microbatch_sizes(samples, size)
    weights = loss_weights("valid_tokens", sizes, targets)
    whole = torch.autograd.grad(token_loss(logits, targets), logits)[0]
    losses = [
        weight * token_loss(part, target)
        for weight, part, target in zip(weights, logits.split(size), targets.split(size), strict=True)
        if weight
    ]
    torch.testing.assert_close(torch.autograd.grad(sum(losses), logits)[0], whole, rtol=1e-12, atol=1e-15)
    assert sum(weights) == pytest.approx(1.0)


def test_a_function_counts_and_targets_may_come_in_parts() -> None:
    targets = torch.tensor([[1, 0], [1, 1], [0, 0]])
    assert loss_weights(lambda t: t.sum(), (2, 1), targets) == [1.0, 0.0]
    assert loss_weights("valid_tokens", (2, 1), targets.split(2)) == [4 / 6, 2 / 6]
    assert loss_weights(lambda t: len(t["ids"]), (1, 1), [{"ids": [1, 2, 3]}, {"ids": [4]}]) == [0.75, 0.25]


def test_a_minibatch_without_valid_targets_is_refused() -> None:
    with pytest.raises(DataError, match=r"All targets of a mini-batch of 3 samples are -100.*minibatch_size"):
        loss_weights("valid_tokens", (2, 1), torch.full((3, 4), -100))
    with pytest.raises(DataError, match="the data has no target"):
        loss_weights("valid_tokens", (2, 1))


@pytest.mark.parametrize("count", [lambda t: -1, lambda t: float("nan"), lambda t: None, lambda t: t])
def test_a_function_that_does_not_count_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        loss_weights(count, (2,), torch.zeros(2, 2))


def test_updates_of_a_mini_batch_weigh_their_own_items() -> None:
    """Micro-batches of 2, 1, 0 and 1 valid targets, two updates; an update without any weighs nothing."""
    targets = torch.tensor([[1, 1], [1, -100], [-100, -100], [1, -100]])
    weights, shares = update_weights("valid_tokens", (1, 1, 1, 1), targets, 2)
    assert weights == [(2 / 3,), (1 / 3,), (0.0,), (1.0,)]
    assert shares == [(0.5,), (0.25,), (0.0,), (0.25,)]
    empty = torch.cat([targets[:2], targets[2:3], targets[2:3]])
    assert update_weights("valid_tokens", (1, 1, 1, 1), empty, 2)[0] == [(2 / 3,), (1 / 3,), (0.0,), (0.0,)]
    assert update_weights("mean", (2, 1), None, 2) == ([(2 / 3,), (1 / 3,)],) * 2


def test_an_evaluation_counts_items_and_takes_empty_mini_batches() -> None:
    assert evaluation_shares("valid_tokens", (1, 1), torch.tensor([[3, -100], [3, 3]])) == (
        [(1 / 3,), (2 / 3,)],
        (3.0,),
    )
    assert evaluation_shares("valid_tokens", (1, 1), torch.full((2, 2), -100)) == ([(0.0,), (0.0,)], (0.0,))
    assert evaluation_shares("sum", (2, 1), None) == ([(1.0,), (1.0,)], (3.0,))
