"""Tokens of every mini-batch: by which rule a column holds them, and that none is counted twice or for another step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.token_count import token_column

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("names", "example", "column"),
    [
        (("labels", "input_ids"), {"labels": IDS, "input_ids": IDS}, "input_ids"),
        (("targets", "tokens"), {0: IDS.byte(), 1: IDS.byte()}, 1),
        ((0, 1), {0: IDS, 1: IDS[:, 0]}, 0),
        ((0, 1), {0: IDS.byte(), 1: IDS[:, 0]}, None),  # pixels, perhaps
        ((0, 1), {0: IDS.float(), 1: IDS}, None),
        ((0, 1), {0: IDS[:, :1], 1: IDS}, None),
        (("x", "labels"), {"x": IDS, "labels": IDS}, None),
    ],
)
def test_which_column_holds_tokens(names: Any, example: Any, column: Any) -> None:
    assert token_column(names, example) == column


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_a_step_has_the_tokens_of_its_own_mini_batch(schedule: str, tmp_path: Path) -> None:
    """The last mini-batch of an epoch is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randint(0, 16, (20, 5)), torch.randint(0, 3, (20,)))
    made = PipelineTrainer(
        model, loss_fn=functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=data, run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=4, schedule=schedule, partitioner="parameters",
            loss_reduction="mean",
        ),
    )  # fmt: skip
    result = made.fit(num_steps=5, local=True, progress=False)
    assert [(record.samples, record.tokens) for record in result.records] == [
        (8, 40),
        (8, 40),
        (4, 20),
        (8, 40),
        (8, 40),
    ]
    assert result.metrics["tokens_per_s"] == pytest.approx(40 / result.records[-1].seconds)
    assert all(0 < record.goodput <= 1 for record in result.records)
    assert {"lr", "tokens", "goodput"} <= set(result.metrics_dataframe.columns)
