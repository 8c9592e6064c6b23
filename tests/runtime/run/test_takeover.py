"""What is still to be ordered of stages whose driver is gone, by tables of what each of them knows."""

from __future__ import annotations

import pytest

from raypipe.errors import StageError
from raypipe.ir.report import StepReport
from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order
from raypipe.runtime.run.takeover import Entry, Standing, completion, steps_done
from raypipe.runtime.workers.ledger import Ledger

pytestmark = pytest.mark.core

FIRST = 7
"""Number of the run."""


def order(step: int, written: int = 0, *, training: bool = True) -> Order:
    return Order(Segment(step, 4 * step, 0, 8 * step, (2, 2, 2, 2)), training, written=written)


def report(step: int, stage: int = 0) -> tuple[tuple[StepReport, ...], ...]:
    return ((StepReport(stage, step, 8, 1.0 / (1 + step), 0.5, 0.0, 1.0, 0.5, 0.1, (1, 1), 2),),)


def standing(
    worker: int, given: int, done: int = 0, *, run: int = FIRST, works: bool = True, limit: int | None = None
) -> Standing:
    """Of a stage that was given the first orders of a run and has carried out some."""
    entries = tuple(Entry(run, k, order(k), report(k, worker) if k < done else None) for k in range(given))
    return Standing(worker, 0, 3, run, works, limit, entries)


def steps_of(orders: tuple[Order, ...]) -> list[int]:
    return [one.segment.first_step for one in orders]


@pytest.mark.parametrize(
    ("given", "limits", "count", "missing"),
    [
        ((5, 5), (None, None), 5, ([], [])),
        ((5, 4), (None, None), 5, ([], [4])),
        ((3, 5), (None, None), 5, ([3, 4], [])),
        ((5, 2), (3, None), 3, ([], [2])),  # the driver was about to stop the run after three
        ((5, 4), (3, 3), 3, ([], [])),
        ((1, 0), (None, None), 1, ([], [0])),
    ],
)
def test_everybody_completes_what_one_was_given(
    given: tuple[int, int], limits: tuple[int | None, int | None], count: int, missing: tuple[list[int], list[int]]
) -> None:
    todo = completion([standing(w, n, limit=limit) for w, (n, limit) in enumerate(zip(given, limits, strict=True))])
    assert (todo.run, todo.orders) == (FIRST, count)
    assert tuple(map(steps_of, todo.missing)) == missing
    assert todo.idle == frozenset()


def test_a_run_that_not_all_have_heard_of_is_begun_by_the_others() -> None:
    todo = completion([standing(0, 2, run=FIRST + 1), standing(1, 4, 4), standing(2, 1, run=FIRST + 1, works=False)])
    assert todo.run == FIRST + 1
    assert tuple(map(steps_of, todo.missing)) == ([], [0, 1], [1])
    assert todo.idle == {1, 2}


def test_a_limit_of_an_earlier_run_is_none_of_this_one() -> None:
    todo = completion([standing(0, 2, run=FIRST + 1), standing(1, 4, 4, limit=1)])
    assert todo.orders == 2


def test_what_is_no_pipeline_in_training_is_refused() -> None:
    ok = standing(0, 2)
    with pytest.raises(StageError, match="configured anew"):
        completion([ok, replace_links(standing(1, 2))])
    with pytest.raises(StageError, match="ordered nothing"):
        completion([standing(0, 0), standing(1, 0)])
    late = standing(0, 5)
    with pytest.raises(StageError, match="lost orders"):
        completion([late._replace(entries=late.entries[3:]), standing(1, 2)])


def replace_links(known: Standing) -> Standing:
    return known._replace(links=known.links + 1)


def test_steps_that_all_have_done_are_told_with_the_reports_of_all() -> None:
    found = steps_done([standing(0, 4, 4), standing(1, 4, 3)])
    assert [one.segment.first_step for one, _ in found] == [0, 1, 2]
    assert [reports[1][0][0].stage for _, reports in found] == [1, 1, 1]
    evaluation = Entry(FIRST, 4, order(0, training=False), report(0))
    with_evaluation = [replace_entries(standing(w, 4, 4), evaluation) for w in (0, 1)]
    assert len(steps_done(with_evaluation)) == 4


def replace_entries(known: Standing, more: Entry) -> Standing:
    return known._replace(entries=(*known.entries, more))


def test_a_ledger_forgets_what_is_written_but_the_last() -> None:
    ledger = Ledger()
    for step in range(6):
        ledger.ordered(FIRST, order(step, written=max(0, step - 2)))
        if step:
            ledger.done(FIRST, report(step - 1))
    # Order 5 says that the records of steps 0, 1 and 2 are written.
    assert [(entry.place, entry.reports is not None) for entry in ledger.entries()] == [
        (2, True), (3, True), (4, True), (5, False),
    ]  # fmt: skip
    ledger.done(FIRST, report(5))
    ledger.ordered(FIRST + 1, order(0, training=False, written=6))
    ledger.done(FIRST, report(9))  # of a run that is over
    assert [(entry.run, entry.place) for entry in ledger.entries()] == [(FIRST, 5), (FIRST + 1, 0)]
    assert ledger.entries()[1].reports is None
    ledger.clear()
    assert (ledger.entries(), ledger.run) == ((), FIRST + 1)


def test_a_ledger_forgets_what_an_older_run_never_did() -> None:
    """A run that is halted leaves orders that nobody carries out; the next run orders them again."""
    ledger = Ledger()
    for step in range(4):
        ledger.ordered(FIRST, order(step))
    ledger.done(FIRST, report(0))
    ledger.ordered(FIRST + 1, order(1))
    assert [(entry.run, entry.place) for entry in ledger.entries()] == [(FIRST, 0), (FIRST + 1, 0)]
