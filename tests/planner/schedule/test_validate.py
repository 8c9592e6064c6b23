"""The validator: one broken schedule per rule, and random damage against a second opinion."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op, Schedule, Wiring, parse_action
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.sync import k_f_k_b, one_f_one_b

GOOD = lower(one_f_one_b(2, 2))
TWO_UPDATES = replace(GOOD, body=GOOD.rows(2), stride=4)


def row(text):
    return tuple(map(parse_action, text.split()))


def edited(schedule, worker, old, new):
    """The schedule with a piece of one row, in text form, replaced by another."""
    line = " ".join(map(str, schedule.body[worker]))
    assert old in line
    body = list(schedule.body)
    body[worker] = row(line.replace(old, new, 1))
    return replace(schedule, body=tuple(body))


def refused(schedule, *parts, repeats=1):
    """The schedule is refused, with every one of ``parts`` in the message."""
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, repeats)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


FROZEN = lower(one_f_one_b(2, 1, first_trainable=1))
CHUNKED = lower(schedule_of(ScheduleSpec("interleaved", 1, chunks=2), 2))


@pytest.mark.parametrize(
    ("schedule", "worker", "old", "new", "parts"),
    [
        (GOOD, 1, "1B1", "2B1", ["2B1 (worker 1, position 6 of its row)", "stages 0 to 1"]),
        (GOOD, 0, "0F1", "0F1 0F1", ["0F1 (worker 0, position 3 of its row) is there twice", "position 2", "drop one"]),
        (GOOD, 0, "0F1 ", "", ["0SEND_F1 (worker 0, position 2 of its row) waits for 0F1, which no row contains"]),
        (GOOD, 0, "0B0 ", "", ["0REDUCE_GRAD1 (worker 0, position 7 of its row) waits for 0B0", "add 0B0"]),
        (GOOD, 0, "0SEND_F1 ", "", ["1RECV_F1 (worker 1, position 4 of its row) waits for 0SEND_F1, which no"]),
        (GOOD, 1, "1RECV_F1 ", "", ["1F1 (worker 1, position 4 of its row) waits for 1RECV_F1, which no row"]),
        (GOOD, 0, "0B1", "0B1 0SEND_B1", ["0SEND_B1 (worker 0, position 8 of its row) leads to no", "Remove it"]),
        (FROZEN, 0, "0REDUCE_GRAD0", "0B0 0REDUCE_GRAD0", ["0B0 (worker 0, position 2 of its row) waits for"]),
        (GOOD, 1, " 1STEP1", "", ["1STEP1 is missing (worker 1)"]),
        (GOOD, 1, "1STEP1", "1STEP0 1STEP1", ["1STEP0 (worker 1, position 10 of its row) waits for 1REDUCE_NORM0"]),
        (
            GOOD, 1, "1RECV_F0 1F0 1B0", "1RECV_F0 1B0 1F0",
            ["1B0 (worker 1, position 1 of its row) waits for 1F0 (worker 1, position 2 of its row), later in its"],
        ),
        (
            TWO_UPDATES, 0,
            "0REDUCE_GRAD1 0REDUCE_NORM1 0STEP1 0F2", "0F2 0REDUCE_GRAD1 0REDUCE_NORM1 0STEP1",
            ["0F2 (worker 0, position 8 of its row) comes before 0STEP1", "old weights", "behind the step"],
        ),
        # Each waits for what the other would do next: stage 0 wants a gradient before it sends what it is made of.
        (
            GOOD, 0,
            "0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B0 0B1",
            [
                "Deadlock, 2 workers",
                "0RECV_B1 (worker 0, position 2 of its row) waits for 1SEND_B1 (worker 1, position 7 of its row)",
                "1RECV_F1 (worker 1, position 4 of its row) waits for 0SEND_F1 (worker 0, position 4 of its row)",
                "Move the awaited actions ahead",
            ],
        ),
        (
            CHUNKED, 0,
            "1REDUCE_GRAD0 0B0 0REDUCE_GRAD0 0REDUCE_NORM0 1REDUCE_NORM0",
            "1REDUCE_GRAD0 1REDUCE_NORM0 0B0 0REDUCE_GRAD0 0REDUCE_NORM0",
            ["1REDUCE_NORM0 (worker 0, position 4 of its row) waits for 0REDUCE_GRAD0", "later in its own row"],
        ),
    ],
)  # fmt: skip
def test_a_changed_row_is_refused(schedule, worker, old, new, parts):
    refused(edited(schedule, worker, old, new), *parts)


def test_wrong_worker():
    moved = edited(edited(GOOD, 0, "0F1 ", ""), 1, "1RECV_F0", "0F1 1RECV_F0")
    refused(
        moved, "0F1 (worker 1, position 0 of its row) is on the wrong worker", "placed on worker 0", "move it to row 0"
    )


def test_microbatch_that_no_update_consumes():
    extra = edited(GOOD, 1, "1STEP1", "1STEP1 1RECV_F2 1F2 1B2")
    extra = edited(extra, 0, "0STEP1", "0STEP1 0F2 0SEND_F2")
    refused(extra, "1B2 (worker 1, position 13 of its row) leads to no optimizer step")


ALONE = Wiring(((0,),), update_interval=1)


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        (replace(GOOD, wiring=replace(GOOD.wiring, homes=((0,), (2,)))), ["names worker 2", "there are 2 rows"]),
        (replace(GOOD, body=((Action(0, "F", 0),), ())), ["no member of Op", "parse_action"]),
        (
            Schedule(
                "mixed", replace(ALONE, split_backward=True),
                (row("0F0 0B0 0I0 0W0 0REDUCE_GRAD0 0REDUCE_NORM0 0STEP0"),), stride=1,
            ),
            ["0B0 (worker 0, position 1 of its row) leads to no optimizer step"],
        ),
        (
            Schedule(
                "off", replace(ALONE, update_interval=2),
                (row("0F0 0F1 0B0 0B1 0F2 0B2 0REDUCE_GRAD2 0REDUCE_NORM2 0STEP2"),), stride=3,
            ),
            ["0STEP2 (worker 0, position 8 of its row) ends no update", "the last ones are 1, 3"],
        ),
        (
            Schedule(
                "late", ALONE,
                (row("0F0 0B0 0REDUCE_GRAD0 0REDUCE_NORM0 0F1 0B1 0REDUCE_GRAD1 0REDUCE_NORM1 0STEP1 0STEP0"),),
                stride=2,
            ),
            ["0STEP1 (worker 0, position 8 of its row) comes before 0STEP0 (worker 0, position 9"],
        ),
        (one_f_one_b(1, 2), ["No row contains a STEP", "lower()"]),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_run_is_refused(schedule, parts):
    refused(schedule, *parts)


def test_receives_in_another_order_than_the_sends_are_fine():
    """Stage 1 runs its micro-batches in the other order; the early message is put aside."""
    body = (row("0F0 0F1 0B1 0B0"), row("1F1 1F0 1B1 1B0"))
    validate(lower(Schedule("crossed", Wiring(((0,), (1,)), update_interval=2), body, stride=2)))


kinds = st.sampled_from(
    [
        lower(k_f_k_b(3, 4, 2)),
        lower(schedule_of(ScheduleSpec("slack", 3, slack=(1, 2), first_trainable=1), 3)),
        lower(schedule_of(ScheduleSpec("interleaved", 2, chunks=2), 4)),
        TWO_UPDATES,
    ]
)


@pytest.mark.slow
@given(kinds, st.data())
@settings(max_examples=100, deadline=None)
def test_random_damage_is_judged_as_a_second_opinion_judges_it(schedule, data):
    body = [list(row) for row in schedule.body]
    worker = data.draw(st.integers(0, len(body) - 1))
    row = body[worker]
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    damage = data.draw(st.sampled_from(["swap", "swap neighbours", "remove", "duplicate", "move", "other worker"]))
    match damage:
        case "swap":
            row[i], row[j] = row[j], row[i]
        case "swap neighbours":
            row[i - 1], row[i] = row[i], row[i - 1]
        case "remove":
            del row[i]
        case "duplicate":
            row.insert(j, row[i])
        case "move":
            row.insert(j, row.pop(i))
        case "other worker":
            body[(worker + 1) % len(body)].append(row.pop(i))
    damaged = replace(schedule, body=tuple(map(tuple, body)))
    if second_opinion(damaged):
        validate(damaged)
    else:
        with pytest.raises(ScheduleError, match=re.compile(r"\d+[A-Z_]+\d+ .*worker \d+")):
            validate(damaged)


def second_opinion(schedule):
    """The rules again, written without dependencies(): what must be there, and a walk through the rows."""
    wiring, rows = schedule.wiring, schedule.rows()
    interval, microbatches, stages = wiring.update_interval, schedule.stride, wiring.num_stages
    links = [s for s in range(stages - 1) if wiring.placement[s] != wiring.placement[s + 1]]
    wanted = [Action(s, Op.F, m) for s in range(stages) for m in range(microbatches)]
    wanted += [Action(s, Op.B, m) for s in range(wiring.first_trainable, stages) for m in range(microbatches)]
    for s in links:
        wanted += [Action(s, Op.SEND_F, m) for m in range(microbatches)]
        wanted += [Action(s + 1, Op.RECV_F, m) for m in range(microbatches)]
        if s >= wiring.first_trainable:
            wanted += [Action(s + 1, Op.SEND_B, m) for m in range(microbatches)]
            wanted += [Action(s, Op.RECV_B, m) for m in range(microbatches)]
    updates = range(interval - 1, microbatches, interval)
    wanted += [
        Action(s, op, m) for op in (Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP) for s in range(stages) for m in updates
    ]
    placed = [(a, w) for w, row in enumerate(rows) for a in row]
    if sorted(a for a, _ in placed) != sorted(wanted) or any(wiring.placement[a.stage] != w for a, w in placed):
        return False
    done, at = set(), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for w, row in enumerate(rows):
            while at[w] < len(row) and _may_run(row[at[w]], done, schedule, links):
                done.add(row[at[w]])
                at[w] += 1
                moved = True
    return len(done) == len(placed)


def _may_run(action, done, schedule, links):
    stage, op, m = action
    interval, first, stages = schedule.wiring.update_interval, schedule.wiring.first_trainable, schedule.num_stages
    update = range(m - interval + 1, m + 1)
    previous_step = m // interval * interval - 1
    match op:
        case Op.F:
            here = (
                stage == 0
                or Action(stage, Op.RECV_F, m) in done
                or (stage - 1 not in links and Action(stage - 1, Op.F, m) in done)
            )
            return here and (previous_step < 0 or Action(stage, Op.STEP, previous_step) in done)
        case Op.B:
            there = (
                stage == stages - 1
                or Action(stage, Op.RECV_B, m) in done
                or (stage not in links and Action(stage + 1, Op.B, m) in done)
            )
            return there and Action(stage, Op.F, m) in done
        case Op.SEND_F | Op.SEND_B:
            return Action(stage, Op.F if op is Op.SEND_F else Op.B, m) in done
        case Op.RECV_F:
            return Action(stage - 1, Op.SEND_F, m) in done
        case Op.RECV_B:
            return Action(stage + 1, Op.SEND_B, m) in done
        case Op.REDUCE_GRAD:
            return stage < first or all(Action(stage, Op.B, n) in done for n in update)
        case Op.REDUCE_NORM:
            return all(Action(s, Op.REDUCE_GRAD, m) in done for s in range(stages))
        case _:
            return Action(stage, Op.REDUCE_NORM, m) in done
