"""Sending that nobody is to notice: a share of the time, small parcels, and never while something else waits to leave.

parcel   [==]              [==]       [===]
pause        [---3 x===---]    [busy--]     [---3 x ...
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]

SHARE = 0.25
"""Of the time that is spent sending where nothing else is under way."""
LEAST_SHARE = 0.02
"""The same where something always is: a copy must arrive some day."""
PARCEL_S = 0.25
"""What a parcel may take: a boundary message that comes meanwhile shares the link with it. Where nodes are busy, a
call takes 0.05 to 0.2 s whatever it carries, and small parcels keep a copy of 96 MB on its way for 20 s."""
LEAST_BYTES, MOST_BYTES = 1 << 20, 16 << 20
"""A call of an actor takes 4 or 5 processor milliseconds, so that few of them should do: 100 MB took 0.1 processor
seconds in parcels of 4 MiB, 0.5 in those of 1 MiB, 1.6 in those of 256 KiB."""
POLL_S, MOST_SLEEP_S = 0.002, 0.05


class Pace:
    """Of one sender.

    Attributes:
        parcel_bytes: that the next parcel should have.

    Args:
        busy: whether something else is queued or under way.
        stopped: whether to wait no longer.
        parcel_bytes: of the first parcel, as an earlier copy found it.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        stopped: Callable[[], bool],
        parcel_bytes: int = LEAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._stopped, self._clock, self._sleep = busy, stopped, clock, sleep
        self.parcel_bytes = parcel_bytes

    def sent(self, nbytes: int, took_s: float) -> None:
        """A parcel has arrived: find out how large the next one should be; one below LEAST_BYTES says nothing."""
        if nbytes >= LEAST_BYTES:
            wanted_bytes = PARCEL_S / max(took_s, 1e-6) * nbytes
            changed_bytes = min(2 * self.parcel_bytes, max(self.parcel_bytes / 2, wanted_bytes))
            self.parcel_bytes = int(min(MOST_BYTES, max(LEAST_BYTES, changed_bytes)))

    def pause(self, took_s: float) -> None:
        """Wait until the next parcel may go, after one that took so long."""
        now_s = self._clock()
        least_s, most_s = now_s + took_s * (1 / SHARE - 1), now_s + took_s * (1 / LEAST_SHARE - 1)
        while not self._stopped():
            now_s = self._clock()
            if now_s >= most_s or (now_s >= least_s and not self._busy()):
                return
            self._sleep(min(MOST_SLEEP_S, max(POLL_S, least_s - now_s)))
