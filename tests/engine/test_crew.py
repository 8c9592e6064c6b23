"""Threads that stay do one thing after another, and nothing of it is left."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from raypipe.engine.crew import Crew
from tests.waiting import wait_until


class Thing:
    """Can be referred to weakly."""

    def number(self, number: int) -> tuple[int, str]:
        return number, threading.current_thread().name


def test_threads_are_the_same_from_call_to_call() -> None:
    crew: Crew[tuple[int, str]] = Crew("crew", 2)
    found = []
    for _ in range(2):
        results = crew.hand([partial(Thing().number, index) for index in range(2)])
        found.append(sorted(results.get(timeout=5) for _ in range(2)))
    crew.close()
    assert found == [[(0, "crew 0"), (1, "crew 1")]] * 2


def test_a_call_is_let_go_before_its_result_is_known() -> None:
    crew: Crew[tuple[int, str]] = Crew("crew", 1)
    thing = Thing()
    held = weakref.ref(thing)
    results = crew.hand([partial(thing.number, 0)])
    del thing
    results.get(timeout=5)
    assert held() is None
    crew.close()


def test_threads_end_with_who_holds_them() -> None:
    crews: list[Crew[tuple[int, str]]] = [Crew("held", 1), Crew("closed", 1)]
    for crew in crews:
        crew.hand([partial(Thing().number, 0)]).get(timeout=5)
    crews[1].close()
    crews[1].close()
    del crew, crews
    wait_until(lambda: not any(t.name in ("held 0", "closed 0") for t in threading.enumerate()), 5)
