"""What a loss_fn averages over, and what it fails with, where only the workers hold the model's weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from raypipe.errors import CaptureError, ConfigError, DataError
from raypipe.preflight import loss_on_rows, random_outputs
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

cross_entropy = nn.functional.cross_entropy


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trainer(loss_fn: Any, target: torch.Tensor, **given: Any) -> raypipe.PipelineTrainer:
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), target)
    return trainer_of(model, loss_fn=loss_fn, train_data=data, weights_on="workers", **{"num_microbatches": 2} | given)


CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
IGNORING = torch.tensor([0, -100, 1, 2, -100, -100, 1, 0])


def in_python(reduction: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Looks at values, so that it cannot be traced."""
    kept = [i for i in range(len(target)) if int(target[i]) != -100]
    return cross_entropy(output[kept], target[kept], reduction=reduction)


def likelihood(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Takes probabilities only, and cannot be traced."""
    if float(output.min()) < 0 or float(output.max()) > 1:
        raise ValueError("no probabilities")
    return nn.functional.binary_cross_entropy(output, nn.functional.one_hot(target, 3).float())


@pytest.mark.parametrize(
    ("loss_fn", "target", "expected"),
    [
        (partial(in_python, "sum"), CLASSES, "sum"),
        (partial(in_python, "mean"), CLASSES, "mean"),
        (partial(in_python, "mean"), IGNORING, "valid_tokens"),
        (likelihood, CLASSES, "mean"),
    ],
)
def test_a_loss_that_cannot_be_traced_is_tried_on_drawn_outputs(loss_fn: Any, target: Any, expected: str) -> None:
    assert trainer(loss_fn, target)._prepared().settings.loss_reduction == expected


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, None] - output[None]).pow(2).mean() + cross_entropy(output, target)


def test_a_loss_that_compares_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights of micro-batches make the loss of a mini-batch"):
        trainer(spread, CLASSES, loss_over="microbatch").plan()
    assert trainer(spread, CLASSES).plan().schedule.kind == "gpipe"
    trainer(spread, CLASSES, num_microbatches=1).plan()


class TwoViews(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x, x.flip(-1)]))


def compared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    one, two = output.chunk(2)
    return cross_entropy(one @ two.T, torch.arange(len(one))) + 0 * target.sum()


def test_views_of_all_samples_are_not_joined_untried() -> None:
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), CLASSES)
    made = trainer_of(lambda: TwoViews(*model()), loss_fn=compared, train_data=data, num_microbatches=2)
    assert made.plan().schedule.kind == "gpipe"
    made = trainer_of(
        lambda: TwoViews(*model()), loss_fn=compared, train_data=data, num_microbatches=2, weights_on="workers"
    )
    with pytest.raises(ConfigError, match=r"loss_over='minibatch' is not possible|no weights of micro-batches"):
        made.plan()


class Scored(nn.Module):
    """Returns its own loss: a mean over samples, and ``term`` of its outputs."""

    def __init__(self, term: Any) -> None:
        super().__init__()
        self.net, self.term = model(), term

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = self.net(x)
        return cross_entropy(output, labels) + 1e-3 * self.term(output)


def balance(output: torch.Tensor) -> torch.Tensor:
    """As the load balancing of experts: a product of two averages over the batch."""
    share = output.softmax(-1).mean(0)
    return (share * share.detach().roll(1)).sum()


def own_loss(term: Any, **given: Any) -> raypipe.PipelineTrainer:
    rows = zip(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), CLASSES, strict=True)
    data = [{"x": x, "labels": label} for x, label in rows]
    return trainer_of(
        lambda: Scored(term), loss_fn=None, train_data=data, weights_on="workers", **{"num_microbatches": 2} | given
    )


@pytest.mark.parametrize("term", [balance, lambda x: (x.softmax(-1).mean(0) ** 2).mean()])
def test_a_term_that_a_large_model_cannot_be_tried_with_is_refused(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    with pytest.raises(ConfigError, match=r"the graph of the loss does not show what its term made by (sum|mean)"):
        own_loss(term).plan()
    own_loss(term, num_microbatches=1).plan()
    own_loss(term, loss_reduction="per_microbatch").plan()


@pytest.mark.parametrize(
    "term",
    [
        lambda x: x.logsumexp(-1).square().mean(),
        lambda x: x.logsumexp(-1).square().mean(0),
        lambda x: x.square().mean(dim=(0, 1)),
    ],
)
def test_terms_that_average_over_samples_need_no_trial(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    own_loss(term).plan()


def test_the_plan_says_why_weights_were_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not compared" not in own_loss(lambda _: 0.0).plan().explain()
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    words = "its weights are read off its graph and were not compared on rows: this process holds no weights of"
    assert words in own_loss(lambda _: 0.0).plan().explain()


@pytest.mark.parametrize(
    "term",
    [
        lambda x: torch.std_mean(x)[0],
        lambda x: x.logsumexp(-1).max(0).values,
        lambda x: x.sum(0).unbind()[0],
        lambda x: torch.linalg.slogdet(x.T @ x + torch.eye(3))[1],
        lambda x: torch.cond(x.sum() > 0, lambda x: (x.mean(),), lambda x: (x.sum(),), (x,))[0],
    ],
)
def test_a_term_that_is_a_part_of_a_result_is_unclear(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    own_loss(term, num_microbatches=1).plan()
    with pytest.raises(ConfigError, match="the graph of the loss does not show what its term made by getitem"):
        own_loss(term).plan()


class Balanced(nn.Module):
    """Returns scores and, as a mixture of experts, a term of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.net(x)
        return output, output.square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, y: cross_entropy(o[0], y) + 0.01 * o[1],
        lambda o, y: o[1],
        lambda o, y: torch.std_mean(o[0])[1],
        lambda o, y: o[0].logsumexp(-1).max(0).values,
    ],
)
def test_a_term_of_a_loss_fn_may_be_an_output_or_a_part_of_a_result(loss_fn: Any) -> None:
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), CLASSES)
    trainer_of(Balanced(), loss_fn=loss_fn, train_data=data, num_microbatches=1).plan()


def test_a_sum_that_is_said_to_be_a_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="averages over samples, but this one adds up"):
        trainer(nn.CrossEntropyLoss(reduction="sum"), CLASSES, loss_reduction="mean").plan()


def test_a_loss_that_can_neither_be_traced_nor_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_outputs, "MOST_BYTES", 8)
    loss_fn = partial(in_python, "sum")
    with pytest.raises(ConfigError, match=r"cannot be tried.*loss_reduction='mean'.*num_microbatches=1"):
        trainer(loss_fn, CLASSES).plan()
    trainer(loss_fn, CLASSES, loss_reduction="sum").plan()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (CLASSES + 3, r"out of bounds.*Number the classes of the target from 0"),
        (torch.zeros(8, 2), "loss_fn cannot take an output of"),
    ],
)
def test_an_error_of_the_first_step_is_raised_before(target: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        trainer(cross_entropy, target).plan()


@pytest.mark.parametrize("reduction", ["auto", "mean", "per_microbatch", "valid_tokens"])
def test_a_loss_that_draws_is_refused_without_weights_and_with_one_micro_batch(reduction: str) -> None:
    """Nothing else would try it: the client holds no weights to verify stages with."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, target) * torch.rand(())

    with pytest.raises(CaptureError, match="loss_fn draws random numbers"):
        trainer(loss, CLASSES, num_microbatches=1, loss_reduction=reduction).plan()
