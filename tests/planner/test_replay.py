"""Replay of schedules on messages: equal to the simulator, and on the routes of the schedule's rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice
from raypipe.planner.replay import Wire, compiled, equal_messages_s, routes_of, step_s
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search.predict import step_of
from raypipe.planner.simulator import Costs, makespan_s
from tests.planner.controller.lab import Pipeline
from tests.planner.specs import spec_for

SECONDS = st.floats(0.0, 5.0, allow_nan=False)


@st.composite
def choices(draw: st.DrawFn, stages: int, first_trainable: int = 0) -> Choice:
    kind = draw(st.sampled_from(["1f1b", "kfkb", "slack", "zb-h1", "gpipe"]))
    count = draw(st.integers(1, 9))
    r = tuple(draw(st.lists(st.integers(1, 4), min_size=stages - 1, max_size=stages - 1)))
    group_size = draw(st.integers(1, count))
    return Choice(spec_for(kind, stages, count, group_size=group_size, slack=r, first_trainable=first_trainable))


@st.composite
def replicas(draw: st.DrawFn, stages: int) -> tuple[tuple[int, ...], int]:
    """Workers by stage, and lanes."""
    if draw(st.booleans()):
        return (), draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    return counts, draw(st.integers(max(counts), 4))


@pytest.mark.slow
@given(st.data())
def test_equal_messages_give_the_simulator_s_time_to_the_bit(data):
    stages = data.draw(st.integers(1, 5))
    choice = data.draw(choices(stages, data.draw(st.integers(0, stages - 1))))
    counts, lanes = data.draw(replicas(stages))
    spec = replace(choice.spec, replicas=counts, lanes=lanes)
    busy = st.lists(SECONDS, min_size=stages, max_size=stages).map(tuple)
    hops = st.lists(SECONDS, min_size=stages - 1, max_size=stages - 1).map(tuple)
    forward_s, input_s, weight_s = data.draw(busy), data.draw(busy), data.draw(busy)
    backward_s = tuple(i + w for i, w in zip(input_s, weight_s, strict=True))
    latency, occupancy = (data.draw(hops), data.draw(hops)), (data.draw(hops), data.draw(hops))
    costs = Costs(
        forward_s, backward_s, input_s, weight_s,
        forward_latency_s=latency[0], backward_latency_s=latency[1],
        forward_occupancy_s=occupancy[0], backward_occupancy_s=occupancy[1],
    )  # fmt: skip
    routes = routes_of(spec, stages)
    wires = [Wire(latency[way][hop], (occupancy[way][hop],)) for hop in routes.hops for way in (0, 1)]
    forward_s, backward_s, parts_s = (
        [by_stage[stage] for stage in routes.stages]
        for by_stage in (forward_s, backward_s, tuple(zip(input_s, weight_s, strict=True)))
    )
    found = step_s(compiled(spec, stages), forward_s, backward_s, wires, split_backward_s=parts_s)
    assert found == makespan_s(lower(schedule_of(spec, stages)), costs)


@pytest.mark.slow
@given(st.data())
def test_messages_with_times_of_their_own_give_what_the_pipeline_takes(data):
    stages = data.draw(st.integers(2, 4))
    choice = data.draw(choices(stages))
    counts, lanes = data.draw(replicas(stages))
    choice = Choice(replace(choice.spec, replicas=counts, lanes=lanes))
    count, steps = choice.num_microbatches, data.draw(st.integers(1, 3))
    draws = {
        (hop, forward): data.draw(st.lists(st.floats(0.0, 3.0), min_size=count * steps, max_size=count * steps))
        for hop in range(stages - 1)
        for forward in (True, False)
    }
    seconds = data.draw(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)), min_size=stages, max_size=stages))
    pipeline = Pipeline(seconds, lambda hop, forward, step, m: (draws[hop, forward][step * count + m], 0.25))
    true_s = sum(pipeline.step(step, choice).seconds for step in range(steps)) / steps
    routes = routes_of(choice.spec, stages)
    wires = [
        Wire(
            0.25,
            tuple(
                draws[hop, forward][step * count + m]
                for step in range(steps)
                for m in range(count)
                if routes.place_of(hop, m)[0] == link
            ),
        )
        for link, hop in enumerate(routes.hops)
        for forward in (True, False)
    ]
    forward_s, backward_s = zip(*(seconds[stage] for stage in routes.stages), strict=True)
    assert step_s(compiled(choice.spec, stages), forward_s, backward_s, wires, replays=steps) == pytest.approx(true_s)


def test_draws_are_taken_in_turn_and_again_from_the_start():
    """Two messages per step, three draws: steps see 1 2, 3 1, 2 3 seconds."""
    program = compiled(ScheduleSpec("gpipe", 2), 2)
    wires = [Wire(0.0, (1.0, 2.0, 3.0)), Wire()]
    once = [step_s(program, (0.0, 0.0), (0.0, 0.0), wires, replays=n) * n for n in (1, 2, 3)]
    assert once == pytest.approx([3.0, 3.0 + 4.0, 3.0 + 4.0 + 5.0])


def test_the_slowest_optimizer_step_comes_last():
    program = compiled(ScheduleSpec("1f1b", 1), 2)
    assert step_s(program, (1.0, 1.0), (2.0, 2.0), [Wire(), Wire()], (0.5, 4.0)) == 10.0


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "kfkb", "slack", "zb-h1"])
def test_a_step_of_equal_messages_is_that_of_the_lowered_schedule_in_the_steady_state_too(kind: str) -> None:
    for seed in range(20):
        drawn = random.Random(seed)
        stages, count = drawn.randint(1, 5), drawn.randint(1, 10)
        spec = ScheduleSpec(
            kind,
            count,
            group_size=min(count, 2) if kind == "kfkb" else 1,
            slack=tuple(drawn.randint(1, 4) for _ in range(stages - 1)) if kind in ("slack", "zb-h1") else (),
            first_trainable=drawn.choice([0, 0, stages - 1]),
            overlap=drawn.random() < 0.5,
            replicas=(counts := drawn.choice([(), tuple(drawn.randint(1, 3) for _ in range(stages))])),
            lanes=max(counts, default=1),
        )
        sizes = (stages,) * 4 + (stages - 1,) * 4
        costs = Costs(*(tuple(drawn.random() for _ in range(size)) for size in sizes))
        expected_s, _ = step_of(lower(schedule_of(spec, stages)), costs)
        assert equal_messages_s(spec, costs) == pytest.approx(expected_s, rel=1e-9), spec


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
