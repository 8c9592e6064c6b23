"""Packed spans are the tuple of their spans."""

from __future__ import annotations

import pickle

from raypipe.ir.spans import PackedSpans
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import gpipe
from raypipe.planner.simulate.serial import Costs, simulate


def test_packed_spans_are_the_tuple_of_their_spans() -> None:
    spans = simulate(lower(gpipe(2, 2)), Costs.uniform(2)).spans
    assert isinstance(spans, PackedSpans)
    plain = tuple(spans)
    assert spans == plain
    assert plain == spans
    assert hash(spans) == hash(plain)
    assert (spans[0], spans[1:3]) == (plain[0], plain[1:3])
    assert spans != plain[1:]
    assert pickle.loads(pickle.dumps(spans)) == plain
    assert repr(spans) == f"<{len(plain)} spans>"
