"""The table of liveness over scripts of events, under a clock that only counts: what is an alarm, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from raypipe.planner.liveness import TABLE, Diagnosis, Seen, judge

GRACE_S = 60.0
LOOK_S = 0.1
PULSE_S = 0.5


@dataclass(frozen=True)
class Truth:
    """How a worker and its node really are at one moment.

    Attributes:
        answers: its pulse thread gets to run.
        stopped: state T.
        share: processor time that it uses.
        action, computes: what it does, and whether it needs nobody else for it.
        node: its node's watcher answers.
    """

    answers: bool = True
    stopped: bool = False
    share: float = 1.0
    action: str = "1F0"
    computes: bool = True
    node: bool = True


WELL = Truth()
STOPPED = Truth(answers=False, stopped=True, share=0.0)


def follow(script: Iterable[tuple[float, Truth]], longest_s: float = 0.1) -> tuple[float, Diagnosis] | None:
    """Seconds from the begin of a script to the first finding; every entry lasts so long.

    What a driver sees is counted here as runtime/fleet/watch.py counts it.
    """
    now_s = silent_s = stopped_s = idle_s = action_s = 0.0
    before = ""
    for lasts_s, truth in script:
        for _ in range(round(lasts_s / LOOK_S)):
            now_s += LOOK_S
            silent_s = (
                0.0 if truth.answers and round(now_s / LOOK_S) % round(PULSE_S / LOOK_S) == 0 else silent_s + LOOK_S
            )
            stopped_s = stopped_s + LOOK_S if truth.stopped else 0.0
            idle_s = idle_s + LOOK_S if truth.share < 0.05 else 0.0
            if truth.answers:
                action_s = action_s + LOOK_S if truth.computes and truth.action == before else 0.0
                before = truth.action
            seen = Seen(silent_s, truth.node, stopped_s, idle_s, before, action_s, longest_s)
            if not truth.node:
                seen = replace_hidden(seen)
            if (found := judge(seen, GRACE_S)) is not None:
                return now_s, found
    return None


def replace_hidden(seen: Seen) -> Seen:
    """Without what only the watcher of its node can know."""
    return seen._replace(stopped_s=0.0, idle_s=0.0)


def steps(seconds: float, action_s: float, waits_s: float, **more: object) -> list[tuple[float, Truth]]:
    """Forwards that take so long, each after a wait for another stage."""
    found: list[tuple[float, Truth]] = []
    for number in range(round(seconds / (action_s + waits_s))):
        computing = replace(WELL, action=f"1F{number}", **more)  # type: ignore[arg-type]
        found += [(action_s, computing), (waits_s, replace(computing, action=f"1RECV_F{number}", computes=False))]
    return found


def test_the_docstring_shows_the_table() -> None:
    from raypipe.planner import liveness

    lines = [line.split() for line in (liveness.__doc__ or "").splitlines() if line.startswith("    ")]
    names = [words[0] for words in lines if words[-1] in ("ended", "up", "logged")]
    assert names == [row.failure for row in TABLE]
    assert [words[-1] == "logged" for words in lines if words[0] in names] == [not row.over for row in TABLE]


@pytest.mark.parametrize(
    ("what", "script"),
    [
        ("a stop of one second", [(5, WELL), (1.0, STOPPED), (30, WELL)]),
        ("many stops of one second", [(1.0, STOPPED), (0.2, WELL)] * 50),
        ("a saturated link", [(299, replace(WELL, computes=False, action="1RECV_F4", share=0.0))]),
        ("a source of data that is silent for minutes", [(299, replace(WELL, computes=False, share=0.0))]),
        ("a spare worker", [(900, replace(WELL, computes=False, action="", share=0.0))]),
        ("a node whose watcher is starved", [(50, replace(WELL, node=False))]),
        ("Python's lock held for a minute", [(60, replace(WELL, answers=False))]),
        ("a network that is away for half a minute", [(30, replace(WELL, answers=False, node=False)), (30, WELL)]),
    ],
)  # fmt: skip
def test_no_false_alarm(what: str, script: list[tuple[float, Truth]]) -> None:
    found = follow(script)
    assert found is None or not found[1].over, f"{what}: {found}"


def test_no_false_alarm_where_a_stage_is_20_times_slower_than_planned() -> None:
    """Its own earlier actions were quick, or the plan says so."""
    for planned_s in (0.01, 0.5, 2.0):
        found = follow(steps(200, 20 * planned_s, 0.1), longest_s=planned_s)
        assert found is None or found[1].failure == "slow"


def test_no_false_alarm_with_processors_four_times_oversubscribed() -> None:
    """A quarter of a processor, and pulses that come seconds late."""
    late = [(3.0, Truth(answers=False, share=0.2)), (0.5, Truth(share=0.2))]
    assert follow(late * 20, longest_s=1.0) is None


@pytest.mark.parametrize(
    ("script", "means", "least_s", "most_s"),
    [
        ([(600, STOPPED)], "stopped", 1.05, 1.6),
        ([(600, Truth(answers=False, share=0.0))], "deadlocked", 30, 61),
        ([(600, Truth(answers=False))], "deaf", 120, 181),
        ([(600, Truth(answers=False, node=False))], "unreachable", GRACE_S - 1, GRACE_S + 1),
        ([(600, Truth(share=0.0))], "slow", 19, 21),
    ],
)
def test_what_is_found(script: list[tuple[float, Truth]], means: str, least_s: float, most_s: float) -> None:
    found = follow(script)
    assert found is not None
    assert found[1].failure == means
    assert least_s <= found[0] <= most_s
    assert found[1].over == (means != "slow")


def test_an_action_that_never_ends() -> None:
    """Told first; ended where it computes nothing, left alone where it computes."""
    blocked = Seen(0.2, True, 0.0, 125.0, "1F3", 125.0, 0.1)
    found = judge(blocked, GRACE_S)
    assert found is not None
    assert found.failure == "blocked"
    assert "in 1F3 for 125 s" in found.why
    busy = judge(blocked._replace(idle_s=0.0), GRACE_S)
    assert busy is not None
    assert (busy.failure, busy.over) == ("slow", False)
    assert judge(blocked._replace(longest_s=20.0), GRACE_S) is None  # such actions are what it does
