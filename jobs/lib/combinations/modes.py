"""Which weight versions the micro-batches of a combination meet, by rules that nothing of raypipe's tells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jobs.lib.combinations.drawn import ASYNCHRONOUS, lanes_of, stages_of
from tests.emulators.versions import Mode, two_buffered

__all__ = ["mode_of"]


def mode_of(fields: Mapping[str, Any], learns: list[bool]) -> Mode | None:
    """As tests/emulators has it, for any slack, replicas and first stages that learn nothing; None where all wait.

    Args:
        fields: of PipelineConfig.
        learns: by stage.
    """
    schedule, stages, count = fields.get("schedule", "auto"), stages_of(fields), fields["num_microbatches"]
    if schedule not in ASYNCHRONOUS:
        return None
    if schedule == "2bw":
        return two_buffered(count)
    first = learns.index(True) if fields.get("vertical_sync") else 0  # below it there are no versions to stamp
    every = fields.get("update_interval")
    replicas = fields.get("num_replicas", 1)
    counts = (replicas if isinstance(replicas, list) else [replicas] * stages)[first:]
    slack = fields.get("slack", 1)
    hops = slack if isinstance(slack, list) else [slack] * (stages - 1)
    if every is None and "weight_versions" in fields:
        least = sum(hops) / (fields["weight_versions"] - 1)
        every = next(u for u in range(1, count + 1) if count % u == 0 and u >= least)
    hops = hops[first:]
    every = every or lanes_of(fields)

    def version(stage: int, k: int) -> int:
        at = 0 if fields.get("vertical_sync") else max(0, stage - first)
        ahead = sum(hop * behind for hop, behind in zip(hops[at:], counts[at + 1 :], strict=True))
        own = counts[at]  # each replica runs so many of its own ahead, of one in ``own`` micro-batches
        return max(0, (k // own - math.ceil(ahead / own)) // (every // own))

    return Mode(schedule, every, version)
