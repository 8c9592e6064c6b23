"""State that a backward changes is refused before anything trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.errors import CaptureError

pytestmark = pytest.mark.engine

X, Y = torch.linspace(-1, 1, 96).view(16, 6), torch.arange(16) % 3


class Block(nn.Module):
    """Runs its forward again in the backward."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda h: self.norm(self.linear(h)), x, use_reentrant=False)


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        ctx.calls = calls
        return x * (1 + calls / 100)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.calls += 1
        return gradient, None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counting.apply(x, self.calls)


class Whole(nn.Module):
    """The same in a model that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def trainer(folder: Path, kind: type[nn.Module], middle: nn.Module, **fields: Any) -> PipelineTrainer:
    layers = (nn.Linear(6, 16), middle, nn.ReLU(), nn.Linear(16, 3))
    return PipelineTrainer(
        kind(*layers), loss_fn=functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=TensorDataset(X, Y), run_config=SimpleNamespace(name="run", storage_path=str(folder)),
        pipeline=PipelineConfig(
            **{"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters"} | fields
        ),
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"verify": "off"}, {"recompute": "always"}, {"num_microbatches": 1}])
@pytest.mark.parametrize(
    ("middle", "buffer"), [(lambda: Block(nn.BatchNorm1d), "1.norm.running_mean"), (Counter, "1.calls")]
)
def test_in_children_it_is_refused_by_the_plan(
    middle: Any, buffer: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=f"The backward changes the buffer '{buffer}'"):
        trainer(tmp_path, nn.Sequential, middle(), **fields).plan()


def test_in_a_traced_model_it_is_refused_by_the_first_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, Whole, Block(nn.BatchNorm1d))
    with pytest.raises(CaptureError, match=r"The backward changes the buffer 'net.1.norm.running_mean'.*recompute="):
        made.fit(num_steps=1, local=True, progress=False)


@pytest.mark.parametrize("kind", [nn.Sequential, Whole])
def test_a_checkpoint_around_what_changes_nothing_trains(kind: type[nn.Module], tmp_path: Path) -> None:
    trainer(tmp_path, kind, Block(nn.LayerNorm)).fit(num_steps=1, local=True, progress=False)
