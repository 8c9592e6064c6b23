"""The search finds the least number that has an answer, however much or little it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.planner.partition.costs import least_feasible
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import _bounds, _following, _kept_ps, _probe, _problem, prefix_sum
from tests.planner.partition_cases import clusters, graphs, limits


@given(st.integers(-50, 5_000), st.integers(0, 5_000), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_the_least_is_found(lowest: int, more: int, leap: int, slack: int, told: bool) -> None:
    """With hints of any quality: ``leap`` short of the truth on one side, ``slack`` over it on the other."""
    highest = lowest + more
    threshold = lowest + (more * 2) // 3
    asked: list[int] = []

    def probe(number: int) -> int | None:
        asked.append(number)
        return number if number >= threshold else None

    hints = {
        "following": lambda number: max(number + 1, threshold - leap),
        "enough": lambda number: min(number, threshold + slack),
    }
    assert least_feasible(probe, lowest, highest, **(hints if told else {})) == (threshold, threshold)
    assert all(lowest <= number <= highest for number in asked)
    assert least_feasible(lambda number: None, lowest, highest, **(hints if told else {})) is None


@pytest.mark.slow
@given(graphs(chain=True), clusters(), limits())
def test_hints_change_no_answer(graph, cluster, bounds: Limits) -> None:
    """A period that the hint skips has no cut, and one that it promises has one."""
    try:
        problem = _problem(graph, cluster, bounds)
        found = prefix_sum(graph, cluster, bounds)
    except PlanError:  # refusals are tested elsewhere
        return
    lowest, highest = _bounds(problem)
    plain = least_feasible(lambda period_ps: _probe(problem, period_ps), lowest, highest)
    assert plain is not None
    period_ps, cuts = plain
    told = least_feasible(
        lambda ps: _probe(problem, ps),
        lowest,
        highest,
        following=lambda ps: _following(problem, ps),
        enough=lambda answer: _kept_ps(problem, answer),
    )
    assert told == plain
    assert _probe(problem, _kept_ps(problem, cuts)) is not None
    for ps in (lowest, (lowest + period_ps) // 2, period_ps - 1):
        if ps < period_ps:
            following = _following(problem, ps)
            assert ps < following <= period_ps
    assert found.num_stages == len(cuts)
