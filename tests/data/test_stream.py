"""A stream by position: any reader gets the same items wherever it stood, from marks as from its begin."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from raypipe.data import stream_source
from raypipe.data.open_data import open_data
from raypipe.data.stream import MOST_MARKS, Mark, StreamReader
from raypipe.data.stream_source import ENDLESS, Stream, StreamSource
from raypipe.engine.io.checkpoint.snapshot import read_mark, write_mark
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError, DataError

pytestmark = pytest.mark.engine

LENGTH = 7


class Numbers(IterableDataset[Any]):
    """Items that say pass, place, and what they drew."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.epoch, self.pulled = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first(), self.length):
            self.pulled += 1
            yield {"x": torch.tensor([self.epoch, number]), "drawn": torch.rand(1), "y": random.random()}

    def first(self) -> int:
        return 0


class Resumable(Numbers):
    """As datasets of Hugging Face do."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.at = 0

    def first(self) -> int:
        return self.at

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.at += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": {"epoch": self.epoch}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ForgetsItsBuffer(Resumable):
    """As a buffer that is shuffled: what it held when the state was taken is left out."""

    def __iter__(self) -> Iterator[Any]:
        items = Resumable.__iter__(self)
        held = [item for item, _ in zip(items, range(2), strict=False)]
        for item in items:
            held.append(item)
            yield held.pop(0)
        yield from held


def key(item: Any) -> tuple[Any, ...]:
    return (*item["x"].tolist(), float(item["drawn"]), item["y"])


def reader(make: type[Numbers], *, saves: bool = False) -> StreamReader:
    return StreamReader(make(), make.__name__, 3, saves=saves)


WHOLE = [key(item) for item in reader(Numbers).read(0, 60)]


def test_passes_follow_each_other_and_draws_belong_to_positions() -> None:
    assert [found[:2] for found in WHOLE[:15]] == [divmod(at, LENGTH) for at in range(15)]
    assert len({found[2:] for found in WHOLE}) == 60


@pytest.mark.parametrize(("make", "saves"), [(Numbers, False), (Resumable, True)])
@settings(max_examples=40, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8))
def test_reads_in_any_order_give_the_same_items(make: type[Numbers], saves: bool, reads: list[tuple[int, int]]) -> None:
    found = reader(make, saves=saves)
    for start, count in reads:
        assert [key(item) for item in found.read(start, count)] == WHOLE[start : start + count]


@pytest.mark.parametrize(("make", "saves", "most"), [(Numbers, False, 10), (Resumable, True, 4)])
def test_a_mark_leads_there_without_the_passes_before(
    make: type[Numbers], saves: bool, most: int, tmp_path: Path
) -> None:
    first = reader(make, saves=saves)
    first.read(0, 20)
    mark = first.mark(20)
    assert mark is not None
    write_mark(Place.of(tmp_path), 1, mark)
    back = read_mark(Place.of(tmp_path))
    assert back == mark
    stream = make()
    if saves:  # a copy is read, whose state the mark has
        assert back.state == {"at": 6, "of": {"epoch": 2}}
    later = StreamReader(stream, "later", 3, saves=saves)
    later.learn(back)
    assert [key(item) for item in later.read(20, 4)] == WHOLE[20:24]
    assert later._live.pulled <= most


def test_marks_are_the_newest_and_one_that_is_damaged_is_none(tmp_path: Path) -> None:
    found = reader(Numbers)
    for at in range(0, 2 * MOST_MARKS, 2):
        found.read(at, 2)
    assert len(found._marks) <= MOST_MARKS
    assert found.mark(2 * MOST_MARKS - 2) is not None
    assert found.mark(1) is None
    place = Place.of(tmp_path)
    assert read_mark(place / "nothing") is None
    write_mark(place / "generation_2", 0, Mark(4, 1, 2, {"a": [1]}))
    assert read_mark(place) == Mark(4, 1, 2, {"a": [1]})
    file = tmp_path / "generation_2" / "stage_0.stream.json"
    file.write_text(file.read_text().replace('"position": 4', '"position": 5'))
    assert read_mark(place) is None


@pytest.mark.parametrize("size", [8, 64, 300])
def test_who_reads_ahead_still_knows_how_to_get_to_where_the_run_stands(size: int) -> None:
    """Workers read three mini-batches ahead of the one that they compute, of any size."""
    found = reader(Resumable, saves=True)
    for at in range(0, 8 * size, size):
        found.read(at, size)
    for at in range(4 * size, 9 * size, size):
        mark = found.mark(at)
        assert mark is not None
        assert (mark.position, mark.state) == (at, {"at": at % LENGTH or LENGTH, "of": {"epoch": (at - 1) // LENGTH}})


def test_a_stage_that_becomes_another_workers_goes_on_where_it_stood() -> None:
    """As where replicas were lost, and the others count anew; the step that was begun is done again."""
    source = StreamSource(Resumable(1000), seed=3)
    before = source.reader(("stage 0", "worker 2"))
    for at in range(0, 640, 64):
        before.read(0, at, 64, ("x",))
    wanted = before.read(0, 512, 64, ("x",))["x"]
    after = source.reader(("stage 0", "worker 1"))
    assert torch.equal(after.read(0, 512, 64, ("x",))["x"], wanted)
    assert after._reader._live.pulled <= 65


@pytest.mark.parametrize(("make", "saves"), [(Numbers, False), (Resumable, True), (ForgetsItsBuffer, False)])
def test_a_state_that_does_not_lead_to_the_same_items_is_not_used(make: type[Numbers], saves: bool) -> None:
    assert StreamSource(make(), seed=3)._saves is saves


def test_a_source_has_columns_epochs_and_travels() -> None:
    endless = open_data(Numbers(), seed=3)
    assert (endless.num_samples, endless.columns) == (ENDLESS, ("x", "drawn", "y"))
    source = pickle.loads(pickle.dumps(open_data(Stream(Numbers(), num_samples=5), seed=3)))
    assert source.num_samples == 5
    read = source.read(2, 3, 2, ("y", "x"))
    assert read["x"].tolist() == [list(found[:2]) for found in WHOLE[13:15]]
    assert read["y"].tolist() == [pytest.approx(found[3]) for found in WHOLE[13:15]]
    assert source.read(0, 5, 0, (0,))[0].shape == (0, 2)
    with pytest.raises(DataError, match=r"Samples 4 to 6 .* an epoch has 5"):
        source.read(0, 4, 2, (0,))


def test_a_stream_that_is_evaluated_has_as_many_items_as_it_is_said_to() -> None:
    """Begun anew it would count some of its items twice."""
    whole = open_data(Stream(Numbers(), num_samples=LENGTH), seed=3, shuffle=False)
    assert whole.read(0, 0, LENGTH, ("x",))["x"][:, 1].tolist() == list(range(LENGTH))
    longer = pickle.loads(pickle.dumps(open_data(Stream(Numbers(), num_samples=LENGTH + 1), seed=3, shuffle=False)))
    with pytest.raises(
        DataError, match=rf"Numbers has {LENGTH} items, .*num_samples={LENGTH + 1}.*Give num_samples={LENGTH}\."
    ):
        longer.read(0, 0, LENGTH + 1, ("x",))


class Rows:
    """Stands for a ray.data.Dataset: those of its methods that raypipe calls."""

    def __init__(self) -> None:
        self.context = type("Context", (), {"execution_options": type("Options", (), {"preserve_order": False})()})()

    def iter_rows(self) -> Iterator[Any]:
        return iter([{"x": np.float32(number), "y": number} for number in range(4)])

    def __len__(self) -> int:
        raise AttributeError("use count()")


def test_rows_of_ray_are_read_in_order() -> None:
    rows = Rows()
    source = open_data(rows, seed=0)
    assert rows.context.execution_options.preserve_order is True  # type: ignore[attr-defined]
    assert source.read(0, 2, 4, ("y",))["y"].tolist() == [2, 3, 0, 1]


class Counted(Rows):
    """Counts the rows that its iterators yield, in all and since they were closed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.read, self.closed = number, 0, threading.Event()

    def iter_rows(self) -> Iterator[Any]:
        self.closed.clear()
        try:
            for number in range(self.number):
                self.read += 1
                yield {"x": np.float32(number)}
        finally:
            self.closed.set()


