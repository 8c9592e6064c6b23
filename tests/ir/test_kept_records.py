"""Records in columns are the same records, and the newest stay at their places in the whole list."""

from __future__ import annotations

import math
import pickle
import sys
import tracemalloc
from dataclasses import fields, replace

import pytest

from raypipe.ir.report import KeptRecords, StepRecord

pytestmark = pytest.mark.core


def record(step: int, **more: object) -> StepRecord:
    made = StepRecord(
        step, 8, step / 3, 0.1 * step, 0.25, 0.1, 1e6 + step, 2, "1f1b", lr=1e-3, tokens=step * 7, goodput=step / 7
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_every_field_comes_back_as_it_was() -> None:
    unusual = [
        record(0, skipped=True, loss=math.inf, grad_norm=-0.0, seconds=5e-324),
        record(1 << 40, schedule="", evaluation=(("eval_loss", 0.5), ("eval_accuracy", 1.0))),
        record(2, loss=math.nan, samples=-1),
    ]
    kept = KeptRecords(unusual)
    assert list(map(repr, kept)) == list(map(repr, unusual))
    for made, was in zip(kept, unusual, strict=True):
        for field in fields(StepRecord):
            assert type(getattr(made, field.name)) is type(getattr(was, field.name)), field.name


def test_the_newest_stay_at_their_places() -> None:
    kept = KeptRecords(most=3)
    assert (kept.first, kept.end, kept.since(0), list(kept)) == (0, 0, [], [])
    kept.extend(record(step) for step in range(2))
    assert (kept.first, kept.end, kept.since(1)) == (0, 2, [record(1)])
    for step in range(2, 5):
        kept.append(record(step))
    assert (kept.first, kept.end, len(kept)) == (2, 5, 3)
    assert kept.since(0) == [record(2), record(3), record(4)]
    assert kept.since(3) == [record(3), record(4)]
    assert kept.since(5) == kept.since(9) == []
    assert (kept[0], kept[-1]) == (record(2), record(4))
    with pytest.raises(IndexError):
        kept[3]


@pytest.mark.parametrize("most", [1, 8, 100, 1000])
def test_no_more_than_an_eighth_more_is_kept(most: int) -> None:
    kept, least = KeptRecords(most=most), sys.maxsize
    for step in range(3 * most):
        kept.append(record(step))
        assert len(kept) <= most + most // 8
        assert [kept[0].step, kept[-1].step, kept.end] == [step + 1 - len(kept), step, step + 1]
        least = min(least, len(kept)) if step >= most else least
    assert least >= most


def test_what_is_taken_back_is_none_of_the_list() -> None:
    kept = KeptRecords(record(step) for step in range(6))
    assert kept.pop() == record(5)
    kept.forget(2)
    assert (kept.first, kept.end, list(kept)) == (2, 5, [record(step) for step in (2, 3, 4)])
    part = kept[1:]
    kept.append(record(9))
    kept.forget(99)
    assert (len(kept), kept.end) == (0, 6)
    assert list(part) == [record(3), record(4)], "a slice is a list of its own"
    assert not kept
    with pytest.raises(IndexError):
        kept.pop()


def test_a_record_takes_a_third_of_the_memory_of_an_object() -> None:
    """Of records that came from another process, as the records of a handle do."""
    count = 2000
    told = [pickle.dumps(record(step)) for step in range(count)]

    def size_of(keep: type) -> int:
        tracemalloc.start()
        kept = keep(map(pickle.loads, told))
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(kept) == count
        return size

    assert size_of(KeptRecords) < size_of(list) / 3
