"""The rules of weight versions as formulas: what the table in raypipe.ir.weights says."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.weights import VersionRule


def version_of(rule: VersionRule, microbatch: int, interval: int, warmups: Sequence[int], stage: int) -> int:
    """The version that a micro-batch uses on a stage, counted from the last empty pipeline; updates never put off.

    Args:
        microbatch: k, counted likewise.
        interval: u.
        warmups: w_s by stage.
    """
    match rule:
        case VersionRule.NEWEST:
            return max(0, (microbatch - warmups[stage]) // interval)
        case VersionRule.STAMPED:
            return max(0, (microbatch - warmups[0]) // interval)
        case VersionRule.DELAYED:
            return max(0, microbatch // interval - 1)
