"""A run that goes on with other stages and another schedule is the run that was never stopped, step by step.

The model has batch statistics, dropout and a tied weight, AdamW and a cosine schedule; a mini-batch at the end of an
epoch is shorter than the others.

    synchronous    each other, with clipping
    2bw            each other: all weights are late by one update, on however many stages; clipping would be by stage
    pipedream      only itself: how late weights are depends on the stage

Asynchronous runs drain for a checkpoint: so does the one that is never stopped, at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from tests.exactness import same_bits
from tests.prepare.test_resume import cosine, outcome
from tests.trainers import adamw, trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

STEPS, SAVED, LAYERS = 7, 4, 6


class Layout(NamedTuple):
    """Layout of a run's stages; ``starts`` are the first layers of the stages behind the first, if sizes differ."""

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


def trainer(folder: Path, name: str, layout: Layout) -> raypipe.PipelineTrainer:
    """Train on 74 samples in mini-batches of 16, so that the fifth has 10."""
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(74, 16, generator=made), torch.randint(0, 16, (74,), generator=made))
    cuts = [f"layers.{start}" for start in layout.starts]
    return trainer_of(
        Net(),
        folder,
        name,
        optimizer=adamw,
        lr_scheduler=cosine,
        train_data=data,
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
        scaling_config=SimpleNamespace(num_workers=layout.workers),
    )


def pairs_that_differ(folder: Path, pairs: Sequence[tuple[Layout, Layout]]) -> list[str]:
    """Pairs of layouts (saved by, loaded by) with steps or parameters other than those of a run without a stop.

    Args:
        folder: empty.
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
        same = found_steps == steps and all(same_bits(found[key], state[key]) for key in state)
        wrong += [] if same else [f"{first} -> {then}"]
    return wrong


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0].schedule)
def test_every_layout_goes_on_from_another_of_its_family(family: tuple[Layout, ...], tmp_path: Path) -> None:
    """Each once, in a circle."""
    assert pairs_that_differ(tmp_path, list(zip(family, family[1:] + family[:1], strict=True))) == []
