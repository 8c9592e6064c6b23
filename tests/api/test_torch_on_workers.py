"""What a script says to torch holds on the workers too: its settings, and the operations that its modules register."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer, load_state_dict
from raypipe.runtime.fleet.fleet import Fleet
from tests.exactness import unequal
from tests.runtime.on_fleet import start_on
from tests.trainers import trainer_of

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
    data = TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
    return trainer_of(model, folder, name, loss_fn=loss_fn, train_data=data, num_microbatches=2)


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
        assert unequal(tmp_path / one, tmp_path / other) == []
    assert load_state_dict(tmp_path / "single again")["0.weight"].dtype == torch.float32


def test_workers_know_what_a_module_registers_with_torch(fleet: Fleet, tmp_path: Path) -> None:
    """Their processes have not imported it, nor do they know the structure that it returns."""
    from tests.operations_of_ours import Squaring

    made = [trainer(tmp_path, name, Squaring(), lambda x, y: cross_entropy(x.logits, y)) for name in ("threads", "run")]
    wanted = made[0].fit(num_steps=2, local=True, progress=False)
    assert start_on(fleet, made[1], 2).wait().records[-1].loss == wanted.records[-1].loss
