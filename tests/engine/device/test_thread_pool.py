"""Threads that stay do one thing after another, and nothing of it is left."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from raypipe.engine.device.thread_pool import ThreadPool
from tests.waiting import wait_until


class Thing:
    """Can be referred to weakly."""

    def number(self, number: int) -> tuple[int, str]:
        return number, threading.current_thread().name


def test_threads_are_the_same_from_call_to_call() -> None:
    pool: ThreadPool[tuple[int, str]] = ThreadPool("pool", 2)
    found = []
    for _ in range(2):
        results = pool.submit([partial(Thing().number, index) for index in range(2)])
        found.append(sorted(results.get(timeout=5) for _ in range(2)))
    pool.close()
    assert found == [[(0, "pool 0"), (1, "pool 1")]] * 2


def test_a_call_is_let_go_before_its_result_is_known() -> None:
    pool: ThreadPool[tuple[int, str]] = ThreadPool("pool", 1)
    thing = Thing()
    held = weakref.ref(thing)
    results = pool.submit([partial(thing.number, 0)])
    del thing
    results.get(timeout=5)
    assert held() is None
    pool.close()


def test_threads_end_with_who_holds_them() -> None:
    pools: list[ThreadPool[tuple[int, str]]] = [ThreadPool("held", 1), ThreadPool("closed", 1)]
    for pool in pools:
        pool.submit([partial(Thing().number, 0)]).get(timeout=5)
    pools[1].close()
    pools[1].close()
    del pool, pools
    wait_until(lambda: not any(t.name in ("held 0", "closed 0") for t in threading.enumerate()), 5)
