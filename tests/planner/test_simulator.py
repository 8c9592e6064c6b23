"""The simulator against cases drawn by hand, and against a plain simulation, to the bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.schedule import COMPUTE, Op, Schedule, Wiring, parse_action, single_homes
from raypipe.planner import compiled_rows
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import gpipe, interleaved, one_f_one_b
from raypipe.planner.simulator import Costs, makespan_s, simulate
from tests.planner.plain import any_order, lowered_rows, simulated_times
from tests.planner.specs import spec_for


def times(timeline):
    return {str(span.action): (span.start_s, span.end_s) for span in timeline.spans}


def test_two_stages_by_hand():
    """F 1 s, B 2 s, link busy 0.5 s, then 0.25 s on the way, step 4 s."""
    found = times(simulate(lower(gpipe(2, 2)), Costs.uniform(2, 1.0, 2.0, 0.25, 0.5, 4.0)))
    assert found == {
        "0F0": (0.0, 1.0),
        "0SEND_F0": (1.0, 1.75),
        "0F1": (1.0, 2.0),
        "0SEND_F1": (2.0, 2.75),
        "1RECV_F0": (0.0, 1.75),
        "1F0": (1.75, 2.75),
        "1F1": (2.75, 3.75),
        "1B0": (3.75, 5.75),
        "1SEND_B0": (5.75, 6.5),
        "1B1": (5.75, 7.75),
        "1SEND_B1": (7.75, 8.5),
        "0RECV_B0": (2.0, 6.5),
        "0B0": (6.5, 8.5),
        "0B1": (8.5, 10.5),
        "1REDUCE_NORM1": (7.75, 10.5),
        "0STEP1": (10.5, 14.5),
        "1STEP1": (10.5, 14.5),
    }


def test_stages_of_a_worker_share_its_links_and_nothing_overtakes():
    """Worker 0 sends over hop 0 (slow) and, for the backward of stage 2, over hop 1 (quick) to worker 1."""
    costs = Costs(
        (1.0,) * 4, (1.0,) * 4, forward_latency_s=(9.0, 0.0, 0.0), backward_occupancy_s=(0.0, 2.0, 0.0)
    )  # fmt: skip
    spans = simulate(lower(interleaved(2, 4, 2)), costs).spans
    sent = sorted(
        (s for s in spans if s.worker == 0 and s.action.op in (Op.SEND_F, Op.SEND_B)), key=lambda s: s.start_s
    )
    arrivals = [span.end_s for span in sent]
    assert {span.action.op for span in sent} == {Op.SEND_F, Op.SEND_B}
    assert arrivals == sorted(arrivals)
    assert any(span.end_s - span.start_s > 2.0 for span in sent if span.action.op is Op.SEND_B)


def test_repeats_run_back_to_back():
    lowered, costs = lower(one_f_one_b(3, 4)), Costs.uniform(3, step_s=0.5)
    once = makespan_s(lowered, costs)
    assert makespan_s(lowered, costs, repeats=4) == 4 * once
    assert simulate(lowered, costs, repeats=2).peak_in_flight == (3, 2, 1)


@pytest.mark.parametrize(
    ("costs", "part"),
    [
        ({"forward_s": (1.0,), "backward_s": (1.0, 1.0)}, "backward_s has 2 numbers: give 1, one per stage"),
        ({"forward_s": (1.0,) * 2, "backward_s": (1.0,) * 2, "forward_latency_s": (1.0,) * 2}, "give 1, one per hop"),
        ({"forward_s": (-1.0,), "backward_s": (1.0,)}, "numbers from 0 up"),
        ({"forward_s": (float("nan"),), "backward_s": (1.0,)}, "numbers from 0 up"),
    ],
)
def test_costs_are_checked(costs, part):
    with pytest.raises(PlanError) as caught:
        Costs(**costs)
    assert part in str(caught.value)


def test_costs_must_fit_the_schedule():
    with pytest.raises(PlanError, match="Costs of 3 stages for a schedule of 2"):
        simulate(lower(one_f_one_b(2, 1)), Costs.uniform(3))


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
def named_schedules(draw: st.DrawFn, *, replicated: bool = False) -> Schedule:
    kind = draw(st.sampled_from(KINDS))
    stages = draw(st.integers(1, 4)) * (2 if kind == "interleaved" else 1)
    frozen = draw(st.integers(0, stages - 1))
    numbers = {"group_size": 2, "slack": 3, "chunks": 2, "first_trainable": frozen}
    counts = st.lists(st.integers(1, 3), min_size=stages, max_size=stages).map(tuple)
    replicas = draw(counts) if replicated and kind != "interleaved" else ()
    numbers |= {"replicas": replicas, "lanes": max(replicas, default=1)}
    return schedule_of(spec_for(kind, stages, draw(st.integers(1, 9)), **numbers), stages)


def costs_of(stages: int, random: Random) -> Costs:
    """Numbers with many digits, some of them 0."""

    def some(count: int) -> tuple[float, ...]:
        return tuple(random.choice((0.0, random.random(), 3 * random.random())) for _ in range(count))

    half_duplex = tuple(random.random() < 0.5 for _ in range(stages - 1)) if random.random() < 0.5 else ()
    seconds = (*(some(stages) for _ in range(4)), *(some(stages - 1) for _ in range(4)), some(stages), some(stages))
    return Costs(*seconds, half_duplex)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [1, 1_000], ids=["waves", "loop"])
@given(
    st.one_of(schedules(), named_schedules(), named_schedules(replicated=True)),
    st.integers(1, 3),
    st.integers(0, 1_000),
)
def test_times_are_those_of_the_plain_simulation_to_the_bit(
    wide: int, schedule: Schedule, repeats: int, seed: int
) -> None:
    lowered, costs = lower(schedule), costs_of(schedule.num_stages, Random(seed))
    if lowered.wiring.lanes > lowered.wiring.update_interval:  # such a body is one update, which does not repeat
        repeats = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_rows, "WIDE", wide)
        try:
            times = simulated_times(lowered.rows(repeats), lowered.wiring, costs)
        except RuntimeError:
            with pytest.raises(ScheduleError, match="Deadlock"):
                simulate(lowered, costs, repeats)
            return
        spans = simulate(lowered, costs, repeats).spans
        assert {(span.worker, span.action): (span.start_s, span.end_s) for span in spans} == {
            key: (start_s, end_s) for key, (start_s, end_s) in times.items() if key[1].op in COMPUTE or end_s > start_s
        }
        assert makespan_s(lowered, costs, repeats) == max(end_s for _, end_s in times.values())


def test_a_deadlock_of_many_workers_is_named() -> None:
    """The last update of the first stage comes before what it waits for."""
    schedule = lower(one_f_one_b(compiled_rows.WIDE, 2))
    first = list(schedule.body[0])
    place = first.index(parse_action("0RECV_B0"))
    row = (first[place], *first[:place], *first[place + 1 :])
    with pytest.raises(ScheduleError, match=f"Deadlock, {compiled_rows.WIDE} workers"):
        makespan_s(replace(schedule, body=(row, *schedule.body[1:])), Costs.uniform(compiled_rows.WIDE))


@given(st.one_of(schedules(), named_schedules()))
def test_lowering_gives_the_rows_of_the_plain_one(schedule: Schedule) -> None:
    assert [tuple(row) for row in lower(schedule).body] == lowered_rows(schedule)
