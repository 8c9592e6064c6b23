"""Lowering: where messages and updates go, for synchronous and asynchronous schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Op, Schedule, Wiring, parse_action
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.sync import one_f_one_b
from tests.planner.specs import sends_between


def row(text):
    return tuple(parse_action(cell) for cell in text.split())


def text(actions):
    return " ".join(map(str, actions))


def test_two_stages():
    lowered = lower(one_f_one_b(2, 2))
    assert [text(r) for r in lowered.body] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD1 0REDUCE_NORM1 0STEP1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD1 1REDUCE_NORM1 1STEP1",
    ]


def test_update_that_spans_prologue_and_body():
    """The epilogue goes on where the last repetition of the body stopped."""
    schedule = Schedule(
        "spanning",
        Wiring(((0,),), update_interval=2),
        prologue=(row("0F0 0B0"),),
        body=(row("0F1 0B1 0F2 0B2"),),
        stride=2,
        epilogue=(row("0F1 0B1"),),
    )
    lowered = lower(schedule)
    assert text(a for a in lowered.row(0, 2) if a.op not in (Op.REDUCE_GRAD, Op.REDUCE_NORM)) == (
        "0F0 0B0 0F1 0B1 0STEP1 0F2 0B2 0F3 0B3 0STEP3 0F4 0B4 0F5 0B5 0STEP5"
    )
    validate(lowered, repeats=2)


def test_lowering_twice_is_refused():
    with pytest.raises(ScheduleError, match="0SEND_F0 in row 0 is no compute action"):
        lower(lower(one_f_one_b(2, 1)))


def test_body_that_forgets_a_backward_is_refused():
    schedule = Schedule("short", Wiring(((0,),), update_interval=2), (row("0F0 0F1 0B0"),), stride=2)
    with pytest.raises(ScheduleError, match=r"stage 0 has finished 1 of the 2 .* 0STEP1"):
        lower(schedule)


def test_stride_must_fit_the_update_interval():
    schedule = Schedule("odd", Wiring(((0,),), update_interval=2), (row("0F0 0B0 0F1 0B1 0F2 0B2"),), stride=3)
    with pytest.raises(ScheduleError, match="advances by 3 micro-batches, the optimizer steps every 2"):
        lower(schedule)


@pytest.mark.slow
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=30, deadline=None)
def test_every_send_is_received_exactly_once(workers, microbatches, chunks, data):
    stages = workers * chunks
    first = data.draw(st.integers(0, stages - 1))
    lowered = lower(
        schedule_of(ScheduleSpec("interleaved", microbatches, chunks=chunks, first_trainable=first), stages)
    )
    validate(lowered, repeats=2)
    back = {Op.RECV_F: (-1, Op.SEND_F), Op.RECV_B: (1, Op.SEND_B)}
    for receiver in range(workers):
        received = {
            (a.stage + back[a.op][0], back[a.op][1], a.microbatch) for a in lowered.row(receiver) if a.op in back
        }
        expected = [a for sender in range(workers) for a in sends_between(lowered, sender, receiver)]
        assert len(expected) == len(received)
        assert set(expected) == received
