"""Half-duplex hops, whose messages share one wire of each receiver: laws, and an event list beside the simulator."""

from __future__ import annotations

import heapq
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.schedule import Action, Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search.predict import step_of
from raypipe.planner.simulator import Costs, makespan_s, simulate
from tests.planner.specs import spec_for


@st.composite
def specs(draw: st.DrawFn) -> tuple[ScheduleSpec, int]:
    """A synchronous schedule with one stage per worker, and its number of stages."""
    kind = draw(st.sampled_from(["1f1b", "kfkb", "slack", "zb-h1", "gpipe"]))
    stages, count = draw(st.integers(2, 5)), draw(st.integers(1, 8))
    counts = tuple(draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages)))
    replicas = draw(st.sampled_from([(), counts])) if count >= 2 else ()
    numbers = {"group_size": draw(st.integers(1, count)), "slack": draw(st.integers(1, 3))}
    spec = spec_for(kind, stages, count, replicas=replicas, lanes=max(replicas, default=1), **numbers)
    return replace(spec, first_trainable=draw(st.integers(0, stages - 1))), stages


def drawn_costs(stages: int, random: Random, *, whole: bool = False) -> Costs:
    """Costs of all kinds, with two digits; whole numbers on request."""

    def some(count: int) -> tuple[float, ...]:
        return tuple(float(random.randrange(6)) if whole else random.random() for _ in range(count))

    half = tuple(random.random() < 0.7 for _ in range(stages - 1))
    return Costs(*(some(stages) for _ in range(4)), *(some(stages - 1) for _ in range(4)), half_duplex=half)


@given(specs(), st.integers(0, 1_000))
def test_half_duplex_is_never_quicker(drawn: tuple[ScheduleSpec, int], seed: int) -> None:
    spec, stages = drawn
    costs = drawn_costs(stages, Random(seed))
    lowered = lower(schedule_of(spec, stages))
    assert makespan_s(lowered, costs) >= makespan_s(lowered, replace(costs, half_duplex=()))


@given(specs(), st.integers(0, 1_000))
def test_a_wire_without_seconds_is_no_link(drawn: tuple[ScheduleSpec, int], seed: int) -> None:
    spec, stages = drawn
    costs = drawn_costs(stages, Random(seed))
    free = Costs(costs.forward_s, costs.backward_s, costs.backward_input_s, costs.backward_weight_s)
    lowered = lower(schedule_of(spec, stages))
    assert makespan_s(lowered, replace(free, half_duplex=(True,) * (stages - 1))) == makespan_s(lowered, free)


@given(specs(), st.integers(0, 1_000))
def test_one_hop_has_nothing_to_share_but_in_the_middle(drawn: tuple[ScheduleSpec, int], seed: int) -> None:
    """The first and the last worker receive from one neighbour only, so two stages do as well over a shared wire."""
    spec, _ = drawn
    spec = replace(spec, slack=spec.slack[:1], replicas=(), lanes=1, first_trainable=min(spec.first_trainable, 1))
    costs = drawn_costs(2, Random(seed))
    lowered = lower(schedule_of(spec, 2))
    full = replace(costs, half_duplex=())
    assert makespan_s(lowered, replace(costs, half_duplex=(True,))) == makespan_s(lowered, full)


@given(specs(), st.integers(0, 1_000))
def test_the_replay_gives_the_simulator_s_time_to_the_bit(drawn: tuple[ScheduleSpec, int], seed: int) -> None:
    spec, stages = drawn
    costs = drawn_costs(stages, Random(seed))
    assert equal_messages_s(spec, costs) == makespan_s(lower(schedule_of(spec, stages)), costs)


@pytest.mark.parametrize("kind", ["1f1b", "slack", "zb-h1"])
def test_overlapping_steps_take_what_the_lowered_schedule_takes(kind: str) -> None:
    for seed in range(20):
        random = Random(seed)
        stages, count = random.randint(2, 5), random.randint(1, 10)
        spec = replace(spec_for(kind, stages, count, slack=random.randint(1, 3)), overlap=True)
        costs = drawn_costs(stages, random)
        expected_s, _ = step_of(lower(schedule_of(spec, stages)), costs)
        assert equal_messages_s(spec, costs) == pytest.approx(expected_s, rel=1e-9), spec


