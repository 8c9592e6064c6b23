"""Of two drivers, stages obey the later one, whatever the earlier one still believes."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from raypipe.engine.optim.state import Settings
from raypipe.errors import LeaseError
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.fleet.watch import Watch
from raypipe.runtime.worker.places import Owner
from tests.exactness import SHAPES, STEPS
from tests.mishaps import Fuse
from tests.models import CASES
from tests.processes import alive
from tests.runtime.fleet.test_fleet import configure, faulty, pids, sgd, steps
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NEEDS = {"CPU": 0, "spare": 1}


def test_an_earlier_driver_can_neither_order_nor_end_stages(local_ray: None) -> None:
    stages, tensors = faulty(2, 1, Fuse("F", 10**6))
    data, settings, shape = CASES["mlp"].data(SHAPES["even"].samples), Settings(0, "mean", None, 120.0), SHAPES["even"]
    made = Fleet(2, Terms(NEEDS, owner=Owner(term=4)))
    try:
        configure(made, stages, tensors, sgd, data, settings)
        made._term, made.places.owner = 3, Owner(term=3)
        for order in (
            lambda: list(steps(made, stages, shape, "1f1b")),
            lambda: made.save("nowhere"),
            lambda: configure(made, stages, tensors, sgd, data, settings),
        ):
            with pytest.raises(LeaseError, match="obey the driver of generation 4"):
                order()
        watch = Watch(lambda: made.roster, 60.0, term=3)
        wait_until(lambda: not watch._thread.is_alive())
        watch.close()
        assert ray.get(made.actors[0].heartbeat.remote(3, 60.0), timeout=60) is None, "its lease is not renewed"
        assert ray.get(made.actors[0].heartbeat.remote(4, 60.0), timeout=60) is not None
        made.watch.close()  # which would end a stage that is stopped
        os.kill(pids(made)[0], signal.SIGSTOP)
        with pytest.raises(LeaseError, match="obey the driver of generation 4"):
            made.settle()
        os.kill(pids(made)[0], signal.SIGCONT)
        assert all(map(alive, pids(made))), "nor may it end one that does not answer"
        made.stop()
        assert all(map(alive, pids(made)))
        made._term, made._rows = 4, set()  # of which the stages have learned none
        assert len(list(steps(made, stages, shape, "1f1b"))) == STEPS
    finally:
        made.places.owner = Owner(term=5)
        made.stop()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(made.roster[0].actor.term.remote(), timeout=60)


def test_a_stage_that_fails_while_there_is_no_driver_is_adopted(local_ray: None) -> None:
    stages, tensors = faulty(2, 1, Fuse("F", 2 * 4 + 1))
    data, settings, shape = CASES["mlp"].data(SHAPES["even"].samples), Settings(0, "mean", None, 120.0), SHAPES["even"]
    first = Fleet(2, Terms(NEEDS, owner=Owner(term=1)))
    try:
        setups = configure(first, stages, tensors, sgd, data, settings)
        next(steps(first, stages, shape, "1f1b"))
        second = Fleet(2, Terms(NEEDS, owner=Owner(term=2)), first.roster[:2])
        # Actors know runs and links by numbers that never come again.
        second._run, second._links = first._run, first._links
        second.adopt(*setups)
        assert second.lost == frozenset()
        second.watch.close()
    finally:
        first.places.owner = Owner(term=3)
        first.stop()
