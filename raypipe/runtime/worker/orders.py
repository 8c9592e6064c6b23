"""Orders of a stage actor: rejects orders of replaced drivers, queues the others, and stores reports.

An order is the driver's command to run a segment, which completes one or more mini-batches (ir/segment.py).

Fence:

    driver of term 3   --submit(3, ...)--> stage      obeyed
    driver of term 4   --fence(4)--------> stage      driver 4 adopts the stage, because it takes driver 3 for dead
    driver of term 3   --submit(3, ...)--> stage      rejected with LeaseError

The term of a driver is the number of its lease on the run's folder. Each driver that takes the lease gets a higher
term than all before.

OrderGate ends all stages after the same order:

    submitted   0  1  2  3
    stage 0     [==0==][==1==][=2
    stage 1           [==0==][==1==        halt: 3 have begun on stage 0, 2 on stage 1
                                           finish_after(3): stage 1 still runs 2, no stage begins 3

Some stages are further than others, and an order that one stage has begun needs all stages. So a stop takes two calls:
``halt`` keeps every stage from beginning another order and returns how many the stage has begun; ``finish_after``
passes the largest of these numbers to all stages. Between the two calls, a stage finishes its current order.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from raypipe.errors import LeaseError, RaypipeError
from raypipe.ir.report import Reports, StepReport
from raypipe.ir.segment import Order


class Attached(NamedTuple):
    """Numbers that a stage actor has from its previous driver.

    Attributes:
        worker: number of the worker in the plan; None for a spare.
        links: number of times that the actor's links were opened, less one; -1 before the first time.
        run: number of the newest call of ``StageActor.work``; -1 before the first.
    """

    worker: int | None
    links: int
    run: int


class Fence:
    """Fence of one stage actor: stores the highest term of its drivers, and rejects lower ones; thread-safe.

    The term is a number that grows with each new driver of the run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._term = -1

    @property
    def term(self) -> int:
        """Highest term that passed ``check`` or ``passing``; -1 before the first."""
        with self._lock:
            return self._term

    def admits(self, term: int) -> bool:
        """Return True if no higher term has passed ``check`` or ``passing``; this term is not stored."""
        with self._lock:
            return term >= self._term

    def check(self, term: int) -> None:
        """Admit the driver of this term, and reject lower terms from now on.

        Raises:
            LeaseError: a driver of a higher term was admitted before.
        """
        with self.passing(term):
            pass

    @contextlib.contextmanager
    def passing(self, term: int) -> Iterator[None]:
        """Admit the driver of this term, as ``check`` does; no other driver is admitted inside the context.

        Raises:
            LeaseError: a driver of a higher term was admitted before.
        """
        with self._lock:
            if term < self._term:
                raise LeaseError(
                    f"The stages obey the driver of generation {self._term}, which took the run over, and no "
                    f"longer that of generation {term}. This driver ends; follow the other one."
                )
            self._term = term
            yield


KEPT_REPORTS = 1024
"""Number of segments whose reports are kept; a driver fetches reports long before they are dropped."""


