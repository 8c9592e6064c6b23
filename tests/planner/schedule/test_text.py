"""CSV in torch's form, out and in again; refusals name the line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op, Schedule, Wiring, parse_action
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import one_f_one_b
from raypipe.planner.schedule.text import from_csv, to_csv
from tests.planner.specs import spec_for


def test_one_line_per_worker():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@given(
    st.sampled_from(["gpipe", "1f1b", "kfkb", "slack", "interleaved"]), st.integers(1, 3), st.integers(1, 6), st.data()
)
@settings(max_examples=40, deadline=None)
def test_round_trip(kind, workers, microbatches, data):
    stages = workers * (2 if kind == "interleaved" else 1)
    first = data.draw(st.integers(0, stages - 1))
    spec = spec_for(kind, stages, microbatches, group_size=2, slack=2, chunks=2, first_trainable=first)
    schedule = schedule_of(spec, stages)
    assert from_csv(to_csv(schedule), schedule.kind) == schedule
    assert to_csv(lower(schedule)) == to_csv(schedule)


def test_split_backward_and_idle_slots_are_read():
    schedule = from_csv("0F0,,,0I0,0W0\r\n,1F0,1I0,1W0\r\n")
    assert schedule.wiring == Wiring(((0,), (1,)), update_interval=1, split_backward=True)
    assert schedule.body[0] == (Action(0, Op.F, 0), Action(0, Op.I, 0), Action(0, Op.W, 0))


def test_several_updates_per_file():
    schedule = from_csv(to_csv(one_f_one_b(1, 2), repeats=2), update_interval=2)
    assert (schedule.stride, schedule.wiring.update_interval) == (4, 2)
    assert sum(a.op is Op.STEP for a in lower(schedule).body[0]) == 2


def test_idle_worker_keeps_its_line():
    schedule = Schedule("spare", Wiring(((1,),), update_interval=1), ((), one_f_one_b(1, 1).body[0]), stride=1)
    assert from_csv(to_csv(schedule), "spare") == schedule


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0F0,0SEND_F0\n1F0\n", "0SEND_F0 in line 1 is no compute action"),
        ("0F0,0X0\n", "'0X0' is not an action"),
        ("0F0\n0B0\n", "0B0 in line 2: stage 0 is also in line 1"),
        ("0F0\n2F0\n", "Stage 1 of 3 has no action"),
        ("\n\n", "holds no action"),
    ],
)
def test_refusals(text, part):
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert part in str(caught.value)


@given(st.integers(0, 99), st.sampled_from(list(Op)), st.integers(0, 9999))
@settings(max_examples=50, deadline=None)
def test_actions_are_read_as_they_are_written(stage, op, microbatch):
    action = Action(stage, op, microbatch)
    assert parse_action(str(action)) == action
