"""What weight versions cost in memory: stage 0 of four, measured from outside, with a bounded ring and with stashing.

    stash        PipeDream as published: an update per micro-batch, four versions on stage 0
    ring         the same schedule with weight_versions=2, so an update every four micro-batches
    2bw, gpipe   beside them, and lv, the ring with encoded links
    torch_1f1b   torch.distributed.pipelining over gloo; so is torch_gpipe

``ring_vs_stash_<optimizer>`` is the whole peak of stage 0's process, less that of a model of no size: weights and
their versions, gradients, optimizer state, activations, messages. By weights alone it is (2 + 1 + 1) / (4 + 1 + 1) =
0.667 with SGD-momentum and (2 + 1 + 2) / (4 + 1 + 2) = 0.714 with AdamW. ``predicted_vs_measured`` is the plan's number
over the measured one where they differ most. In a second run on stages that sleep (10 ms forward, 20 ms backward) both
must be equally fast: ``ring_vs_stash_step`` is the ratio of their step times. See ``runs.py``; Linux only.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.bench.memory.runs import (
    CANDIDATES,
    MICROBATCHES,
    OPTIMIZERS,
    STAGES,
    Sizes,
    Watched,
    activation_share,
    peak_of,
    predicted,
    run,
    weight_bytes,
)
from jobs.bench.runtime.accelerators import blocks, loss_of
from jobs.lib import common
from jobs.lib.common import machine_line, median

MIB = 2**20
LAYOUT: dict[str, str] = {
    "SGD: peak / stashing's": r"(\w+)_vs_stash_sgd",
    "AdamW: peak / stashing's": r"(\w+)_vs_stash_adamw",
    "SGD: predicted / measured": r"predicted_vs_measured_(\w+)_sgd",
    "AdamW: predicted / measured": r"predicted_vs_measured_(\w+)_adamw",
}


class Settings(NamedTuple):
    """How much is measured."""

    sizes: Sizes = Sizes()
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    rounds: int = 3
    emulated_steps: int = 20
    local: bool = False


QUICK = Settings(Sizes(width=768, num_steps=5), ("sgd",), ("stash", "ring"), 1, 8)


def step_s(candidate: str, settings: Settings, handicap_s: float = 0.0) -> float:
    """Median seconds per mini-batch on stages that sleep, without the first and the last ones."""
    steps = settings.emulated_steps
    count = MICROBATCHES * steps
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        result = raypipe.PipelineTrainer(
            nn.Sequential(*blocks(STAGES, handicap_s)),
            loss_fn=loss_of,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
            train_data=TensorDataset(torch.ones(count, 1), torch.ones(count, 1)),
            pipeline=raypipe.PipelineConfig(
                num_stages=STAGES,
                minibatch_size=MICROBATCHES,
                num_microbatches=MICROBATCHES,
                partitioner=tuple(str(stage) for stage in range(1, STAGES)),
                **(CANDIDATES[candidate] or {}),
            ),
            scaling_config=SimpleNamespace(num_workers=STAGES, resources_per_worker={"CPU": 0.1}),
            run_config=SimpleNamespace(name="bench", storage_path=folder),
        ).fit(num_steps=steps, local=settings.local, progress=False)
    return median(record.seconds for record in result.records[2:-1])


Peaks = dict[tuple[str, str], int]
"""Bytes by candidate and optimizer."""


def figures_of(peaks: Peaks, told: dict[str, dict[str, int]], steps_s: dict[str, float]) -> dict[str, float]:
    """Everything in the last line.

    Args:
        peaks: measured, without the model of no size.
        told: predicted, bytes by purpose, by ``<candidate>_<optimizer>``.
        steps_s: on emulated stages, by candidate.
    """
    figures = {}
    for optimizer in dict.fromkeys(optimizer for _, optimizer in peaks):
        stash = peaks["stash", optimizer]
        for candidate, other in peaks:
            if other == optimizer and candidate != "stash":
                figures[f"{candidate}_vs_stash_{optimizer}"] = peaks[candidate, optimizer] / stash
    ratios = {
        f"{candidate}_{optimizer}": sum(told[f"{candidate}_{optimizer}"].values()) / peak
        for (candidate, optimizer), peak in peaks.items()
        if f"{candidate}_{optimizer}" in told
    }
    figures |= {f"predicted_vs_measured_{name}": ratio for name, ratio in ratios.items()}
    figures["predicted_vs_measured"] = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    figures["ring_vs_stash_step"] = steps_s["ring"] / steps_s["stash"]
    return figures


def measure(settings: Settings) -> tuple[dict[tuple[str, str], list[Watched]], list[Watched]]:
    """Looks at stage 0 of every run, and at that of a model of no size."""
    nothing = settings.sizes._replace(width=8)
    floor = run(nothing, "stash", "sgd", local=settings.local)[0]
    found = {}
    for optimizer in settings.optimizers:
        for candidate in settings.candidates:
            base = run(nothing, candidate, "sgd")[0] if CANDIDATES[candidate] is None else floor
            looks = run(settings.sizes, candidate, optimizer, local=settings.local)[0]
            base_bytes = peak_of(base, nothing.num_steps)
            found[candidate, optimizer] = [look._replace(peak_bytes=look.peak_bytes - base_bytes) for look in looks]
            print(f"{candidate} {optimizer}: measured; {machine_line()}", flush=True)
    return found, floor


def main() -> int:
    """1 when a handicap did not show as predicted, else 0."""
    asked = common.arguments(__doc__, handicap=True)
    settings = QUICK if asked.quick else Settings()
    torch.set_num_threads(1)
    sizes = settings.sizes
    weight = weight_bytes(sizes)
    print(f"weights of stage 0 {weight / MIB:.1f} MiB; activations in flight {activation_share(sizes):.3f} of that")
    told = {name: plan.memory[0] for name, plan in predicted(sizes).items()}
    looks, floor = measure(settings)
    peaks = {key: peak_of(found, sizes.num_steps) for key, found in looks.items()}
    trials: dict[str, list[float]] = {"stash": [], "ring": []}
    slowed: list[float] = []
    for _ in range(settings.rounds):
        for candidate, kept in trials.items():
            kept.append(step_s(candidate, settings))
        if asked.handicap:
            slowed.append(step_s("ring", settings, asked.handicap))
    steps_s = {candidate: median(kept) for candidate, kept in trials.items()}
    figures = figures_of(peaks, told, steps_s)
    rows: list[list[Any]] = []
    for (candidate, optimizer), peak in peaks.items():
        name = f"{candidate}_{optimizer}"
        told_mib = f"{sum(told[name].values()) / MIB:.1f}" if name in told else "--"
        ratio = figures.get(f"{candidate}_vs_stash_{optimizer}", 1.0)
        rows.append([name, f"{peak / MIB:.1f}", f"{peak / weight:.2f}", told_mib, ratio])
    columns = ("run", "MiB", "of the weights", "predicted MiB", "/ stash")
    print("\n" + common.table(f"stage 0 at its fullest; {machine_line()}", columns, rows))
    steps_ms = {candidate: round(seconds * 1e3, 1) for candidate, seconds in steps_s.items()}
    print(f"emulated stages, ms per mini-batch of {MICROBATCHES} micro-batches: {steps_ms}")
    seen = True
    if asked.handicap:
        before, after = figures["ring_vs_stash_step"], median(slowed) / steps_s["stash"]
        moves_by = 2 * MICROBATCHES * asked.handicap / steps_s["stash"]
        seen = common.handicap_seen("ring on emulated stages", asked.handicap, before, after, moves_by)
    raw = {
        "looks": {" ".join(key): found for key, found in looks.items()},
        "floor": floor,
        "predicted": told,
        "emulated_step_s": trials,
        "sizes": sizes._asdict(),
    }
    common.finish("bench_memory", figures, raw, asked)
    return 0 if seen else 1
