"""Runs that are stopped with one layout and go on with another: each must be the run that was never stopped.

    python jobs/check/resume.py

    saved by      loaded by     (stages/workers schedule, ! for stages of uneven size)
    4/2 zb-v      3/3 slack!    steps equal: loss and gradient norm; parameters equal to the bit

Every pair of layouts of a family is tried, in threads: a model with batch statistics, dropout and a tied weight, AdamW
and a cosine schedule, a mini-batch at the end of an epoch that is shorter than the others. The last line is JSON.

    synchronous    each other, with clipping
    2bw            each other: all weights are late by one update, on however many stages; clipping would be by stage
    pipedream      only itself: how late weights are depends on the stage

Runs of an asynchronous schedule run empty for a checkpoint: so does the one that is never stopped, at the same step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import pyarrow.parquet as pq
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.machine import machine_line

STEPS, SAVED, LAYERS = 7, 4, 6


class Layout(NamedTuple):
    """Of a run's stages; ``starts`` are the layers at which they begin but the first, where they are of uneven size."""

    stages: int
    workers: int
    schedule: str
    starts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.stages}/{self.workers} {self.schedule}{'!' * bool(self.starts)}"


LAYOUTS = (
    Layout(1, 1, "gpipe"),
    Layout(2, 2, "1f1b"),
    Layout(2, 2, "kfkb", (5,)),
    Layout(3, 3, "slack", (1, 2)),
    Layout(4, 4, "zb-h1"),
    Layout(5, 5, "1f1b"),
    Layout(4, 2, "interleaved"),
    Layout(6, 2, "interleaved"),
    Layout(4, 2, "zb-v", (1, 2, 5)),
    Layout(6, 3, "zb-v"),
)


TWO_VERSIONS = (
    Layout(1, 1, "2bw"),
    Layout(2, 2, "2bw"),
    Layout(3, 3, "2bw", (1, 2)),
    Layout(4, 4, "2bw"),
)
LATE = (
    Layout(2, 2, "pipedream", (5,)),
    Layout(4, 4, "pipedream"),
)
FAMILIES = (LAYOUTS, TWO_VERSIONS, *((late,) for late in LATE))


class Net(torch.nn.Module):
    """Layers with batch statistics and dropout; the last one uses the first one's weight again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Tanh()
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(x, self.first.weight)


def adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def trainer(folder: Path, name: str, layout: Layout) -> raypipe.PipelineTrainer:
    """Of 74 samples in mini-batches of 16, so that the fifth has 10."""
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(74, 16, generator=made), torch.randint(0, 16, (74,), generator=made))
    cuts = [f"layers.{start}" for start in layout.starts]
    return raypipe.PipelineTrainer(
        Net(),
        loss_fn=functional.cross_entropy,
        optimizer=adamw,
        lr_scheduler=cosine,
        train_data=data,
        pipeline=raypipe.PipelineConfig(
            num_stages=layout.stages,
            partitioner=cuts or "parameters",
            minibatch_size=16,
            num_microbatches=8,
            schedule=layout.schedule,
            update_interval=layout.stages if layout.schedule == "pipedream" else "auto",  # as a tied weight needs
            max_grad_norm=0.5 if layout in LAYOUTS else None,
            checkpoint_interval_steps=SAVED,
            loss_reduction="mean",
            verify="off",
        ),
        scaling_config=SimpleNamespace(num_workers=layout.workers),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )


def outcome(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    """(step, samples, loss, gradient norm) of every step, and the parameters."""
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    steps = [(row["step"], row["samples"], row["loss"], row["grad_norm"]) for row in rows]
    return steps, raypipe.load_state_dict(folder)


def pairs_that_differ(folder: Path, pairs: Sequence[tuple[Layout, Layout]]) -> list[str]:
    """Of those whose steps or parameters are not those of the run that was never stopped.

    Args:
        folder: an empty one.
        pairs: of layouts of one family.
    """
    trainer(folder, "whole", pairs[0][0]).fit(STEPS, local=True, progress=False)
    steps, state = outcome(folder / "whole")
    wrong = []
    for number, (first, then) in enumerate(pairs):
        name = f"pair-{number}"
        trainer(folder, name, first).fit(SAVED, local=True, progress=False)
        trainer(folder, name, then).fit(STEPS, local=True, progress=False)
        found_steps, found = outcome(folder / name)
        same = found_steps == steps and all(torch.equal(found[key], state[key]) for key in state)
        print(f"{first!s:16} {then!s:16} {'equal' if same else 'DIFFERS'}", flush=True)
        wrong += [] if same else [f"{first} -> {then}"]
    return wrong


def main() -> int:
    """All pairs of all families."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(machine_line())
    count, wrong = 0, list[str]()
    for family in FAMILIES:
        pairs = list(itertools.product(family, family))
        count += len(pairs)
        with tempfile.TemporaryDirectory(prefix="resume-") as name:
            wrong += pairs_that_differ(Path(name), pairs)
    print(json.dumps({"check": "resume", "figures": {"pairs": count, "different": wrong}}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
