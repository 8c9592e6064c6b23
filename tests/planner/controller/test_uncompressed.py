"""What messages took before they were compressed, by place: hop 0 forward, hop 0 backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.ir.communication import LinkEstimate
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, Measured
from raypipe.planner.controller.measured import UncompressedTimes
from raypipe.planner.replay import routes_of

PLAIN = Choice(ScheduleSpec("1f1b", 4))
BOTH = replace(PLAIN, forward_codecs=("int8",), backward_codecs=("bf16",))
FORWARD = replace(BOTH, backward_codecs=("none",))


def measured_of(forward_s: float, backward_s: float, count: int = 4) -> Measured:
    links = tuple(
        LinkEstimate(0, way, 100, 0.0, s, s, s, s / 100, (s,) * count, True, "")
        for way, s in ((True, forward_s), (False, backward_s))
    )
    routes = routes_of(ScheduleSpec("1f1b", count), 2)
    return Measured(count, (1.0,) * 2, (2.0,) * 2, (0.0,) * 2, links, routes=routes)


def test_a_switch_to_codecs_keeps_what_whole_messages_took():
    kept = UncompressedTimes().after_switch(PLAIN, BOTH, measured_of(0.4, 0.3), until=90)
    assert kept == UncompressedTimes((0.4, 0.3), 4, 90)
    # From one codec to another nothing is learnt of whole messages, and what goes without one needs no memory.
    later = kept.after_switch(BOTH, FORWARD, measured_of(0.1, 0.1), until=150)
    assert later == UncompressedTimes((0.4, 0.0), 4, 90)
    assert later.after_switch(FORWARD, PLAIN, measured_of(0.1, 0.3), until=150).seconds == (0.0, 0.0)


def test_it_is_forgotten_when_the_link_changes_and_after_a_while():
    kept = UncompressedTimes((0.4, 0.3, 0.2, 0.1), 4, 90)
    assert kept.without([1]).seconds == (0.4, 0.3, 0.0, 0.0)
    assert kept.at(89) == kept
    assert kept.at(90) == UncompressedTimes()


def test_choices_that_compress_less_are_scored_on_it():
    """A message takes 0.1 s while it is a quarter as large; it took 0.8 s when it was whole."""
    found = UncompressedTimes((0.8, 0.0), 4, 90).added_to(measured_of(0.1, 0.1), ratios=(4.0, 1.0))
    assert found.draws_s(0) == (0.8,) * 4
    assert found.draws_s(0, ratio=4.0) == (0.1 / 4,) * 4
    assert found.draws_s(1) == (0.1,) * 4
    assert UncompressedTimes().added_to(found, ratios=()) == found


def test_with_twice_the_micro_batches_a_message_takes_half_as_long():
    found = UncompressedTimes((0.8, 0.4), 4, 90).added_to(measured_of(0.1, 0.1, count=8), ratios=(4.0, 2.0))
    assert found.whole_s == pytest.approx((0.4, 0.2))
