"""What messages took before they were compressed.

Small messages say little about large ones: behind a token bucket they pass at once, and the link looks free. So when a
codec is switched on, the controller keeps what the messages took until then, and uses it to score the choices that
compress less. It is forgotten when the link changes, and after a while in any case: a change that only large messages
would show can be found by no other way than trying them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from raypipe.planner.control.choice import Choice
from raypipe.planner.control.measured import Measured

__all__ = ["UncompressedTimes"]


@dataclass(frozen=True, slots=True)
class UncompressedTimes:
    """By place: link 0 forward, link 0 backward, link 1 forward, ...

    Attributes:
        seconds: that one message occupied the link for; 0 where it is not compressed or nobody knows; empty for none.
        num_microbatches: M of these messages; with another M their bytes change in proportion.
        until: step from which on this is forgotten.
    """

    seconds: tuple[float, ...] = ()
    num_microbatches: int = 1
    until: int = 0

    def at(self, step: int) -> UncompressedTimes:
        """What is still remembered in this step."""
        return self if step < self.until else UncompressedTimes()

    def without(self, links: Sequence[int]) -> UncompressedTimes:
        """After these links have changed."""
        return replace(self, seconds=tuple(0.0 if p // 2 in links else s for p, s in enumerate(self.seconds)))

    def after_switch(self, before: Choice, after: Choice, measured: Measured, until: int) -> UncompressedTimes:
        """Keep what messages took under ``before`` where ``after`` compresses them and ``before`` did not.

        Args:
            measured: with ``before``.
            until: for what is new.
        """
        count, seconds, new = before.num_microbatches, list[float](), False
        known = self._seconds_with(count) or (0.0,) * len(measured.links)
        for place, known_s in enumerate(known):
            hop, forward = measured.hop_of(place), place % 2 == 0
            newest_s = measured.draws_s(place)[-count:]
            if after.codec(hop, forward) == "none":
                seconds.append(0.0)
            elif before.codec(hop, forward) == "none" and newest_s:
                seconds.append(median(newest_s))
                new = True
            else:
                seconds.append(known_s)
        return UncompressedTimes(tuple(seconds), count, until if new else self.until)

    def added_to(self, measured: Measured, ratios: Sequence[float]) -> Measured:
        """What was measured, with what is remembered.

        Args:
            ratios: by place, of the codecs in use.
        """
        if not self.seconds:
            return measured
        return replace(measured, whole_s=self._seconds_with(measured.num_microbatches), ratios=tuple(ratios))

    def _seconds_with(self, num_microbatches: int) -> tuple[float, ...]:
        return tuple(s * self.num_microbatches / num_microbatches for s in self.seconds)
