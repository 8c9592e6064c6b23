"""Contended links: gain of kFkB with the right k over 1F1B, and whether the controller finds that k.

In ``busy`` of all episodes of four steps other jobs use the network, spread evenly. Then a message waits with
probability ``share``, for half to one and a half times ``delay`` computation times of a micro-batch; messages behind it
wait too.

    level      busy    share   delay
    light      0.25    0.5     0.3
    moderate   0.40    0.5     0.5
    heavy      0.40    1.0     0.7

The wait follows from (seed, hop, direction, step, micro-batch) by a hash. On 4 and on 8 equal stages kFkB gains about
what the paper's abstract reports for preempted networks, 4 to 30 % (Ada-Grouper, arXiv:2303.01675; its settings are not
published, so these levels are ours).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import mean, median

import pytest

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, ControllerConfig, MemoryBudget, Verdict
from raypipe.planner.replay import Wire, compiled, step_s
from tests.planner.controller.lab import Pipeline, run_controlled

FORWARD_S, BACKWARD_S, COUNT = 0.01, 0.02, 32
EPISODE_STEPS = 4
GOLDEN = (5**0.5 - 1) / 2
STEPS = 100
GAIN = {"light": 1.04, "moderate": 1.15, "heavy": 1.30}


@dataclass(frozen=True, slots=True)
class Contention:
    """Level of contention.

    Attributes:
        name: of the level.
        busy: share of episodes in which another job uses the network.
        share: of messages that wait in a busy episode.
        delay: mean wait, in computation times of one micro-batch (forward and backward).
    """

    name: str
    busy: float
    share: float
    delay: float


LEVELS = {
    level.name: level
    for level in (
        Contention("light", 0.25, 0.5, 0.3),
        Contention("moderate", 0.40, 0.5, 0.5),
        Contention("heavy", 0.40, 1.0, 0.7),
    )
}
"""By name."""


def delay_s(
    level: Contention, unit_s: float, *, seed: int, hop: int, forward: bool, step: int, microbatch: int
) -> float:
    """Seconds for which the link is taken before this message can have it.

    Args:
        unit_s: forward and backward of one micro-batch on one stage.
    """
    # Multiples of the golden ratio fall evenly into every part of the circle, however short the run.
    if (_unit(_mix(seed)) + step // EPISODE_STEPS * GOLDEN) % 1.0 >= level.busy:
        return 0.0
    state = seed
    for word in (hop, int(forward), step, microbatch):
        state = _mix(state ^ (word + 1))
    if _unit(state) >= level.share:
        return 0.0
    return (0.5 + _unit(_mix(state))) * level.delay * unit_s


def _mix(state: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def _unit(state: int) -> float:
    """From 0 up to, but not including, 1."""
    return (state >> 11) / (1 << 53)


CASES = [(name, stages) for name in LEVELS for stages in (4, 8)]


def late_s(name: str, hop: int, forward: bool, step: int, m: int) -> float:
    unit_s = FORWARD_S + BACKWARD_S
    return 2e-4 + delay_s(LEVELS[name], unit_s, seed=1, hop=hop, forward=forward, step=step, microbatch=m)


@cache
def wires(name: str, stages: int, step: int) -> tuple[Wire, ...]:
    return tuple(
        Wire(1e-4, tuple(late_s(name, hop, forward, step, m) for m in range(COUNT)))
        for hop in range(stages - 1)
        for forward in (True, False)
    )


@cache
def fixed(name: str, stages: int, k: int) -> tuple[float, ...]:
    """Seconds of every step with one k."""
    program = compiled(ScheduleSpec("kfkb", COUNT, group_size=k), stages)
    busy = (FORWARD_S,) * stages, (BACKWARD_S,) * stages
    return tuple(step_s(program, *busy, wires(name, stages, step)) for step in range(STEPS))


def budgets_for(stages: int, k: int) -> tuple[MemoryBudget, ...]:
    """Memory for groups of k."""
    return tuple(MemoryBudget(most_in_flight=k * (stages - s)) for s in range(stages))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), CASES)
def test_groups_gain_what_the_level_is_named_for(name, stages):
    """And slow steps are rarer: the 95th percentile exceeds the median by at most half of what it does with 1F1B."""
    means = {k: mean(fixed(name, stages, k)) for k in range(1, 7)}
    best = min(means, key=lambda k: means[k])
    assert means[1] / means[best] >= GAIN[name]
    excess = {k: sorted(fixed(name, stages, k))[int(0.95 * STEPS)] / median(fixed(name, stages, k)) - 1 for k in means}
    print(name, stages, {k: (round(means[1] / means[k], 3), round(excess[k] / excess[1], 2)) for k in means})
    assert excess[best] <= 0.5 * excess[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "most"), [(*case, 4) for case in CASES] + [("heavy", 4, 2), ("heavy", 8, 1)]
)
def test_the_controller_finds_the_best_k_that_fits(name, stages, most):
    """Within one percent: near the optimum several k take the same time, and then the smaller one is taken."""
    setup = ControllerConfig(
        "kfkb", Choice(ScheduleSpec("kfkb", COUNT)), budgets_for(stages, most), retune_interval_steps=10
    )
    pipeline = Pipeline(
        [(FORWARD_S, BACKWARD_S)] * stages,
        lambda hop, forward, step, m: (late_s(name, hop, forward, step, m), 1e-4),
        noise=0.01,
        stamp_noise_s=1e-4,
    )
    _, choices, decisions = run_controlled(pipeline, setup, 40)
    means = {k: mean(fixed(name, stages, k)) for k in range(1, most + 1)}
    chosen = choices[-1].spec.group_size
    print(name, stages, chosen, {k: round(means[1] / s, 3) for k, s in means.items()})
    assert means[chosen] <= min(means.values()) * 1.01
    assert sum(d.verdict is Verdict.SWITCH for d in decisions) <= 3
    assert not any(d.verdict is Verdict.UNDO for d in decisions)
    if most == 1:
        assert any("memory does not allow k=2" in d.reason for d in decisions)


def test_a_level_repeats_and_keeps_to_its_shares():
    level = LEVELS["moderate"]
    found = {
        (h, f, t, m): delay_s(level, 1.0, seed=3, hop=h, forward=f, step=t, microbatch=m)
        for h in range(3) for f in (True, False) for t in range(200) for m in range(8)
    }  # fmt: skip
    assert found[1, True, 7, 3] == delay_s(level, 1.0, seed=3, hop=1, forward=True, step=7, microbatch=3)
    busy = {t // EPISODE_STEPS for (_, _, t, _), late in found.items() if late}
    assert len(busy) / 50 == pytest.approx(level.busy, abs=0.021)
    late = [s for (_, _, t, _), s in found.items() if t // EPISODE_STEPS in busy]
    assert sum(s > 0 for s in late) / len(late) == pytest.approx(level.share, abs=0.02)
    assert mean(s for s in late if s) == pytest.approx(level.delay, rel=0.02)
    assert min(s for s in late if s) >= 0.5 * level.delay
    assert max(late) <= 1.5 * level.delay
