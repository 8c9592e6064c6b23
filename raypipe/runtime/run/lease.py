"""lease.json: one process trains a run at a time, and everybody can see which.

    take     nobody's, released, or its process is dead on this machine   taken at once
             somebody knows that this holder is dead                      taken at once
             its counter stands still for OBSERVE_S                       taken
             its counter moves twice                                      refused: who, since when
    renew    every RENEW_S the counter goes up by one; whoever finds another holder there has lost the run
    complete a checkpoint counts only if the lease is still ours when its manifest is written
    release  at the end, however it ends

No clocks are compared: who waits counts its own seconds. On a file system of this machine (NFS with locks included)
reading, judging and writing happen under a lock file, so that two can never both hold a run. Object stores have no
such thing: there the last writer wins and everybody looks again after SETTLE_S, see docs/design/0027.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, LeaseError
from raypipe.runtime.run.holder import Holder, myself

__all__ = ["LEASE", "LOCK", "Held", "Lease", "read_lease"]

LEASE, LOCK = "lease.json", "lease.lock"
FORMAT = 1
RENEW_S = 5.0
ASLEEP_S = 2 * RENEW_S
"""Who has not looked at the lease for so long was stopped or starved, or cannot reach it."""
OBSERVE_S = 30.0
"""Six renewals: a process that computes, or waits for a slow disk, is not taken for dead."""
MOVES = 2
"""A driver whose owner was killed a moment ago may renew once more before it is gone too."""
POLL_S = 0.25
SETTLE_S = 2.0
LOCK_TIMEOUT_S = 15.0


class Held(NamedTuple):
    """What lease.json says.

    Attributes:
        generation: how many have held the run, this one included.
        since: seconds since 1970 by the holder's clock, for people.
        renewals: times that it said it lives.
        released: it has ended and said so.
    """

    holder: Holder
    generation: int
    since: float
    renewals: int = 0
    released: bool = False

    @property
    def words(self) -> str:
        """The holder, and since when."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.holder}, since {since} by its clock (generation {self.generation})"

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to wait and see."""
        return self.released or self.holder.is_gone


def read_lease(place: Place) -> Held | None:
    """The lease in a run's folder; None where nobody has ever held it.

    Raises:
        LeaseError: the file is damaged.
    """
    if not place.exists(LEASE):
        return None
    try:
        found = json.loads(place.read_bytes(LEASE, 1 << 16))
        return Held(
            Holder.of(found["holder"]),
            int(found["generation"]),
            float(found["since"]),
            int(found["renewals"]),
            found["released"] is True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LeaseError(
            f"{place / LEASE} is damaged ({type(error).__name__}: {error}), so nobody can tell who trains this run. "
            "Delete it if nobody does."
        ) from error


class Lease:
    """Holds a run from ``take`` to ``release``; a thread of its own renews it.

    Attributes:
        held: as it was taken.
        taken_from: in words, whose it was; empty where nobody had it.
    """

    def __init__(self, place: Place, name: str, held: Held, taken_from: str) -> None:
        self.held, self.taken_from = held, taken_from
        self._place, self._name = place, name
        self._renewals = 0
        self._looked_s = time.monotonic()
        self._other: Held | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"raypipe lease {name}", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        place: Place,
        name: str,
        say: Callable[[str], None] = lambda text: None,
        dead: int | None = None,
        patience_s: float = 0.0,
    ) -> Lease:
        """Become the one that trains the run in this folder.

        Args:
            say: is told what is waited for.
            dead: generation whose holder has ended, as somebody else knows; None where nobody does.
            patience_s: how long the place may be full, forbidden or unreachable.

        Raises:
            LeaseError: another process trains it; says which, and since when.
            CheckpointError: the place is full, forbidden or unreachable.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return cls._taken(place, name, say, dead)
            except CheckpointError as error:
                if time.monotonic() + POLL_S > deadline_s:
                    raise
                say(f"waiting for the run's folder: {error}")
            time.sleep(POLL_S)

    @classmethod
    def _taken(cls, place: Place, name: str, say: Callable[[str], None], dead: int | None) -> Lease:
        found = _wait_and_see(place, name, say, dead)
        mine = Held(myself(), 1 + (found.generation if found else 0), time.time())
        mine.holder.begins()
        try:
            with _locked(place):
                now = read_lease(place)
                if now is not None and (found is None or _differ(now, found)):
                    raise _refusal(name, now)
                _write(place, mine)
            if not place.is_local:  # where the last writer wins, wait for whoever judged at the same time
                time.sleep(SETTLE_S)
                now = read_lease(place)
                if now is None or now.holder != mine.holder:
                    raise _refusal(name, now or mine)
        except BaseException:
            mine.holder.ends()
            raise
        return cls(place, name, mine, f"{found.holder}" if found and not found.released else "")

    @property
    def lost(self) -> bool:
        """Whether another process has taken the run over."""
        return self._other is not None

    def signature(self) -> dict[str, Any]:
        """Holder and generation, for every manifest and the event of a start."""
        return {"generation": self.held.generation, "holder": f"{self.held.holder} ({self.held.holder.id})"}

    def check(self) -> None:
        """Raise if the run was lost, as far as the last renewal knows; who was not awake for the next one looks first.

        Raises:
            LeaseError: names who has taken it over.
        """
        if time.monotonic() - self._looked_s > ASLEEP_S:
            with contextlib.suppress(CheckpointError, LeaseError):
                self._look()
        if self._other is not None:
            raise LeaseError(
                f"The run {self._name!r} was taken over by {self._other.words}, because {self.held.holder} did not "
                f"renew its lease for {OBSERVE_S:g} s; it ends here and writes no checkpoint any more. Follow the "
                "other one, or stop it and start again."
            )

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Around what only the holder may write.

        Raises:
            LeaseError: the run was lost.
        """
        with _locked(self._place):
            self._look()
            self.check()
            yield

    def release(self) -> None:
        """Give the run back: who comes next need not wait. Safe to call twice, and where the place has failed."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(LOCK_TIMEOUT_S)
        with contextlib.suppress(CheckpointError, LeaseError), _locked(self._place):
            self._look()
            if not self.lost:
                _write(self._place, self.held._replace(renewals=self._renewals, released=True))
        self.held.holder.ends()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S) and not self.lost:
            # A place that fails for a while loses nothing but time: completing() looks again.
            with contextlib.suppress(CheckpointError, LeaseError), _locked(self._place):
                self._look()
                if not self.lost:
                    self._renewals += 1
                    _write(self._place, self.held._replace(renewals=self._renewals))

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        now = read_lease(self._place)
        # A lower generation is a holder that has not noticed yet, in an object store; it will, at its next look.
        if now is not None and now.holder != self.held.holder and now.generation >= self.held.generation:
            self._other = now


