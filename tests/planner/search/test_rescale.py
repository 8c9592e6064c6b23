"""A profile at other sizes: the whole follows the curve, and every node its own line."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.ir.profile import Profile
from raypipe.planner.search import Request, decide
from raypipe.planner.search.problem import graph_at, seconds_at, seconds_by_count
from tests.planner.partition_cases import chain_of

LARGE = 8


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Nodes with lines of their own: t(b) = fixed + each b, the whole being their sum."""
    lines = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6))
    graph = chain_of([fixed + LARGE * each for fixed, each in lines])
    tick_s = graph.busy_s / sum(fixed + LARGE * each for fixed, each in lines)

    def whole_s(samples: int) -> float:
        return tick_s * sum(fixed + samples * each for fixed, each in lines)

    small = draw(st.none() | st.integers(1, 4))
    by_node = None if small is None else (small, tuple(tick_s * (fixed + small * each) for fixed, each in lines))
    return Profile(graph, LARGE, tuple((b, whole_s(b)) for b in (1, 2, 4, LARGE)), small=by_node)


@given(profiles(), st.integers(1, 64))
def test_nodes_add_up_to_the_whole(profile: Profile, samples: int) -> None:
    total_s = seconds_at(profile, samples)
    found = graph_at(profile, samples)
    assert found.busy_s == pytest.approx(total_s)
    assert [n.name for n in found.nodes] == [n.name for n in profile.graph.nodes]
    for before, after in zip(profile.graph.nodes, found.nodes, strict=True):
        assert after.busy_s * before.forward_s == pytest.approx(before.busy_s * after.forward_s)


@pytest.mark.slow
@given(profiles(), st.integers(1, 64))
def test_every_node_follows_its_line(profile: Profile, samples: int) -> None:
    if profile.small is None:
        return
    size, seconds = profile.small
    found = graph_at(profile, samples)
    for small_s, node, after in zip(seconds, profile.graph.nodes, found.nodes, strict=True):
        each_s = (node.busy_s - small_s) / (LARGE - size)
        assert after.busy_s == pytest.approx(small_s + each_s * (samples - size))


@given(profiles(), st.integers(1, 48), st.integers(1, 60), st.integers(1, 4))
def test_micro_batches_that_cut_evenly_have_seconds(profile: Profile, samples: int, count: int, least: int) -> None:
    found = dict(seconds_by_count(profile, samples, count, lambda size: size >= least))
    assert set(found) - {count} == {m for m in range(1, samples + 1) if samples % m == 0 and samples // m >= least} - {
        count
    }
    for m, seconds in found.items():
        assert seconds == pytest.approx(seconds_at(profile, math.ceil(samples / m)))
    assert seconds_by_count(dataclasses.replace(profile, seconds_by_size=()), samples, count) == ()


@given(profiles())
def test_its_own_size_is_untouched(profile: Profile) -> None:
    assert graph_at(profile, LARGE) is profile.graph


def test_a_line_that_falls_below_nothing_is_not_followed() -> None:
    """Measured at 4 as slower than at 8: noise, and at 64 nobody takes less than nothing."""
    graph = chain_of([10, 10])
    profile = Profile(graph, 8, ((4, graph.busy_s / 2), (8, graph.busy_s)), small=(4, (graph.nodes[0].busy_s * 2, 0.0)))
    found = graph_at(profile, 64)
    assert all(node.busy_s > 0 for node in found.nodes)


def test_the_cut_follows_what_the_nodes_take_at_the_size_that_is_run() -> None:
    """At 8 samples all nodes take as long; at 1 the last still does, for its parameters count, the others an eighth."""
    graph = chain_of([8] * 8)
    each_s = graph.nodes[0].busy_s
    small = (1, (*(each_s / 8,) * 7, each_s))
    profile = Profile(graph, 8, ((1, sum(small[1])), (8, graph.busy_s)), small=small)
    request = Request(2, 2, (), 8, 8, num_samples=100, schedule="1f1b")
    assert decide(request, profile).partition.cuts == (7,)
    assert decide(dataclasses.replace(request, num_microbatches=1), profile).partition.cuts == (4,)
    assert decide(request, dataclasses.replace(profile, small=None)).partition.cuts == (4,)
