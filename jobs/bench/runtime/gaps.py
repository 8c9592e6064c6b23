"""Time of one traced step, stage by stage: computing, gaps between actions, sends and messages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jobs.lib.common import median, quantile, table

__all__ = ["StageGaps", "gap_table", "stage_gaps"]

_COMPUTE = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d+)")


class StageGaps(NamedTuple):
    """Times of one stage in one traced step; lists of seconds.

    Attributes:
        forwards, backwards: how long each took.
        gaps: from the end of a compute action to the start of the next, bubbles included.
        sends: how long the calling thread was busy handing a message over.
        latencies: from the start of a SEND to the end of its RECV, if the receiver was already waiting.
        num_receives: number of all RECVs; the others found their message and cost nothing.
        tail_s: from the end of the last compute action to the end of the optimizer step.
    """

    forwards: list[float]
    backwards: list[float]
    gaps: list[float]
    sends: list[float]
    latencies: list[float]
    num_receives: int
    tail_s: float


def stage_gaps(rows: Iterable[Mapping[str, Any]]) -> dict[int, StageGaps]:
    """Compute times of every stage from the measured rows of ``timeline/spans.parquet``, which share one clock.

    Args:
        rows: with ``action`` (as in 1RECV_F0), ``start_s`` and ``end_s``; simulated rows left out.
    """
    spans: dict[int, list[tuple[float, float, str, int]]] = {}
    sent_s: dict[tuple[int, str, int], float] = {}
    for row in rows:
        match = _ACTION.fullmatch(row["action"])
        if match is None:
            raise ValueError(f"{row['action']!r} is no action")
        stage, op, microbatch = int(match[1]), match[2], int(match[3])
        spans.setdefault(stage, []).append((row["start_s"], row["end_s"], op, microbatch))
        if op in ("SEND_F", "SEND_B"):
            sent_s[stage, op, microbatch] = row["start_s"]
    found = {}
    for stage, own in sorted(spans.items()):
        own.sort()
        compute = [span for span in own if span[2] in _COMPUTE]
        receives = [span for span in own if span[2] in ("RECV_F", "RECV_B")]
        latencies = []
        for start_s, end_s, op, microbatch in receives:
            begin_s = sent_s.get((stage - 1 if op == "RECV_F" else stage + 1, op.replace("RECV", "SEND"), microbatch))
            if begin_s is not None and start_s < begin_s:
                latencies.append(end_s - begin_s)
        found[stage] = StageGaps(
            forwards=[end - start for start, end, op, _ in compute if op == "F"],
            backwards=[end - start for start, end, op, _ in compute if op == "B"],
            gaps=[after[0] - before[1] for before, after in itertools.pairwise(compute)],
            sends=[end - start for start, end, op, _ in own if op.startswith("SEND")],
            latencies=latencies,
            num_receives=len(receives),
            tail_s=own[-1][1] - compute[-1][1] if compute else 0.0,
        )
    return found


def gap_table(traced: Mapping[str, Sequence[Mapping[int, StageGaps]]], forward_s: float, backward_s: float) -> str:
    """Format microseconds by candidate and stage, over all traced steps; f and b are subtracted from passes.

    Args:
        traced: by candidate, what ``stage_gaps`` found in each of its runs.
    """

    def both(values: Sequence[float], less_s: float = 0.0) -> str:
        low, high = (f"{(v - less_s) * 1e6:.0f}" for v in (median(values), quantile(values, 0.9))) if values else "--"
        return f"{low} / {high}"

    rows = []
    for candidate, runs in traced.items():
        for stage in runs[0] if runs else ():
            parts = [run[stage] for run in runs]
            forwards, backwards, gaps, sends, latencies = (
                list(itertools.chain(*lists)) for lists in zip(*(part[:5] for part in parts), strict=True)
            )
            rows.append(
                [f"{candidate} {stage}", both(forwards, forward_s), both(backwards, backward_s), both(gaps),
                 both(sends), both(latencies), f"{len(latencies)} of {sum(part.num_receives for part in parts)}",
                 both([part.tail_s for part in parts])]
            )  # fmt: skip
    columns = ("stage", "F - f", "B - b", "gap", "send", "message", "waited", "tail")
    return table("traced steps, microseconds, median / p90", columns, rows)
