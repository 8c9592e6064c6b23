"""Lease on a run, in the file lease.json: at most one process trains a run at a time.

    take     the lease is missing, or was released                        taken at once
             its holder is a dead process of this machine                 taken at once
             the caller knows that its holder is dead                     taken at once
             its counter does not change for OBSERVE_S                    taken
             its counter changes twice                                    refused: LeaseError names the holder
    renew    the holder increments the counter every RENEW_S; if it finds another holder, it has lost the run
    complete a checkpoint counts only if the lease is still held when its manifest is written
    release  at the end of the run, also on failure

Clocks of two machines are never compared: a waiting process measures seconds with its own clock. On a local file system
(or NFS with locks) reading, deciding and writing happen under a lock file, so that two processes can never hold the
lease of one run. Object stores have no locks: there the last writer wins, and every process checks again after
SETTLE_S, see docs/design/0027.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, LeaseError

HERE: set[str] = set()
"""Ids of the leases that this process holds. A lease with this process as its holder and another id is over."""


class Holder(NamedTuple):
    """Process that trains a run.

    Attributes:
        host: name of its host, for messages.
        machine: boot id and process namespace of the host; process ids are comparable only if this text is equal.
        pid: process id.
        started: start of the process in the kernel's ticks, because process ids are reused.
        id: random id of the lease.
    """

    host: str
    machine: str
    pid: int
    started: str
    id: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of(cls, row: Any) -> Holder:
        """Parse a holder from its JSON.

        Raises:
            ValueError, KeyError, TypeError: ``row`` does not describe a holder.
        """
        return cls(str(row["host"]), str(row["machine"]), int(row["pid"]), str(row["started"]), str(row["id"]))

    @property
    def is_gone(self) -> bool:
        """True if the holder is a dead process of this machine, or this process with an earlier lease.

        False if unknown.
        """
        if not self.machine or self.machine != _machine():
            return False
        if self.pid == os.getpid() and self.started == _started(self.pid):
            return self.id not in HERE
        return _started(self.pid) != self.started


def myself() -> Holder:
    """Return this process as a holder with a new id."""
    pid = os.getpid()
    return Holder(platform.node() or "unknown", _machine(), pid, _started(pid), secrets.token_hex(8))


def _started(pid: int) -> str:
    """Return the time when a process began, in the kernel's ticks since the boot; "" if no live process has this id."""
    try:
        # The name in parentheses may hold anything, so fields count from the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@functools.cache
def _machine() -> str:
    """Return boot id and process namespace of this machine; "" if unreadable, so that no holder counts as dead."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


LEASE, LOCK = "lease.json", "lease.lock"
FORMAT = 1
RENEW_S = 5.0
ASLEEP_S = 2 * RENEW_S
"""Maximum age, in seconds, of the last reading of the lease; ``Lease.check`` reads an older one again."""
OBSERVE_S = 30.0
"""Seconds without a renewal after which a holder is assumed dead: six renewals, for slow disks and busy processes."""
MOVES = 2
"""Number of renewals that prove a live holder; one may still come from a driver that is being killed."""
POLL_S = 0.25
SETTLE_S = 2.0
LOCK_TIMEOUT_S = 15.0


class Held(NamedTuple):
    """Content of lease.json.

    Attributes:
        holder: process that holds the lease, or held it last.
        generation: number of holders so far, including this one.
        since: time when the lease was taken, in Unix seconds of the holder's clock, for messages.
        renewals: number of renewals by this holder.
        released: True if the holder has released the lease.
    """

    holder: Holder
    generation: int
    since: float
    renewals: int = 0
    released: bool = False

    @property
    def words(self) -> str:
        """Holder and start of the lease, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.holder}, since {since} by its clock (generation {self.generation})"

    @property
    def is_over(self) -> bool:
        """True if the lease can be taken at once: it was released, or its holder is known to be dead."""
        return self.released or self.holder.is_gone


