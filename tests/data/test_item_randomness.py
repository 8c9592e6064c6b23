"""Datasets that draw random numbers: every stage, every reader and every resumed run gets the same items."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from raypipe.data import map_source
from raypipe.data.item_randomness import generator_states
from raypipe.data.open_data import open_data
from raypipe.errors import DataError

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "torch": lambda: torch.randn(4),
    "numpy": lambda: torch.tensor(np.random.randn(4), dtype=torch.float32),
    "python": lambda: torch.tensor([random.gauss(0, 1) for _ in range(4)]),
}


class Noisy(Dataset):
    """Input and target are the same draw; the first item draws nothing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = DRAWS[self.kind]() + row if row else torch.zeros(4)
        return x, x.clone()


class Batched(Noisy):
    """With the form that reads several items at once."""

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self[row] for row in rows]


@pytest.mark.parametrize("make", [Noisy, Batched])
@pytest.mark.parametrize("kind", DRAWS)
def test_an_item_is_the_same_for_every_reader(kind: str, make: type[Noisy]) -> None:
    source = open_data(make(kind), seed=3)
    whole = source.read(0, 0, 16, (0, 1))
    assert torch.equal(whole[0], whole[1])
    (targets,) = pickle.loads(pickle.dumps(source)).read(0, 0, 16, (1,))
    assert torch.equal(targets, whole[1])
    (late,) = open_data(make(kind), seed=3).read(0, 5, 3, (0,))  # a run that goes on there
    assert torch.equal(late, whole[0][5:8])
    rows = {tuple(row.tolist()) for row in whole[0]}
    assert len(rows) == 16
    assert not rows & {tuple(row.tolist()) for row in source.read(1, 0, 16, (0,))[0] if row.any()}
    assert not rows & {
        tuple(row.tolist()) for row in open_data(make(kind), seed=4).read(0, 0, 16, (0,))[0] if row.any()
    }


def test_the_generators_of_the_process_are_left_as_they_were() -> None:
    before = generator_states()
    open_data(Noisy("torch"), seed=0).read(0, 0, 8, (0,))
    open_data(Noisy("numpy"), seed=0).read(0, 0, 8, (0,))
    open_data(Noisy("python"), seed=0).read(0, 0, 8, (0,))
    assert generator_states().same_as(before)


def test_threads_that_read_at_once_do_not_disturb_each_other() -> None:
    source = open_data(Noisy("numpy"), seed=1)
    (expected,) = source.read(0, 0, 16, (0,))
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(source.read(0, 0, 16, (0,))[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 8
    assert all(torch.equal(one, expected) for one in found)


class OfItsOwn(Dataset):
    """A generator that raypipe cannot seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(self.generator.standard_normal(2)), row


def test_items_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(DataError) as refused:
        open_data(OfItsOwn(), seed=0)
    assert str(refused.value) == (
        "Item 0 of OfItsOwn comes with another column 0 each time it is read, so the stage that reads "
        "the input and the stage that reads the target would see different items. Draw from torch's, numpy's or "
        "Python's global generators, which raypipe seeds by (seed, epoch, row) around each item, or make the item a "
        "function of its index; a generator of the dataset's own, the clock and counters cannot be repeated."
    )


class Rarely(Dataset):
    """One item in ten is another one each time, whatever is seeded; some may not be readable."""

    def __init__(self, broken: int = 1000) -> None:
        self.draws, self.broken = random.SystemRandom(), broken

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= self.broken:
            raise ValueError("truncated")
        return torch.tensor([self.draws.random() if index % 100 > 90 else 0.5]), index


def test_an_item_that_is_drawn_anew_now_and_then_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_source, "MORE_S", 60.0)
    with pytest.raises(DataError, match=r"^Item \d+9\d of Rarely comes with another column 0 each time it is read"):
        open_data(Rarely(), seed=0)


def test_an_item_that_cannot_be_read_is_told_when_it_comes() -> None:
    assert open_data(Rarely(broken=4), seed=0).num_samples == 1000
