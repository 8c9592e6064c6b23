"""Host time of a step: torch's profiler over all threads of plain PyTorch and of one stage.

Operations that one of them has and the other has not, or that take longer in one, stand first. On a GPU the calls of
CUDA are among them: launches, events, waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jobs.lib import common

__all__ = ["STEPS", "WARM_UP", "compared", "profiled"]

WARM_UP, STEPS = 5, 5
SHOWN = 40

Operations = Mapping[str, tuple[float, float]]
"""Calls of a step by name, and seconds of the host in them without what they call."""


def profiled(run: Iterator[Any], device: torch.device) -> Operations:
    """Profile some steps after a warm-up."""
    for _ in range(WARM_UP):
        next(run)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    ways: Callable[..., Any] = torch._C._profiler._ExperimentalConfig
    with profile(activities=kinds, experimental_config=ways(profile_all_threads=True)) as found:
        for _ in range(STEPS):
            next(run)
    return {one.key: (one.count / STEPS, one.self_cpu_time_total / STEPS / 1e6) for one in found.key_averages()}


def compared(plain: Operations, ours: Operations) -> str:
    """Format a table, the largest differences in seconds first."""
    nothing = (0.0, 0.0)
    pairs = {name: (plain.get(name, nothing), ours.get(name, nothing)) for name in {*plain, *ours}}
    first = sorted(pairs.items(), key=lambda item: -abs(item[1][1][1] - item[1][0][1]))[:SHOWN]
    rows = [
        (name, f"{calls:g}", f"{our_calls:g}", f"{seconds * 1e3:.3f}", f"{our_seconds * 1e3:.3f}")
        for name, ((calls, seconds), (our_calls, our_seconds)) in first
    ]
    whole = [f"{sum(seconds for _, seconds in one.values()) * 1e3:.1f}" for one in (plain, ours)]
    header = ("operation", "calls, plain", "calls, stage", "ms, plain", "ms, stage")
    return common.table("of a step, on the host, under the profiler", header, [*rows, ("all", "", "", *whole)])
