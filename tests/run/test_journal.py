"""Journal: what it keeps of the run's plan."""

from __future__ import annotations

from types import SimpleNamespace

from raypipe.ir.timeline import Timeline
from raypipe.run.journal import Journal


def test_the_prediction_is_that_of_the_plan_in_force() -> None:
    run, first = Journal("digits", "runs/digits"), Timeline((), "simulated")
    assert run.predicted is None
    for predicted in (first, Timeline((), "simulated"), None, first):
        run.planned(SimpleNamespace(predicted=predicted))  # type: ignore[arg-type]
        assert run.predicted is predicted
