"""Of two drivers, stages obey the later one, whatever the earlier one still believes."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from raypipe.engine.state import Settings
from raypipe.errors import LeaseError
from raypipe.runtime.workers.fence import Fence
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.watch import Watch
from tests.exactness import SHAPES, STEPS
from tests.mishaps import Fuse
from tests.models import CASES
from tests.processes import alive
from tests.runtime.workers.test_fleet import configure, faulty, pids, sgd, steps
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def test_only_the_latest_term_is_obeyed() -> None:
    fence = Fence()
    fence.check(3)
    assert fence.admits(4)
    fence.check(3)  # to ask is not to take over
    fence.check(4)
    assert not fence.admits(3)
    with pytest.raises(LeaseError, match=r"obey the driver of generation 4, .* no longer that of generation 3"):
        fence.check(3)


def test_an_earlier_driver_can_neither_order_nor_end_stages(local_ray: None) -> None:
    stages, tensors = faulty(2, 1, Fuse("F", 10**6))
    data, settings, shape = CASES["mlp"].data(SHAPES["even"].samples), Settings(0, "mean", None, 120.0), SHAPES["even"]
    made = Fleet(2, {"CPU": 0, "spare": 1}, owner=Owner(term=4))
    try:
        configure(made, stages, tensors, sgd, data, settings)
        made._term, made._roster._owner = 3, Owner(term=3)
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
        assert ray.get(made.actors[0].pulse.remote(3, 60.0), timeout=60) is None, "its lease is not renewed"
        assert ray.get(made.actors[0].pulse.remote(4, 60.0), timeout=60) is not None
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
        made._roster._owner = Owner(term=5)
        made.stop()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(made.roster[0].actor.obeys.remote(5), timeout=60)
