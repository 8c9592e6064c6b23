"""What a worker keeps of what it sent: since the copy before the newest one, whole steps, within its bound."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine import message_log
from raypipe.engine.message_log import MessageLog
from raypipe.engine.messages.frame import encode
from raypipe.engine.reached import Scalar
from raypipe.ir.action import EVALUATION
from raypipe.ir.schedule import Action, Op
from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order

pytestmark = pytest.mark.engine

FLOATS = 1000
STEP_BYTES = 2 * (4 * FLOATS + len(encode(Action(0, Op.SEND_F, 0), [], generation=0, max_tensors=1).header))


def order(step: int) -> Order:
    return Order(Segment(step, 2 * step, 0, 4 * step, (2, 2)), keep_spans=True, save_to="there", keep_copy=True, memo=3)


def send(log: MessageLog, step: int, op: Op = Op.SEND_F) -> None:
    keep = log.writer(1)
    for microbatch in (2 * step, 2 * step + 1):
        action = Action(0, op, microbatch)
        keep(action, encode(action, [torch.full((FLOATS,), float(microbatch))], generation=0, max_tensors=1))


def do(log: MessageLog, *steps: int) -> None:
    for step in steps:
        log.begin(order(step))
        send(log, step)
        log.made(step, (torch.tensor(float(step)), torch.tensor(0.5)))


def started() -> MessageLog:
    log = MessageLog()
    log.copied(0, 0)
    return log


def test_nothing_is_kept_before_there_is_a_copy() -> None:
    log = MessageLog()
    do(log, 0)
    assert (log.keeps, log.size_bytes, log.steps) == (False, 0, range(0))
    log.copied(1, 0)
    do(log, 1, 2)
    assert (log.keeps, log.size_bytes, log.steps) == (True, 2 * STEP_BYTES, range(1, 3))


def test_steps_are_kept_since_the_copy_before_the_newest_one() -> None:
    log = started()
    do(log, 0, 1, 2)
    log.copied(3, 0)
    do(log, 3, 4)
    assert log.steps == range(5), "the copy of step 3 may not have arrived"
    log.copied(5, 0)
    assert log.steps == range(3, 5)
    assert (log.size_bytes, log.bytes_to(1), log.bytes_to(2), log.peers) == (
        2 * STEP_BYTES, 2 * STEP_BYTES, 0, frozenset({1}),
    )  # fmt: skip


def test_what_is_told_of_a_step_is_what_is_needed_to_do_it_again() -> None:
    log = started()
    do(log, 0, 1)
    (logged,) = log.logged(range(1, 2))
    assert logged.order == Order(order(1).segment)
    assert logged.totals == (Scalar(1.0, "float32"), Scalar(0.5, "float32"))
    assert list(log.messages(1, 1)) == [Action(0, Op.SEND_F, 2), Action(0, Op.SEND_F, 3)]
    assert log.messages(1, 7) == log.messages(2, 1) == {}


def test_a_message_is_a_copy_and_norms_and_evaluations_are_none() -> None:
    log = started()
    log.begin(order(0))
    x = torch.zeros(FLOATS)
    action = Action(0, Op.SEND_B, 1)
    log.writer(1)(action, encode(action, [x], generation=0, max_tensors=1))
    x.fill_(7.0)
    for other in (Action(0, Op.REDUCE_NORM, 1), Action(0, Op.SEND_F, EVALUATION), Action(0, Op.SEND_F, 2)):
        log.writer(1)(other, encode(other, [x], generation=0, max_tensors=1))
    ((found, sent),) = log.messages(1, 0).items()
    assert found == action
    assert not sent.payload.any()


def test_a_step_that_is_begun_anew_replaces_what_was_kept_of_it() -> None:
    log = started()
    do(log, 0, 1)
    log.begin(order(2))
    send(log, 2)
    assert log.steps == range(2), "it has not been made"
    stale = log.writer(1)
    log.reopen()
    log.begin(order(2))
    action = Action(0, Op.SEND_F, 4)
    stale(action, encode(action, [torch.ones(1)], generation=0, max_tensors=1))
    assert log.messages(1, 2) == {}, "it was sent by a link that is no more"
    assert log.size_bytes == 2 * STEP_BYTES
    send(log, 2)
    assert log.size_bytes == 3 * STEP_BYTES


def test_the_oldest_steps_go_first_and_one_without_room_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_log, "LEAST_BYTES", 2 * STEP_BYTES)
    log = started()
    do(log, 0, 1, 2)
    assert (log.steps, log.size_bytes) == (range(1, 3), 2 * STEP_BYTES)
    log.copied(3, 3 * STEP_BYTES)  # as much as a copy of the state
    do(log, 3)
    assert log.steps == range(1, 4)
    monkeypatch.setattr(message_log, "LEAST_BYTES", STEP_BYTES // 2)
    log.copied(4, 0)
    assert (log.steps, log.size_bytes) == (range(0), 0)
    do(log, 4, 5)
    assert (log.steps, log.size_bytes) == (range(0), 0)


def test_going_back_and_other_stages() -> None:
    log = started()
    do(log, 0, 1, 2, 3)
    log.forget_after(2)
    assert log.steps == range(2)
    do(log, 2)
    assert log.steps == range(3)
    log.clear()
    assert (log.keeps, log.size_bytes) == (False, 0)


def test_steps_that_are_taken_from_elsewhere_leave_no_gap() -> None:
    log = started()
    do(log, 0, 1)
    do(log, 4)
    assert log.steps == range(4, 5)


def test_stages_that_take_their_norms_alone_keep_nothing() -> None:
    log = started()
    do(log, 0)
    log.begin(order(1))
    log.made(1, (torch.tensor(1.0), None))
    assert (log.steps, log.size_bytes) == (range(0), 0)
