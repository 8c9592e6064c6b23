"""The loss of a mini-batch whose terms are spread over replicas: the bits of a sum in the order of micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.losses import LossTerm, summed, told
from tests.exactness import same_bits


@given(
    st.integers(1, 3).flatmap(
        lambda parts: st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=parts, max_size=parts)))
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_of_whoever_holds_which(rows: list[tuple[int, list[bool]]], first: int, seed: int) -> None:
    """Each micro-batch is some replica's, and some of its parts count."""
    generator = torch.Generator().manual_seed(seed)
    terms = [
        (holder, LossTerm(first + row, part, torch.randn((), generator=generator)))
        for row, (holder, counts) in enumerate(rows)
        for part, count in enumerate(counts)
        if count
    ]
    of = [[term for holder, term in terms if holder == at] for at in range(3)]
    total, found = summed([term for _, term in terms]), summed(of[0], [told(of[1]), told(of[2])])
    assert (total is None) == (found is None) == (not terms)
    if total is not None and found is not None:
        assert same_bits(total, found)


@pytest.mark.parametrize("messages", [(), ((None, None),)])
def test_none_of_none(messages: tuple[tuple[None, None], ...]) -> None:
    assert summed((), messages) is None
    assert told(()) == (None, None)
