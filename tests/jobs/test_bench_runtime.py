"""The ideal that bench/runtime holds steps against, and where the time of a traced step went."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.bench.runtime.gaps import gap_table, stage_gaps
from jobs.bench.runtime.ideal import ideal_seconds, lone_sleeps_s


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected_s"), [(2, 8, 0.27), (4, 16, 0.57), (8, 32, 1.17), (1, 1, 0.03)]
)
def test_ideal_step(stages: int, microbatches: int, expected_s: float) -> None:
    assert ideal_seconds(stages, microbatches, 0.01, 0.02) == pytest.approx(expected_s)


def spans(*rows: tuple[str, float, float]) -> list[dict[str, Any]]:
    return [{"action": action, "start_s": start, "end_s": end} for action, start, end in rows]


def test_gaps_of_a_step() -> None:
    found = stage_gaps(
        spans(
            ("0F8", 0.0, 1.0), ("0SEND_F8", 1.0, 1.5), ("0F9", 1.75, 2.75), ("0SEND_F9", 2.75, 3.0),
            ("0RECV_B8", 3.0, 5.0), ("0B8", 5.0, 7.0), ("0REDUCE_GRAD9", 7.0, 7.5), ("0STEP9", 7.5, 8.0),
            ("1RECV_F8", 0.0, 1.625), ("1F8", 1.625, 2.625), ("1B8", 2.625, 4.5), ("1SEND_B8", 4.5, 4.75),
            ("1RECV_F9", 4.75, 4.75), ("1F9", 4.75, 5.75),
        )
    )  # fmt: skip
    assert found[0].forwards == [1.0, 1.0]
    assert found[0].backwards == [2.0]
    assert found[0].gaps == [0.75, 2.25]
    assert found[0].sends == [0.5, 0.25]
    assert found[0].latencies == [0.5]  # sent at 4.5, there at 5.0, and stage 0 stood waiting
    assert found[0].tail_s == 1.0
    assert found[1].gaps == [0.0, 0.25]
    assert found[1].latencies == [0.625]  # the second one came early
    assert found[1].num_receives == 2
    shown = gap_table({"auto": [found], "torch": []}, 1.0, 2.0)
    assert [line.split()[0] for line in shown.splitlines()[3:]] == ["auto", "auto"]
    with pytest.raises(ValueError, match="no action"):
        stage_gaps(spans(("later", 0.0, 1.0)))


def test_a_lone_process_sleeps_at_least_as_long_as_asked() -> None:
    forwards, backwards = lone_sleeps_s((0.001, 0.002), 3)
    assert len(forwards) == len(backwards) == 3
    assert min(forwards) >= 0.001
    assert min(backwards) >= 0.002
