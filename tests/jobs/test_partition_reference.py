"""The benchmark's own optimum, against every assignment of small graphs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jobs.bench.partition.reference import closed_sets, least_bottleneck

PAIRS = list(itertools.combinations(range(5), 2))


@given(
    times=st.lists(st.integers(0, 20), min_size=5, max_size=5),
    pairs=st.sets(st.sampled_from(PAIRS)),
    together=st.sets(st.sampled_from(PAIRS), max_size=2),
    num_stages=st.integers(1, 4),
)
def test_it_is_the_best_of_all_assignments(
    times: list[int], pairs: set[tuple[int, int]], together: set[tuple[int, int]], num_stages: int
) -> None:
    loads = (
        [sum(t for t, s in zip(times, stages, strict=True) if s == stage) for stage in range(num_stages)]
        for stages in itertools.product(range(num_stages), repeat=5)
        if all(stages[a] <= stages[b] for a, b in pairs) and all(stages[a] == stages[b] for a, b in together)
    )
    assert least_bottleneck(times, pairs, num_stages, together) == min(map(max, loads))


def test_a_stage_that_must_not_end_keeps_every_number_of_stages() -> None:
    """8 and 1 begin as one stage or as two; only the second leaves room for the 5 that belongs to the 1."""
    chain = [(0, 1), (1, 2)]
    assert least_bottleneck([8, 1, 5], chain, 2, [(1, 2)]) == 8
    assert least_bottleneck([8, 1, 5], chain, 2) == 8
    assert least_bottleneck([8, 1, 5], chain, 2, [(0, 1)]) == 9
    assert least_bottleneck([8, 1, 5], chain, 3, [(0, 1), (1, 2)]) == 14


def test_closed_sets_of_a_chain_and_of_free_nodes() -> None:
    chain = closed_sets(4, [(0, 1), (1, 2), (2, 3)])
    free = closed_sets(4, [])
    assert chain is not None
    assert free is not None
    assert [len(level) for level in chain] == [1, 1, 1, 1, 1]
    assert [len(level) for level in free] == [1, 4, 6, 4, 1]
    assert closed_sets(4, [], most=10) is None
