"""What a sample raises that is no Exception ends a run on Ray at its step: no stage goes on without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.errors import DataError
from raypipe.runtime.workers.fleet import Fleet
from tests.runtime.on_fleet import start_on

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Panic(BaseException):
    """As Rust's libraries raise."""


class Panicking(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 43:
            raise Panic("called `Result::unwrap()`")
        return torch.full((4,), index / 64), torch.tensor(index % 3)


def test_a_panic_in_the_data_is_told_with_its_step_and_item(fleet: Fleet, tmp_path: Path) -> None:
    trainer = PipelineTrainer(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), loss_fn=functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1), train_data=Panicking(),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters", seed=4, verify="off"
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"Step \d: Item 43 of Panicking cannot be read .*Panic: called") as found:
        start_on(fleet, trainer, 8).wait(timeout_s=120)
    step = int(str(found.value).split("Step ")[1][0])
    table = tmp_path / "run" / "metrics.parquet"
    assert (pq.read_table(table).column("step").to_pylist() if table.exists() else []) == list(range(step))
