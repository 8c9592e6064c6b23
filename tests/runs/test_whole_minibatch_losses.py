"""Losses as people write them, by loss_over="auto", against the gradients of plain PyTorch on the whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.data.open_data import open_data
from tests.exactness import Recorder
from tests.trainers import trainer_of
from tests.zoo.cases.dense import perceptron
from tests.zoo.cases.losses import Views, batch_hard, contrastive, dice, nt_xent, segmenter
from tests.zoo.samples import masks, numbers, vectors

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
SAMPLES, CLASSES = 8, 5
"""Samples of a mini-batch, of which an epoch has two."""


class Margin(nn.Module):
    """ArcFace: cosines of embeddings and the vectors of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = perceptron(), nn.Parameter(torch.randn(CLASSES, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.body(x), dim=-1) @ functional.normalize(self.classes, dim=-1).T


class Own(nn.Module):
    """Returns the loss of another model's output."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return {"loss": self.loss_fn(self.model(x), target)}


class Stacked(Views):
    """Returns both views of all samples, one after the other."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.encode(torch.cat([x, x.flip(-1)]))


def nt_xent_of_stacked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nt_xent(output.chunk(2), target)


def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    angle = output.clamp(-1 + 1e-6, 1 - 1e-6).acos() + 0.3 * functional.one_hot(target, CLASSES)
    return functional.cross_entropy(8 * angle.cos(), target)


def stacked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Two averages over samples, and one over the labels that are not 0."""
    each = functional.cross_entropy(output, target, reduction="none")
    kept = (target != 0).to(output.dtype)
    return torch.stack([each.mean(), 0.1 * output.square().mean(), (each * kept).sum() / kept.sum()]).mean()


def listed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As ``stacked``, summed as a list."""
    each = functional.cross_entropy(output, target, reduction="none")
    kept = (target != 0).to(output.dtype)
    terms = [each.mean(), 0.1 * output.square().mean(), (each * kept).sum() / kept.sum()]
    return sum(weight * term for weight, term in zip((0.2, 0.3, 0.5), terms, strict=True))  # type: ignore[return-value]


LOSSES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[int], TensorDataset]]] = {
    "InfoNCE": (perceptron, contrastive, numbers),
    "SimCLR": (Views, nt_xent, numbers),
    "SimCLR, stacked": (Stacked, nt_xent_of_stacked, numbers),
    "triplets": (perceptron, batch_hard, vectors),
    "Dice": (segmenter, dice, masks),
    "ArcFace": (Margin, margin, vectors),
    "stack": (perceptron, stacked, vectors),
    "list": (perceptron, listed, vectors),
}


UNSEEN = pytest.mark.xfail(strict=True, reason="terms in a stack are not seen, and few rows do not show their weights")
CASES = [
    pytest.param(name, own, id=f"{name}, {'own' if own else 'loss_fn'}") for name in LOSSES for own in (False, True)
]


@pytest.mark.parametrize(("name", "own"), CASES)
@pytest.mark.parametrize(("count", "replicas"), [(2, [1, 2]), (4, [2, 1]), (4, [2, 2]), (8, [1, 2, 1]), (8, [1, 2])])
def test_gradients_are_those_of_the_mini_batch(
    name: str, own: bool, count: int, replicas: list[int], tmp_path: Path
) -> None:
    """In float64, where a wrong gradient cannot be mistaken for rounding."""
    make, loss_fn, samples = LOSSES[name]
    tensors = samples(2 * SAMPLES).tensors
    data = TensorDataset(*(x.double() if x.is_floating_point() else x for x in tensors))

    def built() -> nn.Module:
        torch.manual_seed(1)
        return (Own(make(), loss_fn) if own else make()).double()

    recorder, model = Recorder(torch.optim.SGD, lr=0.1), built()
    x, target = open_data(data, seed=0).read(0, 0, SAMPLES, (0, 1))
    loss: Any = model(x, target)["loss"] if own else loss_fn(model(x), target)  # type: ignore[arg-type]
    loss.backward()
    made = trainer_of(
        built(), tmp_path, loss_fn=None if own else loss_fn, optimizer=recorder, train_data=data, verify="off",
        num_stages=len(replicas), num_microbatches=count, num_replicas=replicas,
    )  # fmt: skip
    made.plan()
    recorder.steps.clear()
    (record,) = made.fit(num_steps=1, local=True, progress=False).records
    gradients = {parameter: p.grad for parameter, p in model.named_parameters()}
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(recorder.steps[0][parameter], gradient, rtol=1e-9, atol=1e-13, msg=parameter)
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients.values() if gradient is not None])
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    assert record.grad_norm == pytest.approx(float(norm), rel=1e-9)
