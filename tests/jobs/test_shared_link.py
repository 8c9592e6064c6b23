"""kFkB and 1F1B on a shared wire: what the figures of the runs are, and that the rival sends in bursts."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.bench.contention.shared_link import LOADS, chosen, figures_of, table_of


def test_loads_were_fixed_beforehand() -> None:
    assert LOADS == {"light": 0.25, "moderate": 0.5, "heavy": 0.75}


def run(seconds: list[float], schedules: list[str]) -> dict[str, Any]:
    return {"seconds": seconds, "schedules": schedules, "peak_bytes": [1 << 20], "carried_bytes": 1e6}


def test_gains_are_mean_steps_against_the_best_1f1b_and_against_the_same_m() -> None:
    joint = ["kfkb k=2, M=8", "kfkb k=4, M=16", "kfkb k=4, M=16"]
    runs = {
        "1f1b M=4": [run([9.0, 1.0, 2.0], [""] * 3), run([9.0, 2.0, 3.0], [""] * 3)],
        "1f1b M=8": [run([9.0, 3.0, 3.0], [""] * 3)],
        "kfkb": [run([9.0, 1.0, 1.5], joint)],
    }
    found = {"settings": {"counted": 2}, "limit_bytes": 1 << 27, "loads": {"heavy": runs}}
    assert figures_of(found) == {
        "lab_gain_heavy": pytest.approx(2.0 / 1.25),
        "lab_gain_m8_heavy": pytest.approx(3.0 / 1.25),
        "lab_k_heavy": 4,
        "lab_microbatches_heavy": 16,
    }
    assert "kfkb k=4, M=16" in table_of(found).splitlines()[-1]


@pytest.mark.parametrize(
    ("schedules", "expected"),
    [(["kfkb k=3, M=16"] * 2 + ["1f1b, M=8"], (3, 16)), (["1f1b"], (1, 8)), (["kfkb k=2"], (2, 8))],
)
def test_what_ran_in_most_steps(schedules: list[str], expected: tuple[int, int]) -> None:
    assert chosen(schedules) == expected
