"""Models that return something else in evaluation, as GoogLeNet, which leaves out its auxiliary outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from tests.exactness import same_bits

pytestmark = pytest.mark.engine

X, Y = torch.linspace(-1, 1, 96).view(16, 6), torch.arange(16) % 3
EX, EY = torch.linspace(-2, 1, 78).view(13, 6), torch.arange(13) % 3


class Switches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.head, self.aux = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        middle = torch.tanh(self.one(x))
        logits = self.head(torch.relu(self.two(middle)))
        if self.kind == "keys":
            return (
                {"logits": logits, "aux": self.aux(middle)} if self.training else {"probabilities": logits.softmax(1)}
            )
        if self.kind == "flag":
            return logits + self.aux(middle), self.training
        if self.kind == "gradients":
            return logits + self.aux(middle) if torch.is_grad_enabled() else logits
        return (logits, self.aux(middle)) if self.training else logits


def keys(output: Any, target: torch.Tensor) -> torch.Tensor:
    if "logits" in output:
        return functional.cross_entropy(output["logits"], target) + functional.cross_entropy(output["aux"], target)
    return functional.nll_loss(output["probabilities"].log(), target)


def flag(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[0], target) * (1 if output[1] else 2)


def fewer(output: Any, target: torch.Tensor) -> torch.Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return sum(functional.cross_entropy(part, target) for part in parts)  # type: ignore[return-value]


def gradients(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def tensors_of(output: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize("loss_fn", [keys, flag, fewer, gradients])
def test_evaluations_and_predictions_are_those_of_the_model(loss_fn: Any, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Switches(loss_fn.__name__)
    trainer = PipelineTrainer(
        model, loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=TensorDataset(X, Y),
        eval_data=TensorDataset(EX, EY), metrics={"width": lambda output, _: float(len(tensors_of(output)))},
        run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters", precision=precision,
            loss_reduction="mean",
        ),
    )  # fmt: skip
    result = trainer.fit(num_steps=3, local=True, progress=False)
    model.load_state_dict(load_state_dict(result.checkpoint))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        parts = [(x, y) for x, y in zip(EX.split(2), EY.split(2), strict=True)]
        wanted = [model(x) for x, _ in parts]
        losses = [loss_fn(output, y).float() for output, (_, y) in zip(wanted, parts, strict=True)]
        widths = [len(tensors_of(output)) for output in wanted]
    mean = sum(float(loss) * len(y) for loss, (_, y) in zip(losses, parts, strict=True)) / len(EY)
    assert result.metrics["eval_loss"] == pytest.approx(mean, rel=1e-6)
    assert result.metrics["eval_width"] == widths[0]
    found = trainer.predict(TensorDataset(EX), result.checkpoint, local=True)
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(wanted[0])
    for at, tensor in enumerate(tensors_of(found)):
        assert same_bits(tensor, torch.cat([tensors_of(output)[at] for output in wanted]))
