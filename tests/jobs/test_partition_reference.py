"""The benchmark's own optimum, against every assignment of small graphs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from partition_reference import closed_sets, least_bottleneck

PAIRS = list(itertools.combinations(range(5), 2))


@given(
    times=st.lists(st.integers(1, 20), min_size=5, max_size=5),
    pairs=st.sets(st.sampled_from(PAIRS)),
    num_stages=st.integers(1, 4),
)
def test_it_is_the_best_of_all_assignments(times: list[int], pairs: set[tuple[int, int]], num_stages: int) -> None:
    loads = (
        [sum(t for t, s in zip(times, stages, strict=True) if s == stage) for stage in range(num_stages)]
        for stages in itertools.product(range(num_stages), repeat=5)
        if all(stages[a] <= stages[b] for a, b in pairs)
    )
    assert least_bottleneck(times, pairs, num_stages) == min(map(max, loads))


def test_closed_sets_of_a_chain_and_of_free_nodes() -> None:
    chain = closed_sets(4, [(0, 1), (1, 2), (2, 3)])
    free = closed_sets(4, [])
    assert chain is not None
    assert free is not None
    assert [len(level) for level in chain] == [1, 1, 1, 1, 1]
    assert [len(level) for level in free] == [1, 4, 6, 4, 1]
    assert closed_sets(4, [], most=10) is None
