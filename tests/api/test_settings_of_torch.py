"""What a script says of torch itself holds on the workers too: another element type for what forward makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.runtime.workers.fleet import Fleet
from tests.runtime.on_fleet import start_on

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Ramp(nn.Module):
    """An addend of the default element type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(0, 1, x.shape[1]) / 3


def trainer(folder: Path, name: str) -> PipelineTrainer:
    torch.manual_seed(3)
    return PipelineTrainer(
        nn.Sequential(nn.Linear(6, 8), Ramp(), nn.Tanh(), nn.Linear(8, 8), Ramp(), nn.Linear(8, 3)),
        optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.cross_entropy,
        train_data=TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,))),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )  # fmt: skip


def test_workers_compute_in_the_element_type_of_the_script(fleet: Fleet, tmp_path: Path) -> None:
    """And in their own again for a run of a script that says nothing."""
    start_on(fleet, trainer(tmp_path, "single"), 3).wait()
    torch.set_default_dtype(torch.float64)
    try:
        trainer(tmp_path, "threads").fit(num_steps=3, local=True, progress=False)
        start_on(fleet, trainer(tmp_path, "actors"), 3).wait()
    finally:
        torch.set_default_dtype(torch.float32)
    start_on(fleet, trainer(tmp_path, "single again"), 3).wait()
    for one, other in (("threads", "actors"), ("single", "single again")):
        wanted, found = load_state_dict(tmp_path / one), load_state_dict(tmp_path / other)
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert found["0.weight"].dtype == torch.float32
