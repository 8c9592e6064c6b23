"""In-memory copies: which worker holds whose, and how often they are taken."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planner.copy_interval import (
    MOST_STEPS,
    OVERHEAD,
    SENDING_SHARE,
    CopyCosts,
    copy_interval,
    holders,
    pieces_sent,
)

COSTS = CopyCosts(step_s=0.5, cost_s=0.05)


@pytest.mark.parametrize(
    ("nodes", "homes", "found"),
    [
        ("", (), ()),
        ("a", (), (None,)),
        ("aa", (), (1, 0)),
        ("aab", (), (2, 2, 0)),
        ("aabb", (), (2, 3, 0, 1)),
        ("abc", (), (1, 2, 0)),
        ("aaab", (), (3, 3, 3, 0)),
        ("aaa", ((0, 1), (2,)), (None, None, 0)),  # replicas have each other's state
        ("aab", ((0, 1), (2,)), (2, None, 0)),  # those of stage 0 would go with node a
        ("aba", ((0, 1), (2,)), (None, None, 1)),
        ("aabb", ((0, 2), (1, 3)), (None, None, None, None)),
    ],
)
def test_who_holds(nodes: str, homes: tuple[tuple[int, ...], ...], found: tuple[int | None, ...]) -> None:
    assert holders(nodes, homes) == found


@pytest.mark.parametrize(
    ("nodes", "homes", "found", "sent"),
    [
        ("aaa", ((0, 1), (2,)), (2, 2, 0), ["00 01", "02", "10"]),  # not to the other replica
        ("aba", ((0, 1), (2,)), (1, 2, 1), ["01", "02", "10"]),  # rather to another node, where it is one
        ("aa", ((0, 1),), (1, 0), ["01", "02"]),  # there is nobody else, and what both have stays
        ("abc", ((0, 1, 2),), (1, 2, 0), ["01", "02", "03"]),
        ("a", ((0,),), (None,), [""]),
        ("aabb", ((0, 2), (1, 3)), (3, 2, 1, 0), ["00 01", "10 11", "02", "12"]),
        ("aaaa", ((0, 2), (1, 3), (1, 3), (0, 2)), (1, 2, 3, 0), ["00 01 30 31", "10 11 20 21", "02 32", "12 22"]),
    ],
)
def test_replicas_that_share_out_their_state_send_what_nobody_else_has(
    nodes: str, homes: tuple[tuple[int, ...], ...], found: tuple[int | None, ...], sent: list[str]
) -> None:
    """Pieces as "stage piece"."""
    held_by = holders(nodes, homes, shared_out=True)
    assert held_by == found
    told = pieces_sent(homes, held_by, shared_out=True)
    assert [" ".join(f"{stage}{piece}" for stage, piece in of_one) for of_one in told] == sent


def test_who_shares_nothing_out_sends_whole_copies() -> None:
    homes = ((0, 1), (2,), (3,))
    held_by = holders("aabb", homes)
    assert held_by == (2, None, 0, 1)
    assert pieces_sent(homes, held_by, shared_out=False) == [[(0, 0)], [], [(1, 0)], [(2, 0)]]
    apart = holders("ab", ((0,), (1,)), shared_out=True)
    assert apart == (1, 0), "no stage has replicas"
    assert pieces_sent(((0,), (1,)), apart, shared_out=True) == [[(0, 0)], [(1, 0)]]


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12))
def test_on_another_node_where_there_is_one_and_spread(nodes: list[str]) -> None:
    found = holders(nodes)
    for worker, holder in enumerate(found):
        assert holder is not None
        assert holder != worker
        assert nodes[holder] != nodes[worker] or len(set(nodes)) == 1
    if len(set(nodes)) == len(nodes) or len(set(nodes)) == 1:
        assert set(Counter(found).values()) == {1}


def test_the_interval_insures_against_failures_and_keeps_the_overhead() -> None:
    """50 ms a copy, sixty failures an hour: Young's interval is 2.4 s; with ten thousand, 3 % of 1.7 s are 50 ms."""
    assert copy_interval(COSTS) == 5
    assert copy_interval(COSTS, failures_per_hour=6.0) == 16
    assert copy_interval(COSTS, failures_per_hour=1e4) == 4
    assert copy_interval(COSTS._replace(cost_s=0.25)) == 17
    assert copy_interval(COSTS._replace(cost_s=6.05)) == 404  # 3 % of 202 s
    assert copy_interval(COSTS._replace(sent_s=60.0)) == 240  # half of the time
    assert copy_interval(COSTS._replace(step_s=1000.0)) == 1
    assert copy_interval(COSTS._replace(step_s=1e-6)) == MOST_STEPS


@given(st.floats(0.01, 100.0), st.floats(0.0, 10.0), st.floats(0.0, 1000.0))
def test_overhead_and_share_hold_wherever_the_interval_is_not_cut(step_s: float, cost_s: float, sent_s: float) -> None:
    interval = copy_interval(CopyCosts(step_s, cost_s, sent_s))
    if interval < MOST_STEPS:
        assert cost_s <= OVERHEAD * interval * step_s * (1 + 1e-9)
        assert sent_s <= SENDING_SHARE * interval * step_s * (1 + 1e-9)