def read_lease(place: Place) -> Held | None:
    """Read the lease in a run's folder; None if the run never had a holder.

    Raises:
        LeaseError: the file is damaged.
    """
    if not place.exists(LEASE):
        return None
    try:
        row = json.loads(place.read_bytes(LEASE, 1 << 16))
        return Held(
            Holder.of(row["holder"]),
            int(row["generation"]),
            float(row["since"]),
            int(row["renewals"]),
            row["released"] is True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LeaseError(
            f"{place / LEASE} is damaged ({type(error).__name__}: {error}), so the holder of this run is unknown. "
            "Delete it if no process trains the run."
        ) from error


class Lease(contextlib.AbstractContextManager["Lease"]):
    """Lease on a run from ``take`` to ``release``, renewed by a thread.

    Attributes:
        held: content of lease.json when the lease was taken.
        taken_from: description of the previous holder if that holder did not release the lease; else "".
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
        report: Callable[[str], None] = lambda text: None,
        dead: int | None = None,
        patience_s: float = 0.0,
    ) -> Lease:
        """Take the lease on the run in this folder. If its holder may be alive, its renewals are observed first.

        Args:
            place: the run's folder.
            name: name of the run, for messages.
            report: called with a message when this call has to wait.
            dead: ``Held.generation`` of a holder that is known to have ended; None if unknown.
            patience_s: seconds to retry while the storage is full, forbidden or unreachable.

        Raises:
            LeaseError: another process trains the run; the message has the process and the start of its lease.
            CheckpointError: the storage is full, forbidden or unreachable.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return cls._taken(place, name, report, dead)
            except CheckpointError as error:
                if time.monotonic() + POLL_S > deadline_s:
                    raise
                report(f"waiting for the run's folder: {error}")
            time.sleep(POLL_S)

    @classmethod
    def _taken(cls, place: Place, name: str, report: Callable[[str], None], dead: int | None) -> Lease:
        before = _wait_and_see(place, name, report, dead)
        mine = Held(myself(), 1 + (before.generation if before else 0), time.time())
        HERE.add(mine.holder.id)
        try:
            with _locked(place):
                now = read_lease(place)
                if now is not None and (before is None or _differ(now, before)):
                    raise _refusal(name, now)
                _write(place, mine)
            if not place.is_local:  # the last writer wins: wait for others that decided meanwhile
                time.sleep(SETTLE_S)
                now = read_lease(place)
                if now is None or now.holder != mine.holder:
                    raise _refusal(name, now or mine)
        except BaseException:
            HERE.discard(mine.holder.id)
            raise
        return cls(place, name, mine, f"{before.holder}" if before and not before.released else "")

    @property
    def lost(self) -> bool:
        """True if another process has taken the run over."""
        return self._other is not None

    def signature(self) -> dict[str, Any]:
        """Return holder and generation of this lease, for checkpoint manifests and events of a start."""
        return {"generation": self.held.generation, "holder": f"{self.held.holder} ({self.held.holder.id})"}

    def check(self) -> None:
        """Raise LeaseError if another process has taken the lease, as of the last reading by the renewing thread.

        If that reading is older than ASLEEP_S seconds, as after a suspension of the process, the lease is read now.

        Raises:
            LeaseError: the lease was taken; the message has the new holder.
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
        """Lock and check the lease, and keep the lock inside the context: for writes that only the holder may make.

        Raises:
            LeaseError: another process has taken the lease.
            CheckpointError: the lock or the lease cannot be read.
        """
        with _locked(self._place):
            self._look()
            self.check()
            yield

    def release(self) -> None:
        """Release the lease, so that the next process does not have to wait. Safe to call twice."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(LOCK_TIMEOUT_S)
        with contextlib.suppress(CheckpointError, LeaseError), _locked(self._place):
            self._look()
            if not self.lost:
                _write(self._place, self.held._replace(renewals=self._renewals, released=True))
        HERE.discard(self.held.holder.id)

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S) and not self.lost:
            # A temporary failure of the place only costs time: completing() checks again.
            with contextlib.suppress(CheckpointError, LeaseError), _locked(self._place):
                self._look()
                if not self.lost:
                    self._renewals += 1
                    _write(self._place, self.held._replace(renewals=self._renewals))

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        now = read_lease(self._place)
        # In an object store, a lower generation is an earlier holder that has not noticed its loss yet; it soon will.
        if now is not None and now.holder != self.held.holder and now.generation >= self.held.generation:
            self._other = now


def _wait_and_see(place: Place, name: str, report: Callable[[str], None], dead: int | None) -> Held | None:
    """Observe the lease until it may be taken, and return its content; None if no lease exists.

    For the arguments see ``Lease.take``.

    Raises:
        LeaseError: the holder is alive: it renewed the lease MOVES times.
    """
    before = read_lease(place)
    if before is None or before.is_over or before.generation == dead:
        return before
    report(f"waiting to see whether {before.holder} still trains this run")
    moves, deadline_s = 0, time.monotonic() + OBSERVE_S
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        now = read_lease(place)
        if now is None or now.is_over:
            return now
        if _differ(now, before):
            before, moves, deadline_s = now, moves + 1, time.monotonic() + OBSERVE_S
            if moves == MOVES:
                raise _refusal(name, now)
    return before


def _differ(one: Held, other: Held) -> bool:
    return (one.holder, one.generation, one.renewals) != (other.holder, other.generation, other.renewals)


def _refusal(name: str, held: Held) -> LeaseError:
    return LeaseError(
        f"The run {name!r} is being trained by {held.words}. Wait for it, stop it (raypipe stop {name}), or give this "
        "run another name or resume=False."
    )


def _write(place: Place, held: Held) -> None:
    row = {"format": FORMAT, **held._asdict(), "holder": held.holder._asdict()}
    place.write_bytes(LEASE, json.dumps(row, indent=1).encode())


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    """Hold the lock of a run's folder inside the context; no effect on storage without locks.

    Raises:
        CheckpointError: the folder cannot be written, or another process held the lock for LOCK_TIMEOUT_S seconds.
    """
    if not place.is_local:
        yield
        return
    path = Path((place / LOCK).path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise CheckpointError(
            f"The run's folder {place} cannot be written: {error}. Change the permissions, or give another "
            "storage_path."
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
