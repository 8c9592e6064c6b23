"""Stages in the middle of their steps, whose driver orders nothing more, and another driver that goes on with them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from functools import cache

import pytest
import ray

from raypipe.engine.data import open_data
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

    def begin(self, term: int = 1) -> Fleet:
        fleet = Fleet(2, NEEDS, owner=Owner(term=term))
        fleet.configure(self.run, self.setup, [stored(self.tensors)])
        return fleet

    def succeed(self, before: Fleet, term: int = 2) -> tuple[Fleet, list[Done]]:
        fleet = Fleet(2, NEEDS, owner=Owner(term=term), roster=before.roster)
        return fleet, take_over(fleet, self.run, self.setup, self.rows, term)


def losses(reports: Iterator[list[list[StepReport]]]) -> list[float | None]:
    return [by_stage[-1][0].loss for by_stage in reports]


@pytest.fixture(scope="module")
def undisturbed(local_ray: None) -> list[float | None]:
    training = Training()
    fleet = training.begin()
    try:
        return losses(fleet.run(iter(training.orders), training.rows))
    finally:
        fleet.stop()


@pytest.mark.parametrize("heard", [1, 5])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_steps_go_on_in_the_same_processes(undisturbed: list[float], heard: int, ahead: int) -> None:
    """Its driver has heard of some steps, and has given stage 0 an order that stage 1 never got."""
    training = Training()
    first = training.begin()
    second = None
    try:
        losses(itertools.islice(first.run(iter(training.orders), training.rows), heard))
        given = heard + 2
        for order in training.orders[given : given + ahead]:
            ray.get(first.actors[0].submit.remote(1, first._run, order))
        processes = pids(first)
        second, done = training.succeed(first)
        steps = [one.order.segment.first_step for one in done]
        assert steps == list(range(len(steps)))
        assert len(steps) >= given + ahead
        found = losses(one.reports for one in done)
        found += losses(second.run(iter(training.orders[len(steps) :]), training.rows))
        assert found == undisturbed
        assert pids(second) == processes
        with pytest.raises(LeaseError):
            list(first.run(iter(training.orders[:1]), training.rows))
    finally:
        (second or first).stop()


def test_a_stage_that_fails_meanwhile_is_told(local_ray: None) -> None:
    training = Training(burns=2 * 4 + 1)
    first = training.begin()
    try:
        next(iter(first.run(iter(training.orders), training.rows)))
        with pytest.raises((StageError, LinkError), match=r"the user's own mistake|stage 1 failed"):
            training.succeed(first)
    finally:
        first._roster._owner = Owner(term=3)
        first.stop()


def test_a_stage_that_is_gone_too_is_told(local_ray: None) -> None:
    training = Training()
    first = training.begin()
    try:
        next(iter(first.run(iter(training.orders), training.rows)))
        fleet = Fleet(1, NEEDS, owner=Owner(term=2), roster=first.roster[:1])
        with pytest.raises(StageError, match="Of 2 stage actors only 1 outlived"):
            take_over(fleet, training.run, training.setup, training.rows, 2)
    finally:
        first._roster._owner = Owner(term=3)
        first.stop()
