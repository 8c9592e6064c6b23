"""Actions as text, and packed rows, which are the tuple of their actions."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raypipe.ir.schedule import EVALUATION, Action, Op, PackedRow, microbatch_words, parse_action
from raypipe.planner.dependency_tables import encode, pack
from raypipe.planner.schedule.sync import one_f_one_b

pytestmark = pytest.mark.core


def test_micro_batches_of_evaluations_are_counted_from_their_own_begin() -> None:
    trains, evaluates = Action(2, Op.F, 7), Action(1, Op.RECV_F, EVALUATION + 1)
    assert (trains.label, trains.words) == ("2F7", "2F7 (micro-batch 7)")
    assert evaluates.label == "1RECV_F1 of the evaluations"
    assert evaluates.words == "1RECV_F1 (micro-batch 1 of the evaluations)"
    assert microbatch_words(EVALUATION) == "micro-batch 0 of the evaluations"
    assert parse_action(str(evaluates)) == evaluates


def test_a_packed_row_is_the_tuple_of_its_actions() -> None:
    row = tuple(map(parse_action, ["2RECV_F0", "2F0", "2SEND_F0", "2STEP7"]))
    packed = pack(*encode(row))
    assert isinstance(packed, PackedRow)
    assert packed == row
    assert row == packed
    assert hash(packed) == hash(row)
    assert (packed[1], packed[-1], packed[1:3], list(packed)) == (row[1], row[-1], row[1:3], list(row))
    assert packed[0].op is Op.RECV_F
    assert packed == pack(*encode(row))
    assert packed != row[:3]
    assert packed != pack(*encode(row[:3]))
    assert packed != "2F0"
    assert pickle.loads(pickle.dumps(packed)) == row
    assert parse_action("2F0") in packed
    assert repr(packed) == "<4 actions: 2RECV_F0 2F0 2SEND_F0 2STEP7>"
    assert [column.tolist() for column in encode(())] == [[], [], []]


def test_columns_come_back_as_they_went_in() -> None:
    row = one_f_one_b(3, 5).body[1]
    assert pack(*encode(row)) == row
    assert all(np.array_equal(a, b) for a, b in zip(encode(row), encode(tuple(row)), strict=True))
