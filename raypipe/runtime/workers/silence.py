"""What a worker tells Prometheus when it does not hear its driver, from whom all other metrics of a run come.

share of driver_grace_s that has passed   0.02   ...   0.25   ...   0.9   0.02     1
gauge                                      --          0.25         0.9   0, --   the process ends
"""

from __future__ import annotations

from ray.util.metrics import Gauge

from raypipe.metrics import metric

__all__ = ["Silence"]

LONG = 0.25
"""A driver asks every worker several times within so much of the time."""


class Silence:
    """Of one worker. It makes its gauge when it needs it, which a worker of a driver that speaks never does.

    Attributes:
        run: value of the tag "run"; "" tells nobody.
    """

    def __init__(self) -> None:
        self.run = ""
        self._gauge: Gauge | None = None
        self._told = False

    def passed(self, share: float) -> None:
        """So much of the time has passed for which this worker goes on without a word from its driver."""
        if (share < LONG and not self._told) or not self.run:
            return
        if self._gauge is None:
            found = metric("driver_silence_fraction")
            self._gauge = Gauge(found.name, f"{found.meaning} Unit: {found.unit}.", tag_keys=found.tags)
        self._told = share >= LONG
        self._gauge.set(share if self._told else 0.0, tags={"run": self.run})
