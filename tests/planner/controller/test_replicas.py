"""A run whose stages have replicas, on paper: links between pairs of workers change, and the controller follows."""

from __future__ import annotations

import pytest

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import (
    Choice,
    CodecCost,
    Controller,
    ControllerConfig,
    MemoryBudget,
    Verdict,
    fits,
    why_not,
)
from raypipe.planner.cost.memory import resident_of
from raypipe.planner.schedule import schedule_of
from tests.planner.controller.lab import Link, Pipeline, all_choices, run_controlled, run_fixed

COUNT, CHANGE = 12, 20
STAGES = [(0.02, 0.04), (0.01, 0.02)]
ONE = Choice(ScheduleSpec("1f1b", COUNT, replicas=(2, 1), lanes=2))
FREE = (MemoryBudget(), MemoryBudget())
NOISE = {"noise": 0.02, "stamp_noise_s": 2e-4, "clocks": [(0.0, 0.0), (55.0, 1e-5), (-7.0, 0.0)]}


def slow_from(change: int, lanes: tuple[int, ...], occupancy_s: float) -> Link:
    """Messages of micro-batches of these lanes take so long, from a step on."""
    return lambda hop, forward, step, m: (occupancy_s if step >= change and m % 2 in lanes else 0.0, 0.0002)


def setup(mode: str = "auto", budgets: tuple[MemoryBudget, ...] = FREE, **codecs: object) -> ControllerConfig:
    return ControllerConfig(mode, ONE, budgets, **codecs)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [(0, 1), (1,)])
@pytest.mark.parametrize("noise", [{}, NOISE])
def test_slack_grows_where_links_of_replicas_become_slow(lanes, noise):
    link, steps = slow_from(CHANGE, lanes, 0.03), 80
    seconds, choices, decisions = run_controlled(Pipeline(STAGES, link, **noise), setup(), steps)
    tail = steps // 2
    fixed = {one: sum(run_fixed(Pipeline(STAGES, link), one, steps)[-tail:]) for one in all_choices(setup(), COUNT, 4)}
    assert sum(seconds[-tail:]) <= 1.03 * min(fixed.values())
    assert sum(seconds[-tail:]) <= 0.9 * fixed[ONE], "it is worth something"
    assert choices[CHANGE - 1].spec.kind in ("1f1b", "slack")
    drift = next(d for d in decisions if d.verdict is Verdict.DRIFT)
    assert ("workers 1 - 2" in drift.reason, "workers 0 - 2" in drift.reason) == (True, 0 in lanes)


def test_each_link_is_known_by_itself_and_told_by_the_slowest():
    controller, pipeline = Controller(setup()), Pipeline(STAGES, slow_from(0, (1,), 0.03))
    for step in range(6):
        controller.handle(pipeline.step(step, ONE))
    measured = controller._observer.measured()
    assert measured is not None
    # How a round trip is shared between the two ways cannot be known.
    trips_s = [sum(link.transfer_s for link in measured.links[at : at + 2] if link) for at in (0, 2)]
    assert trips_s == pytest.approx([0.0004, 0.0604], abs=1e-4)
    assert measured.round_trip_s(0) == pytest.approx(0.0604, abs=1e-4)
    assert sum(measured.slowest_s(lambda link: link.transfer_s)) == pytest.approx(0.0604, abs=1e-4)
    assert measured.forward_s == pytest.approx((0.02, 0.02, 0.01))
    told = controller.estimates()
    assert [(x.hop, x.forward) for x in told] == [(0, True), (0, False)]
    assert sum(x.transfer_s for x in told) == pytest.approx(0.0604, abs=1e-4)


def test_a_replica_that_becomes_slower_is_seen():
    class Slower(Pipeline):
        def step(self, step, choice):
            done = super().step(step, choice)
            slow = tuple(s._replace(forward_s=3 * s.forward_s) if s.replica == 1 else s for s in done.stages)
            return done if step < 10 else type(done)(step, done.seconds, choice, slow, done.messages)

    _, _, decisions = run_controlled(Slower(STAGES, slow_from(99, (), 0.0)), setup(), 16)
    assert [d.numbers["who"] for d in decisions if d.verdict is Verdict.DRIFT] == ["a stage's computation"]


@pytest.mark.slow
def test_codecs_are_those_of_all_links_of_a_hop():
    codecs = (CodecCost("bf16", 2.0, 1e-10, 1e-10), CodecCost("int8", 3.9, 4e-10, 4e-10))
    asked = setup(forward_codecs=codecs, backward_codecs=codecs[:1])
    pipeline = Pipeline(STAGES, slow_from(5, (0, 1), 0.2), codecs={"bf16": 2.0, "int8": 3.9})
    seconds, choices, _ = run_controlled(pipeline, asked, 60)
    assert choices[-1].forward_codecs == ("int8",)
    assert choices[-1].backward_codecs == ("bf16",)
    assert sum(seconds[-10:]) <= 0.6 * sum(run_fixed(Pipeline(STAGES, slow_from(0, (0, 1), 0.2)), ONE, 10))


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (2, 2)])
@pytest.mark.parametrize(("kind", "slack"), [("1f1b", ()), ("slack", (3,)), ("zb-h1", (2,))])
def test_memory_is_what_the_rows_hold(replicas, kind, slack):
    choice = Choice(ScheduleSpec(kind, 24, slack=slack, replicas=replicas, lanes=6))
    held = resident_of(schedule_of(choice.spec, 2)).in_flight
    enough = tuple(MemoryBudget(most_in_flight=count) for count in held)
    assert fits(choice, enough)
    less = (MemoryBudget(most_in_flight=held[0] - 1), enough[1])
    assert why_not(choice, less) == (f"stage 0 would hold {held[0]} micro-batches, at most {held[0] - 1} are allowed")