class OrderGate:
    """Queue of orders: one thread takes them; other threads add orders, or end the queue after a number of orders.

    Orders are queued by run. A run is one call of ``StageActor.work``, given by its number.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: defaultdict[int, deque[Order | None]] = defaultdict(deque)
        self._begun: defaultdict[int, int] = defaultdict(int)
        self._halted: set[int] = set()
        self._limits: dict[int, int] = {}

    def put(self, run: int, order: Order | None) -> None:
        """Queue an order of this run; None ends the run after the queued orders."""
        with self._changed:
            self._queues[run].append(order)
            self._changed.notify_all()

    def next(self, run: int, idle: Callable[[], None] = lambda: None) -> Order | None:
        """Wait for the next order of this run, count it as begun, and return it; None at the end of the run.

        ``idle`` is called first if no order has arrived.
        """
        with self._changed:
            queued = self._may_go(run)
        if not queued:
            idle()
        with self._changed:
            self._changed.wait_for(lambda: self._may_go(run))
            ended = self._begun[run] >= self._limits.get(run, self._begun[run] + 1)
            order = None if ended else self._queues[run].popleft()
            if order is None:
                self._queues.pop(run, None)
            else:
                self._begun[run] += 1
            return order

    def halt(self, run: int) -> int:
        """Keep orders of this run from beginning until ``finish_after``; return the number of orders begun so far."""
        with self._changed:
            self._halted.add(run)
            return self._begun[run]

    def finish_after(self, run: int, count: int) -> None:
        """Undo ``halt``, and end the run after ``count`` orders, counted from the beginning of the run."""
        with self._changed:
            self._limits[run] = count
            self._halted.discard(run)
            self._changed.notify_all()

    def abort(self, run: int) -> None:
        """End the run now, after a failure: no further order begins, even if other workers have begun more orders."""
        with self._changed:
            self._limits[run] = self._begun[run]
            self._halted.discard(run)
            self._changed.notify_all()

    def _may_go(self, run: int) -> bool:
        if run in self._limits and self._begun[run] >= self._limits[run]:
            return True
        return run not in self._halted and bool(self._queues[run])


class WorkReports:
    """Reports of a worker's current call of ``StageActor.work``; one thread adds them, other threads wait for them.

    Attributes:
        run: number of the call that began last; -1 before the first.
    """

    def __init__(self) -> None:
        self._grown = threading.Condition()
        self._done: Window[list[list[StepReport]]] = Window(KEPT_REPORTS)
        self._late: list[Reports] = []
        self.run = self._over = -1  # numbers of the run that began last, and that ended last

    @property
    def count(self) -> int:
        """Number of segments that the current call has completed."""
        return self._done.end

    def begin(self, run: int) -> None:
        """Begin call number ``run``, and drop the reports of the previous call."""
        with self._grown:
            self.run, self._done, self._late = run, Window(KEPT_REPORTS), []

    def add(self, reports: list[list[StepReport]]) -> None:
        """Add the reports of a segment: one list for each stage, with one report per mini-batch."""
        with self._grown:
            self._done.append(reports)
            self._grown.notify_all()

    def follow(self, carry_out: Callable[[], Reports], *, late: bool) -> None:
        """Run an order, then add the reports of the order before if they were late; keep the new ones if ``late``."""
        try:
            reports = carry_out()
        finally:
            self.flush()
        self._late.append(reports)
        if not late:
            self.flush()

    def flush(self) -> None:
        """Wait for the reports that were kept by ``follow``, and add them."""
        while self._late:
            self.add(self._late.pop()())

    def end(self, run: int) -> None:
        """Mark call number ``run`` as ended, and release the threads that wait for its reports."""
        with self._grown:
            self._over = run
            self._grown.notify_all()

    def since(self, run: int, place: int, wait_s: float) -> list[list[list[StepReport]]]:
        """Return the reports of call number ``run`` from segment ``place`` on, by segment, stage and mini-batch.

        Waits up to ``wait_s`` seconds for the first of these reports, unless the call has ended. The result is empty on
        timeout, or if another call is the current one.
        """
        with self._grown:
            # A call for a finished run returns at once: waiting calls would fill the actor's control group.
            self._grown.wait_for(lambda: self._over >= run or (self.run == run and self.count > place), timeout=wait_s)
            return self._done.since(place) if self.run == run else []


def sendable(error: RaypipeError) -> RaypipeError:
    """Copy an error to send it to the driver, with the present time and the traceback of its cause in the message."""
    cause = error.__cause__
    trace = "" if cause is None else f"\n\n{''.join(traceback.format_exception(cause))}"
    failure = type(error)(f"{error}{trace}")
    failure.raised_at_s, failure.ran_out = time.time(), error.ran_out
    return failure


T = TypeVar("T")


class Window(Generic[T]):
    """Newest items of a growing list. Items keep their indices when older items are dropped.

    Args:
        most: maximum number of items in memory; None keeps all until ``take`` drops them.

    Attributes:
        end: number of items ever added, which is the index of the next one.
    """

    def __init__(self, most: int | None = None) -> None:
        self._items: deque[T] = deque(maxlen=most)
        self.end = 0

    @property
    def first(self) -> int:
        """Index of the oldest item in memory; ``end`` if no item is in memory."""
        return self.end - len(self._items)

    def append(self, item: T) -> None:
        self._items.append(item)
        self.end += 1

    def extend(self, items: list[T]) -> None:
        self._items.extend(items)
        self.end += len(items)

    def since(self, place: int) -> list[T]:
        """Return the items from index ``place`` on that are still in memory."""
        return list(islice(self._items, max(0, place - self.first), None))

    def __getitem__(self, place: int) -> T:
        if not self.first <= place < self.end:
            raise IndexError(f"{place} is not in {self.first} ... {self.end - 1}")
        return self._items[place - self.first]

    def take(self, place: int) -> T:
        """Return the item at index ``place``, and drop it and all before it; raise IndexError if not in memory."""
        item = self[place]
        while self.first <= place:
            self._items.popleft()
        return item
