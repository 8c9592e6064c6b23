"""How fast a copy is sent: a share of the time, and almost nothing while boundary messages wait."""

from __future__ import annotations

import pytest

from raypipe.runtime.workers.pacing import LEAST_BYTES, LEAST_SHARE, MOST_BYTES, SHARE, Pace


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, busy_until_s: float = 0.0) -> None:
        self.now_s, self._busy_until_s = 100.0, 100.0 + busy_until_s
        self.stopped = False

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def pace(self) -> Pace:
        return Pace(
            lambda: self.now_s < self._busy_until_s, lambda: self.stopped, LEAST_BYTES, lambda: self.now_s, self.sleep
        )


@pytest.mark.parametrize(
    ("busy_s", "pause_s"),
    [(0.0, 0.1 * (1 / SHARE - 1)), (2.0, 2.0), (1e6, 0.1 * (1 / LEAST_SHARE - 1))],
    ids=["idle", "a message", "always busy"],
)
def test_the_pause_after_a_parcel(busy_s: float, pause_s: float) -> None:
    clock = Clock(busy_s)
    clock.pace().pause(0.1)
    assert clock.now_s - 100.0 == pytest.approx(pause_s, abs=0.01)


def test_it_ends_when_it_is_stopped() -> None:
    clock = Clock(1e6)
    clock.stopped = True
    clock.pace().pause(10.0)
    assert clock.now_s == 100.0


def test_parcels_grow_on_a_quick_link_and_shrink_on_a_slow_one() -> None:
    pace = Clock().pace()
    for _ in range(9):
        pace.sent(pace.parcel_bytes, 1e-4)
    assert pace.parcel_bytes == MOST_BYTES
    pace.sent(1, 9.0)  # the last parcel of a copy says nothing
    assert pace.parcel_bytes == MOST_BYTES
    for _ in range(9):
        pace.sent(pace.parcel_bytes // 2, 1.0)  # as large as the whole copy
    assert pace.parcel_bytes == LEAST_BYTES
