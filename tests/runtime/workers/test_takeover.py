"""Stages in the middle of their steps, whose driver orders nothing more, and another driver that goes on with them."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray

from raypipe.engine.data.source import open_data
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.state import Settings
from raypipe.errors import LeaseError, LinkError, StageError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import single_homes
from raypipe.ir.work_order import Order
from raypipe.planner.schedule.lower import lower
from raypipe.planner.segments import train_segments
from raypipe.planner.tune import build_schedule, microbatches
from raypipe.runtime.run.takeover import Done
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.memos import with_packed_memo
from raypipe.runtime.workers.packing import stored
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.takeover import take_over
from tests.exactness import SHAPES, config_of, request_of
from tests.mishaps import Fuse
from tests.models import CASES
from tests.runtime.workers.test_fleet import faulty, pids, sgd

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = SHAPES["even"]
STEPS = 12
NEEDS = {"CPU": 0, "spare": 1}


class Pair:
    """Two stage actors and their drivers, of which each one is obeyed until the next one comes."""

    def __init__(self) -> None:
        self._keeper = Fleet(2, NEEDS)
        self._drivers = [self._keeper]

    def driver(self, count: int = 2) -> Fleet:
        """The next one; it finds ``count`` of them."""
        term = self._drivers[-1]._term + 1
        made = Fleet(count, NEEDS, owner=Owner(term=term), roster=self._keeper.roster[:count])
        # Actors know runs and links by numbers that never come again.
        made._run, made._links = (max(getattr(one, name) for one in self._drivers) for name in ("_run", "_links"))
        self._drivers.append(made)
        return made

    def rest(self) -> None:
        """Both leave what they do, however the test ended."""
        last = self.driver()
        for driver in self._drivers[1:]:
            driver.watch.close()
        actors = [member.actor for member in last.roster]
        ends = [actor.finish_after.remote(last._term, last._run, 0) for actor in actors]
        ends += [actor.abort.remote(last._term, last._links, "the test is over") for actor in actors]
        ray.get(ends, timeout=60)

    def stop(self) -> None:
        self._keeper._roster._owner = Owner(term=self._drivers[-1]._term + 1)
        self._keeper.stop()


@pytest.fixture(scope="module")
def made(local_ray: None) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stop()


@pytest.fixture
def pair(made: Pair) -> Iterator[Pair]:
    yield made
    made.rest()


class Memo(NamedTuple):
    """Of an order; every process that reads it leaves its number in a folder."""

    folder: Path
    text: str

    def __reduce__(self) -> tuple[Any, ...]:
        return read, (self.folder, self.text)


def read(folder: Path, text: str) -> Memo:
    (folder / str(os.getpid())).touch()
    return Memo(folder, text)


class Training:
    """Two stages, and the orders of all their steps.

    Args:
        burns: micro-batch at whose forward stage 1 fails.
    """

    def __init__(self, burns: int = 10**6) -> None:
        self.stages, self.tensors = faulty(2, 1, Fuse("F", burns))
        self.setup = GenerationSetup(self.stages, single_homes(range(2)))
        sources = {"train": open_data(CASES["mlp"].data(SHAPE.samples), seed=0)}
        settings = Settings(0, "mean", None, 120.0)
        self.run = RunSetup(sgd, None, sources, settings, frozenset(self.tensors), None, uuid.uuid4().hex)
        request = request_of(config_of(SHAPE, 2, "1f1b"), SHAPE.samples)
        minibatch, size, _ = microbatches(request, 2)
        self.orders = [Order(segment) for segment, _ in train_segments(SHAPE.samples, minibatch, size, STEPS)]
        first = self.stages[0].first_trainable
        self.rows = cache(lambda key: lower(build_schedule(request, 2, key.num_microbatches, first)))

    def begin(self, pair: Pair) -> Fleet:
        fleet = pair.driver()
        fleet.configure(self.run, self.setup, [stored(self.tensors)])
        return fleet

    def succeed(self, pair: Pair) -> tuple[Fleet, list[Done]]:
        fleet = pair.driver()
        return fleet, take_over(fleet, self.run, self.setup, self.rows, fleet._term)


def losses(reports: Iterator[list[list[StepReport]]]) -> list[float | None]:
    return [by_stage[-1][0].loss for by_stage in reports]


@pytest.fixture(scope="module")
def undisturbed(made: Pair) -> list[float | None]:
    training = Training()
    found = losses(training.begin(made).run(iter(training.orders), training.rows))
    made.rest()
    return found


@pytest.mark.parametrize("heard", [1, 5])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_steps_go_on_in_the_same_processes(undisturbed: list[float], pair: Pair, heard: int, ahead: int) -> None:
    """Its driver has heard of some steps, and has given stage 0 an order that stage 1 never got."""
    training = Training()
    first = training.begin(pair)
    losses(itertools.islice(first.run(iter(training.orders), training.rows), heard))
    given = heard + 2
    for order in training.orders[given : given + ahead]:
        ray.get(first.actors[0].submit.remote(first._term, first._run, with_packed_memo(order)))
    # What was ordered before has arrived when this has.
    ray.get([actor.set_row.remote(first._term, None, None, False) for actor in first.actors], timeout=60)
    processes = pids(first)
    second, done = training.succeed(pair)
    steps = [one.order.segment.first_step for one in done]
    assert steps == list(range(len(steps)))
    assert len(steps) >= given + ahead
    found = losses(one.reports for one in done)
    found += losses(second.run(iter(training.orders[len(steps) :]), training.rows))
    assert found == undisturbed
    assert pids(second) == processes
    with pytest.raises(LeaseError):
        list(first.run(iter(training.orders[:1]), training.rows))


def test_what_an_order_tells_the_next_driver_is_read_by_no_stage(pair: Pair, tmp_path: Path) -> None:
    """Stages would import all of a driver for it."""
    training = Training()
    told = [order._replace(memo=Memo(tmp_path, f"of {order.segment}")) for order in training.orders]
    losses(itertools.islice(training.begin(pair).run(iter(told), training.rows), 2))
    _, done = training.succeed(pair)
    assert [one.order for one in done] == told[: len(done)]
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_stage_that_fails_meanwhile_is_told(pair: Pair) -> None:
    training = Training(burns=2 * 4 + 1)
    next(iter(training.begin(pair).run(iter(training.orders), training.rows)))
    with pytest.raises((StageError, LinkError), match=r"the user's own mistake|stage 1 failed"):
        training.succeed(pair)


def test_a_stage_that_is_gone_too_is_told(pair: Pair) -> None:
    training = Training()
    next(iter(training.begin(pair).run(iter(training.orders), training.rows)))
    fleet = pair.driver(1)
    with pytest.raises(StageError, match="Of 2 stage actors only 1 outlived"):
        take_over(fleet, training.run, training.setup, training.rows, fleet._term)
