"""Stages in the middle of their steps, whose driver orders nothing more, and another driver that adopts them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from functools import cache

import pytest
import ray

from raypipe.data.open_data import open_data
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import LeaseError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import single_homes
from raypipe.ir.segment import Order
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import build_schedule, microbatches
from raypipe.planner.segments import train_segments
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.worker.packing import stored
from raypipe.runtime.worker.places import Owner
from tests.exactness import SHAPES, config_of, request_of
from tests.mishaps import Fuse
from tests.models import CASES
from tests.runtime.fleet.test_fleet import faulty, pids, sgd

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = SHAPES["even"]
STEPS, KEPT, HEARD = 12, 3, 5
NEEDS = {"CPU": 0, "spare": 1}


class Pair:
    """Two stage actors and their drivers, of which each one is obeyed until the next one comes."""

    def __init__(self) -> None:
        self._keeper = Fleet(2, Terms(NEEDS))
        self._drivers = [self._keeper]

    def driver(self, count: int = 2) -> Fleet:
        """The next one; it finds ``count`` of them."""
        term = self._drivers[-1]._term + 1
        made = Fleet(count, Terms(NEEDS, owner=Owner(term=term)), self._keeper.roster[:count])
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
        self._keeper.places.owner = Owner(term=self._drivers[-1]._term + 1)
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

    def succeed(self, pair: Pair, count: int = 2) -> Fleet:
        fleet = pair.driver(count)
        fleet.adopt(self.run, self.setup)
        return fleet


def losses(reports: Iterator[list[list[StepReport]]]) -> list[float | None]:
    return [by_stage[-1][0].loss for by_stage in reports]


@pytest.fixture(scope="module")
def undisturbed(made: Pair) -> list[float | None]:
    training = Training()
    found = losses(training.begin(made).run(iter(training.orders), training.rows))
    made.rest()
    return found


def test_the_steps_go_on_in_the_same_processes_from_their_copies(undisturbed: list[float], pair: Pair) -> None:
    training = Training()
    first = training.begin(pair)
    orders = (order._replace(keep_copy=order.segment.first_step == KEPT - 1) for order in training.orders)
    losses(itertools.islice(first.run(orders, training.rows), HEARD))
    second = training.succeed(pair)
    assert (pids(second), second.lost) == (pids(first), frozenset())
    assert second._links >= first._links
    copies = [facts.remote(actor, KEPT) for actor, facts in second.copies() if not facts.held]
    second.configure(training.run, training.setup, copies)
    found = losses(second.run(iter(training.orders[KEPT:]), training.rows))
    assert found == undisturbed[KEPT:]
    with pytest.raises(LeaseError):
        list(first.run(iter(training.orders[:1]), training.rows))


def test_a_stage_that_fails_meanwhile_is_adopted(pair: Pair) -> None:
    training = Training(burns=2 * 4 + 1)
    next(iter(training.begin(pair).run(iter(training.orders), training.rows)))
    assert training.succeed(pair).lost == frozenset()


def test_a_stage_that_is_gone_too_is_lost(pair: Pair) -> None:
    training = Training()
    next(iter(training.begin(pair).run(iter(training.orders), training.rows)))
    assert training.succeed(pair, 1).lost == {1}
