"""A packed row is the tuple of its actions, and columns come back as they went in."""

from __future__ import annotations

import pickle

import numpy as np

from raypipe.ir.packed import PackedRow
from raypipe.ir.schedule import Op, parse_action
from raypipe.planner.schedule.sync import one_f_one_b
from raypipe.planner.tables import encode, pack


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
