"""What a script says to torch holds on the workers too: its settings, and the operations that its modules register."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.runtime.fleet.fleet import Fleet
from tests.runtime.on_fleet import start_on

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Ramp(nn.Module):
    """An addend of the default element type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(0, 1, x.shape[1]) / 3


def ramps() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Ramp(), nn.Tanh(), nn.Linear(8, 8), Ramp(), nn.Linear(8, 3))


def trainer(folder: Path, name: str, model: nn.Module, loss_fn: Any = cross_entropy) -> PipelineTrainer:
    torch.manual_seed(4)
    return PipelineTrainer(
        model, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=loss_fn,
        train_data=TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,))),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )  # fmt: skip


def test_workers_compute_in_the_element_type_of_the_script(fleet: Fleet, tmp_path: Path) -> None:
    """And in their own again for a run of a script that says nothing."""
    start_on(fleet, trainer(tmp_path, "single", ramps()), 3).wait()
    torch.set_default_dtype(torch.float64)
    try:
        trainer(tmp_path, "threads", ramps()).fit(num_steps=3, local=True, progress=False)
        start_on(fleet, trainer(tmp_path, "actors", ramps()), 3).wait()
    finally:
        torch.set_default_dtype(torch.float32)
    start_on(fleet, trainer(tmp_path, "single again", ramps()), 3).wait()
    for one, other in (("threads", "actors"), ("single", "single again")):
        wanted, found = load_state_dict(tmp_path / one), load_state_dict(tmp_path / other)
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert found["0.weight"].dtype == torch.float32


def test_workers_know_what_a_module_registers_with_torch(fleet: Fleet, tmp_path: Path) -> None:
    """Their processes have not imported it, nor do they know the structure that it returns."""
    from tests.operations_of_ours import Squaring

    made = [trainer(tmp_path, name, Squaring(), lambda x, y: cross_entropy(x.logits, y)) for name in ("threads", "run")]
    wanted = made[0].fit(num_steps=2, local=True, progress=False)
    assert start_on(fleet, made[1], 2).wait().records[-1].loss == wanted.records[-1].loss