def _wait_and_see(place: Place, name: str, say: Callable[[str], None], dead: int | None) -> Held | None:
    """The lease that may be taken from now on."""
    found = read_lease(place)
    if found is None or found.is_over or found.generation == dead:
        return found
    say(f"waiting to see whether {found.holder} still trains this run")
    moves, deadline_s = 0, time.monotonic() + OBSERVE_S
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        now = read_lease(place)
        if now is None or now.is_over:
            return now
        if _differ(now, found):
            found, moves, deadline_s = now, moves + 1, time.monotonic() + OBSERVE_S
            if moves == MOVES:
                raise _refusal(name, now)
    return found


def _differ(one: Held, other: Held) -> bool:
    return (one.holder, one.generation, one.renewals) != (other.holder, other.generation, other.renewals)


def _refusal(name: str, held: Held) -> LeaseError:
    return LeaseError(
        f"The run {name!r} is being trained by {held.words}. Wait for it, stop it (raypipe stop {name}), or give this "
        "run another name or resume=False."
    )


def _write(place: Place, held: Held) -> None:
    found = {"format": FORMAT, **held._asdict(), "holder": held.holder._asdict()}
    place.write_bytes(LEASE, json.dumps(found, indent=1).encode())


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    """Nobody else on this file system reads and writes the lease meanwhile; nothing where there are no locks."""
    if not place.is_local:
        yield
        return
    path = Path((place / LOCK).path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise CheckpointError(
            f"The run's folder {place} cannot be written: {error}. Change the rights, or give another storage_path."
        ) from error
    with file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    held = read_lease(place)
                    raise CheckpointError(
                        f"{path} has been locked for {LOCK_TIMEOUT_S:g} s by a process that hangs or was suspended"
                        + (f", probably {held.words}" if held and not held.released else "")
                        + ". Let it go on or end it, or give another storage_path."
                    ) from None
                time.sleep(0.01)
            except OSError:  # a file system without locks: as in an object store, the last writer wins
                break
        yield  # closing the file unlocks it