def test_messages_of_both_neighbours_take_turns() -> None:
    """Three stages, one micro-batch after the other on stage 1's wire: 2 s of activations, 3 s of gradients."""
    costs = Costs(
        (0.0,) * 3, (0.0,) * 3, forward_occupancy_s=(2.0, 0.0), backward_occupancy_s=(0.0, 3.0), half_duplex=(True,) * 2
    )
    lowered = lower(schedule_of(ScheduleSpec("gpipe", 2), 3))
    assert makespan_s(lowered, costs) == 2 * (2.0 + 3.0)
    # 1F1B takes the first gradient before the second activation, which was sent at once.
    lowered = lower(schedule_of(ScheduleSpec("1f1b", 3), 3))
    spans = {str(span.action): (span.start_s, span.end_s) for span in simulate(lowered, costs).spans}
    assert spans["0SEND_F1"] == (2.0, 4.0)
    assert spans["2SEND_B0"] == (4.0, 7.0)
    assert spans["0SEND_F2"] == (7.0, 9.0)


@given(specs(), st.integers(0, 1_000))
def test_an_event_list_gives_the_same_step(drawn: tuple[ScheduleSpec, int], seed: int) -> None:
    spec, stages = drawn
    costs = replace(drawn_costs(stages, Random(seed), whole=True), half_duplex=(True,) * (stages - 1))
    lowered = lower(schedule_of(spec, stages))
    assert makespan_s(lowered, costs) == listed_s(lowered, costs)


FREE = Action(-1, Op.F, 0)
"""Event of a wire that has carried a message."""


def listed_s(schedule: Schedule, costs: Costs) -> float:
    """Seconds of a step by a list of events in the order of their times; every hop is half-duplex.

    A worker waits for its next message and the wire brings it that one next; there is no other rule.
    """
    rows = [[a for a in schedule.row(w) if a.op is not Op.REDUCE_NORM] for w in range(schedule.num_workers)]
    orders = [[_sent(a) for a in row if a.op in (Op.RECV_F, Op.RECV_B)] for row in rows]
    sent, arrived = set[Action](), set[Action]()
    busy, carries = [False] * len(rows), [False] * len(rows)
    events, now, number = list[tuple[float, int, int, Action | None]](), 0.0, 0

    def later(seconds: float, worker: int, what: Action | None) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + seconds, number, worker, what))

    def proceeds() -> bool:
        """Let every worker and every wire do what it can at this time; False if that is nothing."""
        moved = False
        for worker, row in enumerate(rows):
            while row and not busy[worker]:
                action = row[0]
                if action.op in (Op.RECV_F, Op.RECV_B) and _sent(action) not in arrived:
                    break
                row.pop(0)
                moved = True
                if action.op in (Op.SEND_F, Op.SEND_B):
                    sent.add(action)
                elif seconds := _work_s(action, costs):
                    busy[worker] = True
                    later(seconds, worker, None)
            if orders[worker] and not carries[worker] and orders[worker][0] in sent:
                message = orders[worker].pop(0)
                forward = message.op is Op.SEND_F
                hop = message.stage - (not forward)
                held_s = (costs.forward_occupancy_s if forward else costs.backward_occupancy_s)[hop]
                late_s = (costs.forward_latency_s if forward else costs.backward_latency_s)[hop]
                carries[worker] = moved = True
                later(held_s, worker, FREE)
                later(held_s + late_s, worker, message)
        return moved

    while True:
        while proceeds():
            pass
        if not events:
            break
        now, _, worker, what = heapq.heappop(events)
        if what is None:
            busy[worker] = False
        elif what is FREE:
            carries[worker] = False
        else:
            arrived.add(what)
    assert not any(rows)
    return now


def _sent(action: Action) -> Action:
    if action.op is Op.RECV_F:
        return Action(action.stage - 1, Op.SEND_F, action.microbatch)
    return Action(action.stage + 1, Op.SEND_B, action.microbatch)


def _work_s(action: Action, costs: Costs) -> float:
    by_stage = {
        Op.F: costs.forward_s, Op.B: costs.backward_s, Op.I: costs.backward_input_s, Op.W: costs.backward_weight_s,
    }.get(action.op)  # fmt: skip
    return by_stage[action.stage] if by_stage else 0.0


def test_half_duplex_has_one_answer_per_hop() -> None:
    with pytest.raises(PlanError, match="half_duplex has 1 numbers: give 2, one per hop"):
        Costs((1.0,) * 3, (1.0,) * 3, half_duplex=(True,))
