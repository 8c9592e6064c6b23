"""What is done in arrays gives what is done action by action: the same rows, and the same times to the bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Schedule, Wiring, parse_action, single_homes
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.interleaved import interleaved
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import gpipe, k_f_k_b, one_f_one_b, slack
from raypipe.planner.simulate import serial as simulation
from raypipe.planner.simulate import wide as waves
from raypipe.planner.simulate.serial import Costs, makespan_s, simulate
from raypipe.planner.tables import build
from tests.planner.plain import any_order, lowered_rows, row_in_turns
from tests.planner.specs import spec_for

KINDS = ("1f1b", "gpipe", "interleaved", "kfkb", "slack")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Compute actions in any order that works, on any placement; several updates in a row may deadlock."""
    placement = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    used = sorted(set(placement))
    interval, updates = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    wiring = Wiring(
        single_homes(used.index(worker) for worker in placement),
        update_interval=interval,
        split_backward=draw(st.booleans()),
        first_trainable=draw(st.integers(0, len(placement) - 1)),
    )
    random = Random(draw(st.integers(0, 1_000)))
    return any_order(wiring, interval * updates, random.randrange)


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    kind = draw(st.sampled_from(KINDS))
    stages = draw(st.integers(1, 4)) * (2 if kind == "interleaved" else 1)
    frozen = draw(st.integers(0, stages - 1))
    numbers = {"group_size": 2, "slack": 3, "chunks": 2, "first_trainable": frozen}
    return schedule_of(spec_for(kind, stages, draw(st.integers(1, 9)), **numbers), stages)


def costs_of(stages: int, random: Random) -> Costs:
    """Numbers with many digits, some of them 0."""

    def some(count: int) -> tuple[float, ...]:
        return tuple(random.choice((0.0, random.random(), 3 * random.random())) for _ in range(count))

    return Costs(*(some(stages) for _ in range(4)), *(some(stages - 1) for _ in range(4)), some(stages))


@pytest.mark.slow
@given(st.one_of(schedules(), named_schedules()), st.integers(1, 3), st.integers(0, 1_000))
def test_waves_give_the_bits_of_the_loop(schedule: Schedule, repeats: int, seed: int) -> None:
    program = build(lower(schedule), repeats)
    tables = simulation._tables(program, costs_of(schedule.num_stages, Random(seed)))
    times = waves.times_s(program, tables)
    if times is None:
        assert waves.last_end_s(program, tables) is None
        with pytest.raises(ScheduleError, match="Deadlock"):
            simulation._loop(program, tables)
        return
    start_s, end_s = simulation._loop(program, tables)
    assert times[0].tobytes() == start_s.tobytes()
    assert times[1].tobytes() == end_s.tobytes()
    assert waves.last_end_s(program, tables) == end_s.max()


@pytest.mark.slow
@given(st.integers(0, 20))
def test_a_wide_pipeline_goes_in_waves_and_gives_the_same_timeline(seed: int) -> None:
    random = Random(seed)
    stages = simulation.WIDE + random.randrange(4)
    lowered, costs = lower(one_f_one_b(stages, 1 + random.randrange(9))), costs_of(stages, random)
    program = build(lowered)
    start_s, end_s = simulation._loop(program, simulation._tables(program, costs))
    timeline = simulate(lowered, costs)
    assert makespan_s(lowered, costs) == end_s.max()
    times = {program.action(node): (start_s[node], end_s[node]) for node in range(len(program.op))}
    assert len(timeline.spans) > stages
    assert all(times[span.action] == (span.start_s, span.end_s) for span in timeline.spans)


def test_a_deadlock_of_many_workers_is_named() -> None:
    """The last update of the first stage comes before what it waits for."""
    schedule = lower(one_f_one_b(simulation.WIDE, 2))
    first = list(schedule.body[0])
    place = first.index(parse_action("0RECV_B0"))
    row = (first[place], *first[:place], *first[place + 1 :])
    with pytest.raises(ScheduleError, match="Deadlock, 16 workers"):
        makespan_s(replace(schedule, body=(row, *schedule.body[1:])), Costs.uniform(simulation.WIDE))


@given(st.one_of(schedules(), named_schedules()))
def test_lowering_gives_the_rows_of_the_plain_one(schedule: Schedule) -> None:
    assert [tuple(row) for row in lower(schedule).body] == lowered_rows(schedule)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 4))
def test_rows_take_turns(stages: int, microbatches: int, k: int, frozen: int) -> None:
    frozen = min(frozen, stages - 1)
    groups = [range(m, min(m + k, microbatches)) for m in range(0, microbatches, k)]
    single = [range(m, m + 1) for m in range(microbatches)]
    for made, parts, warmups in (
        (k_f_k_b(stages, microbatches, k, frozen), groups, [stages - 1 - s for s in range(stages)]),
        (slack(stages, microbatches, k, frozen), single, [k * (stages - 1 - s) for s in range(stages)]),
        (gpipe(stages, microbatches, frozen), [range(microbatches)], [1] * stages),
    ):
        plain = tuple(row_in_turns(s, parts, warmup, s >= frozen) for s, warmup in enumerate(warmups))
        assert made.body == plain


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3))
def test_interleaved_rows_warm_up_and_then_take_turns(workers: int, microbatches: int, chunks: int) -> None:
    for worker, row in enumerate(interleaved(workers, microbatches, chunks).body):
        count = microbatches * chunks
        rounds = max(1, microbatches // workers)
        warmup = min((chunks - 1) * -(-microbatches // rounds) + 2 * (workers - 1 - worker), count)
        ops = [action.op for action in row_in_turns(0, [[i] for i in range(count)], warmup)]
        assert [action.op for action in row] == ops
        assert len(set(row)) == 2 * count
