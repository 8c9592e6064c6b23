"""Replicas of stages: PipeDream's warm-ups and numbers in flight, rows that pass every check, one worker unchanged."""

from __future__ import annotations

import inspect
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe.planner.schedule.replicas as module
from raypipe.errors import ScheduleError
from raypipe.ir.plan import peak_in_flight
from raypipe.ir.schedule import COMPUTE, Op, Wiring
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec
from raypipe.planner.dependency_tables import build
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.replicas import Replicas, warmups_of
from raypipe.planner.schedule.sync import one_f_one_b
from raypipe.planner.schedule.text import draw
from raypipe.planner.segments import forward_only
from raypipe.planner.simulator import Costs, simulate

# R by stage, forwards ahead by stage, NOAM: worked out by hand from PipeDream's runtime.
PIPEDREAM = [
    ((15, 1), (1, 0), 2),
    ((2, 1, 1), (1, 1, 0), 2),
    ((1, 2), (2, 0), 3),
    ((3, 2), (1, 0), 2),
    ((1, 3, 2), (5, 1, 0), 6),
    ((1, 1, 1, 1), (3, 2, 1, 0), 4),
]


@pytest.mark.parametrize(("replicas", "ahead", "noam"), PIPEDREAM)
def test_warm_ups_are_pipedreams(replicas, ahead, noam):
    assert warmups_of(replicas) == ahead
    assert noam == math.ceil(sum(replicas) / replicas[0]) == ahead[0] + 1
    stages, lanes = len(replicas), 6 * max(replicas)
    made = schedule_of(ScheduleSpec("1f1b", 10 * lanes, replicas=replicas, lanes=lanes), stages)
    assert peak_in_flight(made) == tuple(w + 1 for w in ahead)
    assert build(lower(made)).peak_in_flight() == peak_in_flight(made)


@st.composite
def specs(draw: st.DrawFn) -> tuple[ScheduleSpec, int]:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    kind = draw(st.sampled_from([name for name, kind in KINDS.items() if kind.synchronous]))
    stages = len(replicas)
    if KINDS[kind].several_stages:
        stages, replicas = 2 * draw(st.integers(1, 3)), replicas[:1]
        replicas *= stages
    more = {"group_size": draw(st.integers(1, 3))} if kind == "kfkb" else {}
    if kind == "interleaved":
        more = {"chunks": draw(st.sampled_from([n for n in (1, 2, 3) if stages % n == 0]))}
    if "slack" in KINDS[kind].takes:
        more = {"slack": tuple(draw(st.lists(st.integers(1, 3), min_size=stages - 1, max_size=stages - 1)))}
    if "lag" in KINDS[kind].takes and draw(st.booleans()):
        more["lag"] = tuple(draw(st.lists(st.integers(0, 6), min_size=stages, max_size=stages)))
    lanes = max(replicas) + draw(st.integers(0, 4))
    first = draw(st.integers(0, stages - 1))
    count = draw(st.integers(1, 13))
    return ScheduleSpec(kind, count, first_trainable=first, replicas=replicas, lanes=lanes, **more), stages


@pytest.mark.slow
@given(specs())
@settings(max_examples=60, deadline=None)
def test_rows_of_any_replicas_are_valid_and_each_micro_batch_is_worked_on_once(found):
    spec, stages = found
    made = schedule_of(spec, stages)
    wiring = made.wiring
    lowered = lower(made)
    validate(lowered)
    if spec.num_microbatches >= spec.lanes:
        validate(lowered, repeats=2)
    done = Counter(action for row in made.rows() for action in row)
    assert set(done.values()) == {1}
    for worker, row in enumerate(lowered.rows()):
        assert all(wiring.worker_of(a.stage, a.microbatch) == worker for a in row if a.op in COMPUTE)
        held = sum(worker in workers for workers in wiring.homes)
        ends = [op for op in (Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP) for _ in range(held)]
        if wiring.replicated or held == 1:
            assert [a.op for a in row][-3 * held :] == ends
    assert ScheduleSpec.parse(str(spec)) == spec == ScheduleSpec.from_dict(spec.to_dict())


@pytest.mark.parametrize(
    "schedule",
    [
        one_f_one_b(2, 4, replicas=Replicas((2, 1), 2)),
        schedule_of(ScheduleSpec("zb-v", 4, replicas=(2,) * 4, lanes=2), 4),
    ],
)
def test_the_pictures_are_those_of_the_module(schedule):
    text = "".join(line.removeprefix("    ") for line in inspect.getdoc(module).splitlines(keepends=True))
    assert draw(schedule) in text


