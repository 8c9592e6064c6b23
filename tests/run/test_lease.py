"""A lease: one process trains a run at a time, whatever the clocks say, and who lost it completes nothing."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow.fs
import pytest

from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, LeaseError
from raypipe.run.lease import LEASE, LOCK, Held, Holder, Lease, myself, read_lease
from tests.prepare.test_resume import trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

ELSEWHERE = Holder("far-away", "another boot pid:[1]", 1, "7", "abc")
AGES_S = 3600.0


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Other seconds than 5, 30 and 2."""

    def chosen(*, renew: float = 0.02, observe: float = AGES_S, settle: float = 0.3) -> None:
        for name, value in (("RENEW_S", renew), ("OBSERVE_S", observe), ("SETTLE_S", settle), ("POLL_S", 0.02)):
            monkeypatch.setattr(f"raypipe.run.lease.{name}", value)

    chosen()
    return chosen


def place_of(folder: Path) -> Place:
    return Place.of(folder / "run")


def write(place: Place, held: Held) -> None:
    place.write_bytes(LEASE, json.dumps({**held._asdict(), "holder": held.holder._asdict()}).encode())


def test_who_comes_second_is_told_who_and_since_when(tmp_path: Path, times: Callable[..., None]) -> None:
    place, said = place_of(tmp_path), []
    with Lease.take(place, "run"):
        with pytest.raises(LeaseError) as refused:
            Lease.take(place, "run", said.append)
        found = read_lease(place)
    assert found is not None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.since))
    assert f"'run' is being trained by process {os.getpid()} on " in str(refused.value)
    assert f", since {since} by its clock (generation 1)." in str(refused.value)
    assert said == [f"waiting to see whether {found.holder} still trains this run"]


