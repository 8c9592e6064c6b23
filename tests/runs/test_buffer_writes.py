"""Buffers of the model itself that forward assigns to: as plain PyTorch, and the model can be cut behind them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.testing import reference

pytestmark = pytest.mark.engine

Step = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Does something with its buffers before the second of four layers."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.step = nn.Linear(6, 8), nn.Linear(8, 3), step
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("square", torch.arange(16.0).view(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(self, self.first(x))
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.last(x)


def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return x


def counts_anew(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps = net.steps + 1
    return x


def averages(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean *= 0.9
    net.mean += 0.1 * x.detach().mean(0)
    return x


def averages_without_gradients(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
    return x


def multiplies_before(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The backward needs the old one."""
    x = x * net.mean
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)
    return x


def changes_later(net: Net, x: torch.Tensor) -> torch.Tensor:
    new = 0.9 * net.mean
    net.mean = new
    x = torch.tanh(x)
    new.add_(x.detach().mean(0), alpha=0.1)
    return x


def turns(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.square = net.square.t()
    return x


STEPS: list[Step] = [
    counts, counts_anew, averages, averages_without_gradients, multiplies_before, changes_later, turns,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_forward_assigns_is_written_and_the_model_is_cut_behind_it(step: Step, tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=drawn), torch.randint(0, 3, (24,), generator=drawn))
    pipeline = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=4, partitioner="parameters")
    what = {"loss_fn": functional.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    wanted = reference(Net(step), **what, train_data=data, pipeline=pipeline, num_steps=6)
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    trainer = PipelineTrainer(Net(step), **what, train_data=data, pipeline=pipeline, run_config=place)
    trainer.fit(num_steps=6, local=True, progress=False)
    found = load_state_dict(tmp_path / "run")
    expected = {**wanted.parameters, **wanted.buffers}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    begun = Net(step).state_dict()
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in wanted.buffers.items()) or step is turns