@pytest.mark.parametrize(("kind", "more"), [("zb-v", {}), ("interleaved", {"chunks": 2})])
def test_pipelines_side_by_side_take_as_long_as_one_with_as_many_micro_batches_as_each(kind, more):
    costs = Costs.uniform(4)
    spec = ScheduleSpec(kind, 12, replicas=(3,) * 4, lanes=3, **more)
    one = ScheduleSpec(kind, 4, **more)
    assert (
        simulate(lower(schedule_of(spec, 4)), costs).makespan_s
        == simulate(lower(schedule_of(one, 4)), costs).makespan_s
    )


def test_one_worker_each_is_what_it_was_whatever_the_lanes():
    plain = lower(one_f_one_b(3, 7))
    laned = lower(one_f_one_b(3, 7, replicas=Replicas((1, 1, 1), 4)))
    assert (plain.body, plain.wiring.homes) == (laned.body, laned.wiring.homes)
    spec = ScheduleSpec("1f1b", 7)
    assert (str(spec), spec.to_dict().keys() & {"replicas", "lanes"}) == ("1f1b, M=7", set())


def test_replicas_of_a_slow_stage_take_their_turns():
    """Stage 0 takes twice as long and has two replicas: the last stage never waits once it has begun."""
    costs = Costs((2.0, 1.0), (4.0, 2.0))
    found = simulate(lower(schedule_of(ScheduleSpec("1f1b", 40, replicas=(2, 1), lanes=2), 2)), costs)
    last = sorted((s for s in found.spans if s.worker == 2 and s.action.op in COMPUTE), key=lambda s: s.start_s)
    assert sum(s.end_s - s.start_s for s in last) == 40 * 3.0
    assert last[-1].end_s - last[0].start_s == pytest.approx(40 * 3.0, rel=0.05)


def test_a_replica_without_micro_batches_steps_too():
    rows = lower(schedule_of(ScheduleSpec("gpipe", 1, replicas=(3, 1), lanes=3), 2)).rows()
    assert [str(a) for a in rows[2]] == ["0REDUCE_GRAD0", "0REDUCE_NORM0", "0STEP0"]


def test_what_a_peer_leaves_undone_is_missed():
    """The end of an update waits for backwards on the other replicas."""
    lowered = lower(one_f_one_b(1, 2, replicas=Replicas((2,), 2)))
    rows = list(lowered.body)
    rows[1] = tuple(a for a in rows[1] if a.op is not Op.B)
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD1 \(worker 0, position 2 of its row\) waits for 0B1"):
        validate(type(lowered)("odd", lowered.wiring, tuple(rows), 2))
    rows[1] = lowered.body[1][:-1]
    with pytest.raises(ScheduleError, match=r"0STEP1 is missing \(worker 1\)"):
        validate(type(lowered)("odd", lowered.wiring, tuple(rows), 2))


def test_evaluations_run_on_the_first_replica_of_every_stage():
    wiring = Wiring(((0, 1), (2,), (3, 4, 5)), 3, lanes=6)
    rows = forward_only(wiring.placement, 2, wiring.num_workers).rows()
    assert [len(row) > 0 for row in rows] == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wiring(((0,), ()), 1), "Stage 1 is placed on workers none"),
        (lambda: Wiring(((0, 0),), 1, lanes=2), "Stage 0 is placed on workers 0, 0: give it one or more, each once"),
        (lambda: Wiring(((0, 1),), 1), "Stage 0 has 2 replicas, but lanes=1 .* set at least 2 lanes"),
        (lambda: Wiring(((0, 1), (1,)), 1, lanes=2), "Stage 1 is placed on workers 1, and another stage of worker 1"),
        (lambda: Wiring(((0,),), 1, lanes=0), "lanes=0"),
        (lambda: ScheduleSpec("zb-v", 4, replicas=(2, 1), lanes=2), "'zb-v': workers .* Give every stage 2"),
        (lambda: ScheduleSpec("1f1b", 4, replicas=(2, 1)), "replicas=\\(2, 1\\) with lanes=1"),
        (lambda: schedule_of(ScheduleSpec("1f1b", 4, replicas=(2, 1), lanes=2), 3), "for 3 stages"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ScheduleError, match=words):
        make()