def test_a_dataset_of_ray_is_read_to_its_end_before_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no task of it is cancelled; a dataset that takes longer is closed in the middle."""
    monkeypatch.setattr(stream_source, "READ_ON_S", 30.0)
    short = Counted(50)
    open_data(short, seed=0)
    assert short.closed.wait(10)
    assert short.read % 50 == 0
    monkeypatch.setattr(stream_source, "READ_ON_S", 0.0)
    long = Counted(1 << 40)
    open_data(long, seed=0)
    assert long.closed.wait(10)


class ShuffledRows(Rows):
    passes = 0

    def iter_rows(self) -> Iterator[Any]:
        self.passes += 1
        return iter([{"x": float(number * self.passes), "t": "a"} for number in range(1, 5)])


def test_a_dataset_of_ray_that_is_shuffled_at_each_pass_is_told_to_keep_its_order() -> None:
    with pytest.raises(
        DataError, match=r"ShuffledRows comes differently each time .* Give data\.materialize\(\), which"
    ):
        open_data(ShuffledRows(), seed=0)


class Texts(Rows):
    def iter_rows(self) -> Iterator[Any]:
        return iter([{"x": 1.0, "t": "a"}] * 4)


def test_a_column_of_texts_is_named_with_how_to_leave_it_out() -> None:
    with pytest.raises(DataError, match=r"Column 't' of Texts holds a str.*leave the column out \(remove_columns of"):
        open_data(Texts(), seed=0)


class Once(IterableDataset[Any]):
    def __iter__(self) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return iter([float(self.count)] * 3)


class Fails(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (1.0, 2.0, 3.0, 4.0, 5.0)
        raise OSError("the network is gone")


class Changes(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": 1.0}, {"x": 1.0}, {"x": 1.0}, {"x": 1.0}, {"z": 1.0})


def test_what_is_no_stream_is_refused_by_its_name() -> None:
    with pytest.raises(DataError, match="generator can be iterated over once only"):
        open_data((number for number in range(9)), seed=0)
    with pytest.raises(DataError, match="Item 0 of Once comes differently each time"):
        open_data(Once(), seed=0)
    with pytest.raises(DataError, match="Numbers has no item in pass 0 over it"):
        open_data(Numbers(0), seed=0)
    with pytest.raises(DataError, match=r"Numbers is a stream without an end.*raypipe.data.Stream\(data, num_samples"):
        open_data(Numbers(), seed=0, shuffle=False)
    with pytest.raises(DataError, match=r"Item 5 of Fails fails.*the network is gone"):
        open_data(Fails(), seed=0).read(0, 4, 3, (0,))
    with pytest.raises(DataError, match=r"Item 4 of Changes has the columns \['z'\], but item 0 has \['x'\]"):
        open_data(Changes(), seed=0).read(0, 3, 2, (0,))
    with pytest.raises(ConfigError, match=r"Stream\(num_samples=0\): give an integer"):
        Stream(Numbers(), num_samples=0)
    with pytest.raises(ConfigError, match=r"Stream\(int\) cannot be iterated over"):
        Stream(3)


def test_readers_know_nothing_of_each_other() -> None:
    """Stages in threads of one process read the same stream, each in its own pass."""
    source = StreamSource(Resumable(), seed=3)
    ahead, behind = source.reader((0, "train")), source.reader((1, "train"))
    assert ahead is source.reader((0, "train"))
    ahead.read(0, 16, 2, (0,))
    assert behind.read(0, 2, 2, (0,))[0].tolist() == [[0, 2], [0, 3]]
    assert ahead.read(0, 18, 1, (0,))[0].tolist() == [[2, 4]]
    assert copy.deepcopy(source._items).at == 0
