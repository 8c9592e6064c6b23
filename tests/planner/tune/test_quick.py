"""Seconds from compute actions alone are those of the lowered schedule."""

from __future__ import annotations

import random

import pytest

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune.predict import step_of
from raypipe.planner.tune.quick import quick_step_s


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "kfkb", "slack", "zb-h1"])
def test_a_quick_step_is_the_step_of_the_lowered_schedule(kind: str) -> None:
    for seed in range(20):
        drawn = random.Random(seed)
        stages, count = drawn.randint(1, 5), drawn.randint(1, 10)
        spec = ScheduleSpec(
            kind,
            count,
            group_size=min(count, 2) if kind == "kfkb" else 1,
            slack=tuple(drawn.randint(1, 4) for _ in range(stages - 1)) if kind in ("slack", "zb-h1") else (),
            first_trainable=drawn.choice([0, 0, stages - 1]),
            overlap=drawn.random() < 0.5,
        )
        sizes = (stages,) * 4 + (stages - 1,) * 4
        costs = Costs(*(tuple(drawn.random() for _ in range(size)) for size in sizes))
        expected_s, _ = step_of(lower(schedule_of(spec, stages)), costs)
        assert quick_step_s(spec, costs) == pytest.approx(expected_s, rel=1e-9), spec
