"""The controller against the best fixed plan of simulated traces, and the answer to a change after a lock-out."""

from __future__ import annotations

import pytest

from jobs.bench.adaptive.traces import TRACES, locked_out, run_trace
from raypipe.planner.controller import Controller, Verdict

INSURED = {"one bad hop": 0.985, "late messages": 0.98, "spikes": 0.96, "slower at 60": 0.985, "ramp": 0.98}
"""Least ratio where the best fixed plan has more slack than any step before a change shows a use for."""
LATE = {"WAN two regions": 0.985, "WAN rerouted": 0.98}
"""Least ratio where the first step, with 1F1B, takes three times as long as the others, which is 1 % of 200 steps."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_the_controller_is_as_quick_as_the_best_fixed_plan(name: str) -> None:
    trace = TRACES[name]
    found = run_trace(trace)
    assert found.ratio >= (1.0 if trace.lasting else (INSURED | LATE).get(name, 0.99))
    assert found.undone == 0


@pytest.mark.parametrize("name", ["slow", "WAN", "two sites", "one bad hop"])
def test_links_that_are_slow_from_the_beginning_are_answered_after_the_first_step(name: str) -> None:
    trace = TRACES[name]
    (decision,) = Controller(trace.config).handle(trace.pipeline().step(0, trace.config.choice))
    assert decision.verdict is Verdict.SWITCH
    assert decision.choice is not None
    assert not decision.choice.lossy


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_a_change_after_a_lock_out_is_answered_within_five_steps(lag: int) -> None:
    assert max(locked_out(range(100, 171), lag).values()) <= 5
