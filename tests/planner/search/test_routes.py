"""Links of stages with replicas: every message crosses the link between those who run its micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search.routes import routes_of


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 13))
def test_routes_are_those_of_the_schedule(counts, more_lanes, num_microbatches):
    spec = ScheduleSpec("1f1b", num_microbatches, replicas=tuple(counts), lanes=max(counts) + more_lanes)
    wiring, routes = schedule_of(spec, len(counts)).wiring, routes_of(spec, len(counts))
    assert routes.homes == wiring.homes
    assert [w for w, stage in enumerate(routes.stages) if stage == 0] == list(wiring.homes[0])
    seen = [0] * len(routes.ends)
    for hop in range(len(counts) - 1):
        for microbatch in range(num_microbatches):
            link, before = routes.place_of(hop, microbatch)
            ends = hop, wiring.worker_of(hop, microbatch), wiring.worker_of(hop + 1, microbatch)
            assert routes.ends[link] == ends
            assert before == seen[link], "messages of a link are numbered in their order"
            seen[link] += 1
    assert tuple(seen) == routes.messages(num_microbatches)
    for worker, stage in enumerate(routes.stages):
        own = [m for m in range(num_microbatches) if wiring.worker_of(stage, m) == worker]
        assert list(routes.microbatches_of(worker, num_microbatches)) == own


def test_a_link_is_named_by_its_workers_where_there_are_others():
    routes = routes_of(ScheduleSpec("1f1b", 4, replicas=(2, 1, 1), lanes=2), 3)
    assert [routes.name(link) for link in range(3)] == [
        "link 0 - 1 (workers 0 - 2)", "link 0 - 1 (workers 1 - 2)", "link 1 - 2",
    ]  # fmt: skip
    assert [routes.links_of(0), routes.links_of(1)] == [[0, 1], [2]]