def test_a_lease_that_was_given_back_is_free_at_once(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    for generation in (1, 2, 3):
        with Lease.take(place, "run") as lease:
            assert lease.held.generation == generation
            assert lease.taken_from == ""
            lease.check()
        found = read_lease(place)
        assert found is not None
        assert found.released


def test_one_that_stands_still_is_taken_after_a_while(tmp_path: Path, times: Callable[..., None]) -> None:
    place, begun_s = place_of(tmp_path), time.monotonic()
    times(observe=0.5)
    write(place, Held(ELSEWHERE, 6, since=4e9, renewals=12))  # its clock is far ahead, which does not matter
    with Lease.take(place, "run") as lease:
        assert time.monotonic() - begun_s >= 0.5
        assert (lease.held.generation, lease.taken_from) == (7, "process 1 on far-away")


@pytest.mark.parametrize("dead", [6, 5])
def test_one_whose_holder_is_known_to_be_dead_is_taken_at_once(
    dead: int, tmp_path: Path, times: Callable[..., None]
) -> None:
    """But not a later holder's: nobody has said anything of that one."""
    place, said = place_of(tmp_path), []
    times(observe=0.5)
    write(place, Held(ELSEWHERE, 6, since=0.0, renewals=12))
    with Lease.take(place, "run", said.append, dead) as lease:
        assert lease.held.generation == 7
    assert (said == []) == (dead == 6)


def test_one_that_moves_is_not_taken(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    renewals = itertools.count(12)

    def renew() -> None:
        write(place, Held(ELSEWHERE, 6, since=0.0, renewals=next(renewals)))  # its clock is far behind

    renew()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(Lease.take, place, "run")
        wait_until(lambda: renew() or taking.done())
        with pytest.raises(LeaseError, match=r"by process 1 on far-away, since 1970-01-01 .* \(generation 6\)"):
            taking.result(timeout=60)


def test_who_slept_through_its_renewals_looks_before_it_believes_that_the_run_is_its_own(
    tmp_path: Path, times: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(tmp_path)
    times(renew=AGES_S)
    with Lease.take(place, "run") as lease:
        write(place, Held(ELSEWHERE, 2, since=0.0))
        lease.check()  # it has looked a moment ago
        monkeypatch.setattr("raypipe.run.lease.ASLEEP_S", 0.0)
        with pytest.raises(LeaseError, match="taken over by process 1 on far-away"):
            lease.check()


def test_one_that_is_given_back_while_somebody_waits_is_taken(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    times(renew=AGES_S)
    first = Lease.take(place, "run")
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(Lease.take, place, "run")
        time.sleep(0.2)
        first.release()
        taking.result(timeout=60).release()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("what", ["another of this id", "an earlier one of this process"])
def test_a_dead_process_of_this_machine_is_not_waited_for(
    what: str, tmp_path: Path, times: Callable[..., None]
) -> None:
    """test_two_processes kills a real one."""
    place, me = place_of(tmp_path), myself()
    holder = me._replace(started="1") if what == "another of this id" else me
    write(place, Held(holder, 4, since=0.0))
    with Lease.take(place, "run") as lease:
        assert lease.held.generation == 5


@pytest.mark.parametrize("begins", ["nobody", "one that is dead"])
def test_of_many_at_once_one_gets_it(begins: str, tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    if begins != "nobody":
        write(place, Held(myself(), 8, since=0.0))
    start = threading.Barrier(8)

    def take(_: int) -> Lease | LeaseError:
        start.wait(60)
        try:
            return Lease.take(place, "run")
        except LeaseError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(take, range(8)))
    won = [one for one in found if isinstance(one, Lease)]
    assert len(won) == 1
    won[0].check()
    won[0].release()


def test_of_two_in_an_object_store_at_most_one_keeps_it(times: Callable[..., None]) -> None:
    times(renew=0.05)
    filesystem = pyarrow.fs.PyFileSystem(
        pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory", skip_instance_cache=True))
    )
    place = Place.of("/store/run", filesystem)
    assert not place.is_local
    start = threading.Barrier(2)

    def take(_: int) -> Lease | CheckpointError | LeaseError:
        start.wait(60)
        try:
            return Lease.take(place, "run")
        except (CheckpointError, LeaseError) as error:  # the other one may have moved the file that it was writing
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(take, range(2)))
    won = [one for one in found if isinstance(one, Lease)]
    assert len(won) <= 1
    for one in won:
        one.release()


def test_who_lost_it_completes_nothing_and_gives_nothing_back(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    times(renew=AGES_S, observe=0.2)
    first = Lease.take(place, "run")
    with first.completing():
        pass
    with Lease.take(place, "run") as second:
        with pytest.raises(LeaseError, match=r"was taken over by process .* \(generation 2\)"), first.completing():
            pytest.fail("it must not write")
        assert first.lost
        with pytest.raises(LeaseError):
            first.check()
        first.release()
        found = read_lease(place)
        assert found is not None
        assert (found.holder, found.released) == (second.held.holder, False)
        with second.completing():
            pass


def test_the_thread_finds_out_too(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    with Lease.take(place, "run") as lease:

        def lost() -> bool:
            write(place, Held(ELSEWHERE, 2, since=0.0))  # without the lock, so that a renewal may undo it
            return lease.lost

        wait_until(lost)


def test_a_damaged_lease_is_told(tmp_path: Path, times: Callable[..., None]) -> None:
    place = place_of(tmp_path)
    place.write_bytes(LEASE, b'{"holder": 3}')
    with pytest.raises(LeaseError, match=r"lease\.json is damaged .*Delete it if no process trains the run"):
        Lease.take(place, "run")


def test_a_lock_that_is_never_released_names_who_holds_the_run(
    tmp_path: Path, times: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    times()
    monkeypatch.setattr("raypipe.run.lease.LOCK_TIMEOUT_S", 0.1)
    place = place_of(tmp_path)
    write(place, Held(ELSEWHERE, 3, time.time()))
    said = r"locked for 0\.1 s by .*, probably process 1 on far-away, since .*\. Let it go on or end it"
    with (tmp_path / "run" / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=said):
            Lease.take(place, "run", dead=3)
    Lease.take(place, "run", dead=3).release()


def test_a_place_that_fails_for_a_moment_is_waited_for(tmp_path: Path, times: Callable[..., None]) -> None:
    """By a driver that Ray has started again: its stages wait for it, and nobody else would go on with them."""
    folder, said = tmp_path / "run", list[str]()
    folder.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Lease.take(place_of(tmp_path), "run", said.append, patience_s=0.1)
    threading.Timer(0.2, folder.unlink).start()
    Lease.take(place_of(tmp_path), "run", said.append, patience_s=60.0).release()
    assert said[0].startswith("waiting for the run's folder: ")
    assert "cannot be written" in said[-1]


# -- Runs ------------------------------------------------------------------------------------------------------------


def test_manifests_name_who_wrote_them(tmp_path: Path, times: Callable[..., None]) -> None:
    for steps in (2, 4):
        trainer("mlp", tmp_path, "run", 2).fit(num_steps=steps, local=True, progress=False)
    found = [json.loads(p.read_text()) for p in sorted((tmp_path / "run/checkpoints").glob("step_*/manifest.json"))]
    assert [(one["step"], one["generation"]) for one in found] == [(2, 1), (4, 2)]
    assert all(one["holder"].startswith(f"process {os.getpid()} on ") for one in found)
    lease = read_lease(place_of(tmp_path))
    assert lease is not None
    assert lease.released
    starts = [e for e in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()) if "holder" in e]
    assert [event["generation"] for event in starts] == [1, 2]
