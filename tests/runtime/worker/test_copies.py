"""In-memory copies: they arrive whole or not at all, any worker can be restored from them, and sending is paced."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import ray
import torch

from raypipe.engine.copy import copy_source
from raypipe.engine.io.checkpoint import load_stage
from raypipe.engine.io.checkpoint.state_source import StoredState
from raypipe.errors import StageLostError
from raypipe.ir.report import StepReport
from raypipe.runtime.worker import copy_transfer
from raypipe.runtime.worker.copies import StageKey
from raypipe.runtime.worker.copy_transfer import (
    LEAST_BYTES,
    LEAST_SHARE,
    MOST_BYTES,
    PARCEL_BYTES,
    SHARE,
    RateLimiter,
    RemoteCopy,
    Tally,
)
from raypipe.runtime.worker.worker import GROUPS, _StageActor
from tests.engine.copy.stages import Stage, same
from tests.waiting import wait_until

KEY = StageKey(3, 0)
WAIT_S = 60.0


class _Worker(_StageActor):
    """An actor with one stage that needs no links."""

    def begin(
        self, rows: int, holder: Any, generation: int = KEY.generation, holds: Collection[tuple[int, int]] = ()
    ) -> None:
        self.stage = Stage("adamw", size=rows)
        self._copies.begin(generation, [self.stage.program], [self.stage.state], holder, holds)

    def step_and_copy(self, step: int) -> dict[str, torch.Tensor]:
        self.stage.step()
        found = self.stage.all()
        self._copies.take(step)
        return found

    def keep(self, step: int) -> None:
        """As for a change of the plan: there must be a copy."""
        copy_transfer.PATIENCE_S = 0.2
        self._copies.take(step, must=True)
        self._copies.wait_until_taken()

    def acknowledged(self) -> int:
        nothing = StepReport(KEY.stage, 0, 1, None, None, 0.0, 0.0, 0.0, 0.0, (0, 0), 1)
        ((found,),) = self._copies.noted([[nothing]], time.monotonic())
        return -1 if found.copied is None else found.copied.step

    def stop(self) -> None:
        self._copies.close()

    def forget(self) -> None:
        self._forget_copies()

    def go_back(self, actor: Any, step: int) -> dict[str, torch.Tensor]:
        self.stage.back(remote(actor, KEY, step))
        return self.stage.all()


@pytest.fixture(scope="module")
def pair(local_ray: None) -> Iterator[tuple[Any, Any]]:
    made = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(_Worker)
    actors = made.remote(), made.remote()
    yield actors
    for actor in actors:
        ray.kill(actor)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=WAIT_S)


def remote(actor: Any, owner: StageKey, step: int) -> StoredState:
    copy = RemoteCopy(actor, "", owner.generation, owner.stage, step, ())
    return copy_source([copy.opened(Tally())])


def steps(actor: Any, *, held: bool) -> dict[StageKey, tuple[int, ...]]:
    """After which it has copies, of its own stages or of others."""
    return {StageKey(f.generation, f.stage): f.steps for f in get(actor.copies.remote()) if f.held == held}


def wait_for(actor: Any, step: int) -> None:
    wait_until(lambda: get(actor.acknowledged.remote()) >= step)


@pytest.mark.parametrize("rows", [5, PARCEL_BYTES // 12 + 100], ids=["small", "many parcels"])
def test_a_copy_arrives_and_everybody_can_be_restored_from_it(pair: tuple[Any, Any], rows: int) -> None:
    """The last two are kept. Who asks may be this process, the stage itself, or one that has nothing yet."""
    worker, holder = pair
    get(worker.begin.remote(rows, holder))
    then = {}
    for step in (1, 2, 3):
        then[step] = get(worker.step_and_copy.remote(step))
        wait_for(worker, step)
    assert steps(worker, held=False)[KEY] == (2, 3)
    assert steps(holder, held=True)[KEY] == (2, 3)
    for step in (3, 2):
        source, fresh = remote(holder, KEY, step), Stage("adamw", size=rows)
        load_stage(source, fresh.program, fresh.state)
        assert same(fresh.all(), then[step])
        assert same(get(worker.go_back.remote(holder, step)), then[step])
    # The run goes back to step 2 and on from there; another plan's second copy ends those of this one.
    before = get(worker.go_back.remote(holder, 2))
    for step, held in ((3, (2, 3)), (4, (3, 4))):
        assert not same(get(worker.step_and_copy.remote(step)), before)
        wait_for(worker, step)
        assert steps(holder, held=True)[KEY] == held
    newer = KEY._replace(generation=KEY.generation + 1)
    get(worker.begin.remote(rows, holder, newer.generation))
    for step, owners in ((6, {KEY, newer}), (7, {newer})):
        get(worker.step_and_copy.remote(step))
        wait_for(worker, step)
        assert set(steps(holder, held=True)) == owners
    get(holder.forget.remote())


def test_what_is_not_held_is_told(pair: tuple[Any, Any]) -> None:
    with pytest.raises(StageLostError, match="The copy of stage 4 after step 7 cannot be read"):
        remote(pair[1], StageKey(9, 4), 7)


def test_a_holder_that_dies_ends_nothing_but_the_copy(local_ray: None, pair: tuple[Any, Any]) -> None:
    worker = pair[0]
    holder = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(_Worker).remote()
    get(worker.begin.remote(PARCEL_BYTES // 12, holder))
    ray.kill(holder)
    get(worker.step_and_copy.remote(1))
    get(worker.stop.remote())
    assert steps(worker, held=False)[KEY] == (1,)
    assert get(worker.acknowledged.remote()) == -1


class _Mute:
    """A holder that takes nothing and does not say so."""

    def hold_copy(self, generation: int, header: bytes) -> bool:
        return False

    def hold_copy_part(self, *parcel: Any) -> bool:
        time.sleep(WAIT_S)
        return False


def test_a_holder_that_does_not_answer_stops_no_step(local_ray: None, pair: tuple[Any, Any]) -> None:
    """While it is waited for no further copy is taken; where there has to be one, it is given up."""
    worker, holder = pair[0], ray.remote(num_cpus=0)(_Mute).remote()
    get(worker.begin.remote(5, holder))
    for step in (1, 2):
        get(worker.step_and_copy.remote(step))
    assert steps(worker, held=False)[KEY] == (1,)
    get(worker.keep.remote(3))
    assert steps(worker, held=False)[KEY] == (1, 3)
    assert get(worker.acknowledged.remote()) == -1
    get(worker.stop.remote())
    ray.kill(holder)


def test_where_nobody_is_to_hold_copies_the_own_one_counts(pair: tuple[Any, Any]) -> None:
    worker = pair[0]
    get(worker.begin.remote(5, None))
    get(worker.step_and_copy.remote(4))
    wait_for(worker, 4)


@pytest.mark.parametrize("holds", [(), ((KEY.stage, KEY.piece),)])
def test_who_is_no_longer_the_holder_of_a_stage_forgets_it_at_its_own_second_copy(
    pair: tuple[Any, Any], holds: tuple[tuple[int, int], ...]
) -> None:
    """Not before: until all have a copy under the new links, all may have to go back to what it holds."""
    worker, holder = pair
    get(worker.begin.remote(5, holder))
    get(worker.step_and_copy.remote(1))
    wait_for(worker, 1)
    get(holder.begin.remote(5, None, KEY.generation, holds))
    for step, kept in ((2, True), (3, bool(holds))):
        get(holder.step_and_copy.remote(step))
        wait_for(holder, step)
        assert (KEY in steps(holder, held=True)) == kept


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, busy_until_s: float = 0.0) -> None:
        self.now_s, self._busy_until_s = 100.0, 100.0 + busy_until_s
        self.stopped = False

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def pace(self) -> RateLimiter:
        return RateLimiter(
            lambda: self.now_s < self._busy_until_s, lambda: self.stopped, LEAST_BYTES, lambda: self.now_s, self.sleep
        )


@pytest.mark.parametrize(
    ("busy_s", "pause_s"),
    [(0.0, 0.1 * (1 / SHARE - 1)), (2.0, 2.0), (1e6, 0.1 * (1 / LEAST_SHARE - 1))],
    ids=["idle", "a message", "always busy"],
)
def test_the_pause_after_a_parcel(busy_s: float, pause_s: float) -> None:
    clock = Clock(busy_s)
    clock.pace().pause(0.1)
    assert clock.now_s - 100.0 == pytest.approx(pause_s, abs=0.01)


def test_parcels_grow_on_a_quick_link_and_shrink_on_a_slow_one() -> None:
    pace = Clock().pace()
    for _ in range(9):
        pace.sent(pace.parcel_bytes, 1e-4)
    assert pace.parcel_bytes == MOST_BYTES
    pace.sent(1, 9.0)  # the last parcel of a copy says nothing
    assert pace.parcel_bytes == MOST_BYTES
    for _ in range(9):
        pace.sent(pace.parcel_bytes // 2, 1.0)  # as large as the whole copy
    assert pace.parcel_bytes == LEAST_BYTES
